"""Newton-Schulz in every precision: error, difference from fp32 and time by iteration; buffers and traffic beside."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from memplan.catalog.catalog import Catalog, data_directory
from memplan.lab.experiment_record import Outcome, Progress, Row, interval
from memplan.lab.matrices.matrix_draws import (
    DTYPES,
    check_sizes,
    checked_names,
    clock,
    errors,
    gaussian,
    iterated,
    normalised,
)
from memplan.lab.matrices.precision_findings import findings
from memplan.muon.orthogonalisation.newton_schulz import WORKSPACES, newton_schulz_workspace_bytes
from memplan.muon.orthogonalisation.products import FORMATS, PLAIN, Products, Scaling, quantised_products
from memplan.muon.orthogonalisation.schedules import Coefficients, resolved_schedule

NATIVE = "int8-native"
PRECISIONS = ("fp32", "bf16", "fp16", "fp8-e4m3", "fp8-e5m2", "int8", NATIVE, "int4")
PRODUCTS = ("input", "gram", "all", "all-rows")
"""What is rounded: X alone, the factors of X X^T, those of all three products; with one scale a row."""

WIDTHS = (1024,)
OTHER_SEEDS = 2
OTHER_PRECISIONS = ("fp32", "bf16", NATIVE, "int8", "int4")
"""Of widths but the first, where only X is rounded: those that the notes' script ran as it says."""

LIMITS = (
    "Gaussian matrices. FP8, INT8 and INT4 are emulated in fp32, fp16 too on a CPU; int8-native is not. Times of what is "
    "emulated say nothing about devices that have it. A network's loss is another question than a matrix' error."
)
COMPUTED_WIDTH = 4096

_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8-e4m3": 1.0, "fp8-e5m2": 1.0, "int8": 1.0, "int4": 0.5}
_LARGEST = {"fp8-e4m3": 448.0, "fp8-e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
_MOVED = {"notes": 8, "fused": 10, "unfused": 15}
_FLOAT8 = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}

Step = Callable[[Tensor, Coefficients], Tensor]


def run(
    seeds: Sequence[int],
    progress: Progress,
    widths: Sequence[int] = WIDTHS,
    precisions: Sequence[str] = PRECISIONS,
    products: Sequence[str] = PRODUCTS,
    iterations: int = 5,
    schedule: str = "keller-jordan",
    device: str = "cpu",
) -> Outcome:
    """Orthogonalise Gaussian matrices in each precision, and return errors, differences and times.

    Args:
        seeds: One matrix each; widths but the first take ``OTHER_SEEDS``.
        widths: Sides of the square matrices; all but the first take ``OTHER_PRECISIONS``, and ``input`` only.
        precisions: Of ``PRECISIONS``; fp32 is always run, to be compared with.
        products: Of ``PRODUCTS``; precisions that torch multiplies by itself know ``input`` only.
        schedule: A name of ``SCHEDULES``.

    Raises:
        UnknownNameError: A name that is none.
        UnitError: A width or number of iterations out of range.
    """
    settings = {
        "widths": list(dict.fromkeys(widths)),
        "precisions": list(dict.fromkeys(name for name, _ in _ways(precisions, products))),
        "products": list(dict.fromkeys(products)),
        "iterations": iterations,
        "schedule": schedule,
        "matrix": "gaussian",
        "device": device,
    }
    check_sizes(widths, iterations, device)
    coefficients = resolved_schedule(schedule, iterations)
    values = defaultdict[tuple[str, str, int, int], list[tuple[float, ...]]](list)
    done = 0
    for width, chosen, ways in _runs(seeds, widths, precisions, products):
        for seed in chosen:
            matrix, reference = gaussian(width, width, seed, device), list[Tensor]()
            for precision, which in ways:
                for index, measured in enumerate(_course(matrix, precision, which, coefficients, reference), 1):
                    values[precision, which, index, width].append(measured)
                done += 1
                progress(done, f"{width}x{width}, seed {seed}, {precision}")
    rows = [_row(*key, schedule, group) for key, group in values.items()]
    computed = [*buffer_rows(COMPUTED_WIDTH), *traffic_rows(COMPUTED_WIDTH)]
    return Outcome("precision", settings, seeds, rows, findings(rows, computed), LIMITS, computed)


