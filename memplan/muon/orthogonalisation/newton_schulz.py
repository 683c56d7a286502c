"""Orthogonalisation of matrices by odd polynomials, in a workspace of a chosen size.

With ``m <= n`` the sides of a matrix ``X``, one iteration maps ``X`` to ``a*X + (b*A + c*A@A) @ X``
where ``A = X @ X.mT``. ``newton_schulz_reference`` is that line; ``newton_schulz_`` does the same
in place, a chunk of columns at a time, so that nothing of size ``m*n`` is ever allocated.
"""

from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from memplan.muon.orthogonalisation.products import Products, default_products
from memplan.muon.orthogonalisation.schedules import Schedule
from memplan.muon.stores.chunk_loops import starts
from memplan.muon.stores.optimizer_errors import OptimizerError, unknown_choice

Workspace = Literal["min", "fast", "gram"]
WORKSPACES: tuple[Workspace, ...] = get_args(Workspace)
DEFAULT_CHUNK_COLUMNS = 512
DEFAULT_EPSILON = 1e-7

# The Gram iteration loses small singular values to rounding unless it goes back to X now and then,
# as https://github.com/Dao-AILab/gram-newton-schulz does. Rounding of R grows with the square of
# the slope at zero; measured in bf16, these limits keep it below the textbook loop's own error.
GRAM_STEPS = 2
GRAM_FIRST_SLOPE = 64.0

GRAM_FROM = 192
"""Least short side that a CPU iterates on inside a chunk: at 192 x 576 that takes 0.80 of the time, at 128 x 256 1.08."""


def newton_schulz_reference(
    matrix: Tensor, schedule: Schedule, dtype: torch.dtype = torch.bfloat16, epsilon: float = DEFAULT_EPSILON
) -> Tensor:
    """Return ``matrix`` with its singular values near one: the textbook loop, kept as the judge.

    Args:
        matrix: ``(..., rows, columns)``, any float dtype; not changed.
        schedule: One triple ``(a, b, c)`` for each iteration.
        dtype: Precision of every intermediate result.
        epsilon: Least norm to divide by, so that a zero matrix stays zero.

    Returns:
        A tensor of the same shape in ``dtype``.

    Source:
        https://kellerjordan.github.io/posts/muon/
    """
    transposed = matrix.shape[-2] > matrix.shape[-1]
    x: Tensor = matrix.to(dtype)
    x = x.mT if transposed else x
    x = x / torch.linalg.matrix_norm(x.float(), keepdim=True).clamp_min(epsilon).to(dtype)
    for a, b, c in schedule:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if transposed else x


def newton_schulz_(
    matrix: Tensor,
    schedule: Schedule,
    *,
    workspace: Workspace = "fast",
    chunk_columns: int = DEFAULT_CHUNK_COLUMNS,
    epsilon: float = DEFAULT_EPSILON,
    products: Products | None = None,
) -> Tensor:
    """Orthogonalise ``matrix`` in place and return it.

    Args:
        matrix: ``(rows, columns)``, or ``(batch, rows, columns)`` for matrices of one shape;
            fp32, bf16 or fp16, which is the precision of every product.
        schedule: One triple ``(a, b, c)`` for each iteration.
        workspace: ``min`` keeps one square matrix and a chunk of twice the columns, at ``6*m*m*n`` operations
            for each iteration, and is ``fast`` where a chunk is no less than a square; ``fast`` two and one chunk, at
            ``4*m*m*n + 2*m**3``; ``gram`` four and one: it iterates on the square matrix, which is the fastest where
            ``n >= 2*m``, and is ``fast`` elsewhere. By default products a CPU iterates so for every choice where two
            of the four fit into the chunk, from ``m = GRAM_FROM`` on.
        chunk_columns: Columns of the longer side that are multiplied at a time, at least 1.
        epsilon: Least norm to divide by.
        products: Kernels; by default the fastest known for the device.

    Raises:
        OptimizerError: If the shape or a choice is not one of the above.
    """
    checked_workspace(workspace, chunk_columns)
    if matrix.ndim not in (2, 3):
        raise OptimizerError(f"Newton-Schulz takes two or three dimensions, got shape {tuple(matrix.shape)}")
    x = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    short, long = x.shape[-2:]
    width = min(chunk_columns, long)
    fits = products is None and matrix.device.type == "cpu" and short >= GRAM_FROM and width >= 2 * short
    products = products or default_products(matrix)
    _normalise_(x, epsilon)
    if workspace == "gram" and _is_long(short, long):
        _gram(x, schedule, width, products)
    elif fits:
        _gram(x, schedule, width, products, within_chunk=True)
    elif workspace == "min" and chunk_columns < short:
        _minimal(x, schedule, min(2 * chunk_columns, long), products)
    else:
        _fast(x, schedule, width, products)
    return matrix


def newton_schulz_workspace_bytes(
    rows: int,
    columns: int,
    *,
    workspace: Workspace = "fast",
    chunk_columns: int = DEFAULT_CHUNK_COLUMNS,
    element_bytes: int = 2,
    batch: int = 1,
) -> int:
    """Return what ``newton_schulz_`` allocates, beside the matrix itself.

    Formula:
        ``element_bytes * batch * (squares * m*m + m * min(chunks * c, n))`` with ``m <= n`` the sides and
        ``c = chunk_columns``; squares and chunks are 1 and 2 for ``min`` where ``c < m``, 2 and 1 for ``fast``, 4 and 1
        for ``gram`` where ``n >= 2m``. In bf16, of long matrices: ``2m^2 + 4mc``, ``4m^2 + 2mc``, ``8m^2 + 2mc``.
        The norms of the rows, ``batch * (rows * (element_bytes + 4) + 4)``, are gone when it starts.

    Args:
        rows: Rows of one matrix, at least 1.
        columns: Columns of one matrix, at least 1.
        workspace: As given to ``newton_schulz_``.
        chunk_columns: As given to ``newton_schulz_``.
        element_bytes: Bytes of one element of the matrix.
        batch: Matrices of that shape that are orthogonalised together.
    """
    checked_workspace(workspace, chunk_columns)
    short, long = min(rows, columns), max(rows, columns)
    minimal, doubled = workspace == "min" and chunk_columns < short, workspace == "gram" and _is_long(short, long)
    squares, chunks = (1, 2) if minimal else (4, 1) if doubled else (2, 1)
    width = min(chunks * chunk_columns, long)
    iteration_bytes = element_bytes * batch * (squares * short * short + short * width)
    return max(iteration_bytes, batch * (rows * (element_bytes + 4) + 4))


def checked_workspace(workspace: str, chunk_columns: int) -> None:
    """Raise unless ``workspace`` is known and ``chunk_columns`` is at least 1."""
    if workspace not in WORKSPACES:
        raise unknown_choice("Newton-Schulz workspace", workspace, WORKSPACES)
    if isinstance(chunk_columns, bool) or not isinstance(chunk_columns, int) or chunk_columns < 1:
        raise OptimizerError(f"chunk_columns: expected an integer of at least 1, got {chunk_columns!r}")


def _is_long(short: int, long: int) -> bool:
    """Whether the Gram iteration takes fewer operations: ``8n + 28m`` against ``20n + 10m``, times ``m*m``."""
    return long >= 2 * short


def _normalise_(x: Tensor, epsilon: float) -> None:
    """Divide each matrix by its Frobenius norm, an upper bound of its largest singular value.

    Row by row first, rows as they lie in memory: a norm in fp32 of a whole bf16 matrix would cast all of
    it, and CUDA's sum across rows keeps 8 bytes an element (134 MB for 8192 x 2048, seen on an H200).
    """
    rows = torch.linalg.vector_norm(x.mT if x.stride(-2) == 1 else x, dim=-1)
    norm = torch.linalg.vector_norm(rows.float(), dim=-1).clamp_(min=epsilon)
    if x.ndim == 2:
        x.div_(norm)
    else:
        for matrix, scale in zip(x, norm, strict=True):
            matrix.div_(scale)


def _square(x: Tensor) -> Tensor:
    """Return an empty square matrix on the short side of ``x``."""
    return x.new_empty((*x.shape[:-2], x.shape[-2], x.shape[-2]))


def _chunk(x: Tensor, columns: int) -> Tensor:
    """Return an empty chunk of ``columns`` columns, laid out in memory as ``x`` is."""
    lead, short = x.shape[:-2], x.shape[-2]
    if x.stride(-2) == 1:
        return x.new_empty((*lead, columns, short)).mT
    return x.new_empty((*lead, short, columns))