def parts(seeds: Sequence[int], widths: Sequence[int], precisions: Sequence[str], products: Sequence[str]) -> int:
    """Return how often ``run`` reports."""
    return sum(len(chosen) * len(ways) for _, chosen, ways in _runs(seeds, widths, precisions, products))


def _runs(
    seeds: Sequence[int], widths: Sequence[int], precisions: Sequence[str], products: Sequence[str]
) -> Iterator[tuple[int, Sequence[int], list[tuple[str, str]]]]:
    """Yield for each width the seeds and the pairs of precision and products."""
    for index, width in enumerate(dict.fromkeys(widths)):
        if index == 0:
            yield width, seeds, _ways(precisions, products)
        else:
            fewer = [name for name in precisions if name in OTHER_PRECISIONS]
            yield width, seeds[:OTHER_SEEDS], _ways(fewer, PRODUCTS[:1])


def _ways(precisions: Sequence[str], products: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of precision and products to run, fp32 first."""
    names = checked_names("precision", ["fp32", *precisions], PRECISIONS)
    which = checked_names("products", products, PRODUCTS)
    plain = [(name, "input") for name in names if name not in FORMATS]
    return plain + [(name, choice) for name in names if name in FORMATS for choice in which]


def rounded(x: Tensor, precision: str) -> Tensor:
    """Return ``x`` as the precision holds it with one scale for the whole matrix, in fp32.

    The largest element takes the largest code: 127, 7, 448 or 57344. The notes' code for INT8 and INT4.
    """
    scale = x.abs().max() / _LARGEST[precision]
    codes = x / scale
    return (codes.to(_FLOAT8[precision]).float() if precision in _FLOAT8 else codes.round()) * scale


def step_of(precision: str, which: str) -> Step:
    """Return one iteration in a precision.

    Args:
        precision: Of ``PRECISIONS``.
        which: Of ``PRODUCTS``.
    """
    if precision in DTYPES:
        return iterated
    if precision == NATIVE:
        return _native
    if which == "input":
        return lambda x, coefficients: iterated(rounded(x, precision), coefficients)
    chosen = ("gram",) if which == "gram" else ("gram", "square", "apply")
    scaling: Scaling = "row" if which == "all-rows" else "tensor"
    return _by_products(quantised_products(precision, chosen, scaling, native=False))


def _native(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Return an iteration whose ``X @ X.mT`` multiplies INT8 codes and adds them up in INT32, as the notes' script."""
    a, b, c = coefficients
    scale = x.abs().max() / 127
    codes = (x / scale).round().to(torch.int8)
    gram = torch._int_mm(codes, codes.mT).float() * (scale * scale)
    return a * x + (b * gram + c * (gram @ gram)) @ x


def _by_products(products: Products = PLAIN) -> Step:
    """Return an iteration of fp32 tensors whose three products are the given ones."""

    def step(x: Tensor, coefficients: Coefficients) -> Tensor:
        a, b, c = coefficients
        gram, mixed, result = x.new_empty(len(x), len(x)), x.new_empty(len(x), len(x)), torch.empty_like(x)
        products.gram(x, x.mT, gram)
        products.square(gram, gram, mixed, gram, b, c)
        products.apply(mixed, x, result, x, a)
        return result

    return step


def _course(
    matrix: Tensor, precision: str, which: str, schedule: Sequence[Coefficients], reference: list[Tensor]
) -> list[tuple[float, ...]]:
    """Return both errors, the difference from fp32 and the seconds so far, after each iteration.

    ``reference`` holds the iterates in fp32, and is filled by the first call, which is fp32's.
    """
    device, step = str(matrix.device), step_of(precision, which)
    x = normalised(matrix, DTYPES.get(precision, torch.float32))
    step(x, schedule[0])  # loads the kernels of this size, which takes longer than all iterations and is not timed
    seconds: list[float] = []
    measured = []
    for index, coefficients in enumerate(schedule):
        begin = clock(device)
        x = step(x, coefficients)
        seconds.append(clock(device) - begin)
        if len(reference) == index:
            reference.append(x)
        difference = float((x.float() - reference[index]).abs().max())
        measured.append((*errors(x), difference))
    return [(*values, elapsed) for values, elapsed in zip(measured, accumulate(seconds), strict=True)]


def _row(precision: str, which: str, count: int, width: int, schedule: str, group: Sequence[tuple[float, ...]]) -> Row:
    frobenius, largest, difference, seconds = (interval(values) for values in zip(*group, strict=True))
    return {
        "precision": precision,
        "products": which,
        "rows": width,
        "columns": width,
        "iterations": count,
        "schedule": schedule,
        "frobenius": frobenius,
        "largest_element": largest,
        "difference": difference,
        "seconds": seconds,
    }


def buffer_rows(width: int) -> list[Row]:
    """Return the temporary bytes of orthogonalising one square matrix, the notes' and those that are allocated.

    Formula:
        notes: ``3 n^2`` elements. memplan: ``newton_schulz_workspace_bytes``. ``torch.optim.Muon`` 2.13,
        measured: ``8mn + 4m^2`` bytes for fp32 gradients and ``6mn + 4m^2`` for bf16 ones.
    """
    square = width * width
    rows: list[Row] = []
    for precision, size in _BYTES.items():
        row: Row = {"table": "buffers", "precision": precision, "rows": width, "columns": width}
        row["notes_bytes"] = int(3 * square * size)
        if precision in DTYPES:
            for workspace in WORKSPACES:
                workspace_bytes = newton_schulz_workspace_bytes(
                    width, width, workspace=workspace, element_bytes=int(size)
                )
                row[f"{workspace}_bytes"] = workspace_bytes
        if precision in ("fp32", "bf16"):
            row["torch_muon_bytes"] = (12 if precision == "fp32" else 10) * square
        rows.append(row)
    return rows


def traffic_rows(width: int) -> list[Row]:
    """Return the bytes that an iteration on a square matrix moves, and its operations per byte.

    Formula:
        notes: 8 matrices of ``n^2`` elements. With sums inside the products (``addmm``): ``X X^T`` and ``bA + cAA``
        read two operands and write one result, ``aX + BX`` reads three: 10. Five sums and products on their own,
        each reading two and writing one: 15. Operations: ``6 n^3``, against dense arithmetic in bf16 over bandwidth,
        lowest and highest in the catalog.
    """
    square, operations = width * width, 6 * width**3
    rows: list[Row] = []
    for precision, size in _BYTES.items():
        row: Row = {"table": "traffic", "precision": precision, "rows": width, "columns": width}
        row |= {f"{name}_bytes": int(count * square * size) for name, count in _MOVED.items()}
        row |= {"operations": operations, "operations_per_byte": round(operations / row["fused_bytes"])}
        if precision == "bf16":
            row["gpu_operations_per_byte"] = _gpu_operations_per_byte()
        rows.append(row)
    return rows


def _gpu_operations_per_byte() -> list[int]:
    gpus = Catalog(data_directory()).gpus
    ratios = [
        gpu.dense_flops["bf16"] / gpu.bandwidth_bytes_per_second
        for gpu in (gpus[name] for name in gpus)
        if gpu.bandwidth_bytes_per_second and "bf16" in gpu.dense_flops
    ]
    return [round(min(ratios)), round(max(ratios))]