def _squares_within(chunk: Tensor) -> tuple[Tensor, Tensor]:
    """Return two square matrices on the short side of ``x`` in the memory of its chunk."""
    short = chunk.shape[-2]
    flat = (chunk.mT if chunk.stride(-2) == 1 else chunk).flatten()
    shape = (2, *chunk.shape[:-2], short, short)
    first, second = flat[: prod(shape)].view(shape)
    return first, second


def _minimal(x: Tensor, schedule: Schedule, width: int, products: Products) -> None:
    """Iterate with ``A`` alone: a chunk becomes ``b*X + c*A@X``, and ``X`` then ``a*X + A @ chunk``."""
    gram, chunk = _square(x), _chunk(x, width)
    for a, b, c in schedule:
        products.gram(x, x.mT, gram)
        for start in starts(x.shape[-1], width):
            part = x[..., start : start + width]
            mixed = chunk[..., : part.shape[-1]]
            products.apply(gram, part, mixed, part, b, c)
            products.apply(gram, mixed, part, part, a)


def _fast(x: Tensor, schedule: Schedule, width: int, products: Products) -> None:
    """Iterate with ``A`` and ``B = b*A + c*A@A``: a chunk goes through ``B`` once."""
    gram, mixed, chunk = _square(x), _square(x), _chunk(x, width)
    given = x
    for a, b, c in schedule:
        products.gram(x, x.mT, gram)
        products.square(gram, gram, mixed, gram, b, c)
        if chunk.shape == x.shape:  # no copy back: the two take turns
            products.apply(mixed, x, chunk, x, a)
            x, chunk = chunk, x
        else:
            _apply_(x, mixed, a, chunk, products)
    if x is not given:
        given.copy_(x)


def _gram(x: Tensor, schedule: Schedule, width: int, products: Products, within_chunk: bool = False) -> None:
    """Iterate on ``R = X @ X.mT`` and gather the product of polynomials ``q + Q``, applied at the end.

    With ``P = a + B``, ``B = b*R + c*R@R``: ``R`` becomes ``P@R@P``, and ``q + Q`` becomes
    ``a*q + (q*B + a*Q + B@Q)``. Keeping the multiple ``q`` of the identity apart spares the
    diagonal a rounding. All matrices are polynomials of one ``R``: they commute. Two of them are done with
    before the chunk is used, and lie in its memory where they fit.
    """
    gathered, spare, chunk = _square(x), _square(x), _chunk(x, width)
    gram, mixed = _squares_within(chunk) if within_chunk else (_square(x), _square(x))
    for part in gram_segments(schedule):
        products.gram(x, x.mT, gram)
        identity = 1.0
        for step, (a, b, c) in enumerate(part):
            products.square(gram, gram, mixed, gram, b, c)
            if step == 0:
                gathered.copy_(mixed)
            else:
                products.square(mixed, gathered, spare, gathered, a)
                spare.add_(mixed, alpha=identity)
                gathered, spare = spare, gathered
            identity *= a
            if step + 1 < len(part):
                products.square(gram, mixed, spare, gram, a)
                products.square(mixed, spare, gram, spare, a)
        _apply_(x, gathered, identity, chunk, products)


def gram_segments(schedule: Schedule) -> list[Schedule]:
    """Return ``schedule`` cut where the Gram iteration goes back to ``X``.

    At first, while ``X`` is small, as many steps as keep the slope at zero within
    ``GRAM_FIRST_SLOPE``; later, with singular values near one, ``GRAM_STEPS`` at a time.
    """
    first, slope = 0, 1.0
    while first < len(schedule) and (first == 0 or slope * schedule[first][0] <= GRAM_FIRST_SLOPE):
        slope *= schedule[first][0]
        first += 1
    rest = range(first, len(schedule), GRAM_STEPS)
    return [schedule[:first], *(schedule[start : start + GRAM_STEPS] for start in rest)]


def _apply_(x: Tensor, symmetric: Tensor, a: float, chunk: Tensor, products: Products) -> None:
    """Replace ``X`` by ``a*X + S@X``, a chunk of columns at a time."""
    width = chunk.shape[-1]
    for start in starts(x.shape[-1], width):
        part = x[..., start : start + width]
        result = chunk[..., : part.shape[-1]]
        products.apply(symmetric, part, result, part, a)
        part.copy_(result)
