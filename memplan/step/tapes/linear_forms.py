"""Linear forms: bytes as coefficients of the quantities that batch and sequence length decide.

Every tensor of a training step has a size that is proportional to one of a few quantities. Sums of
such sizes stay closed forms, so a model is worked out once and evaluated for any batch and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from operator import add, mul

from memplan.units import round_up


class Quantity(IntEnum):
    """What a tensor's bytes are proportional to."""

    ONE = 0
    TOKENS = 1
    SCORES = 2
    PADDED_TOKENS = 3
    POSITIONS = 4
    CHUNK = 5
    SQUARE = 6
    SCORES_AND_SINK = 7
    SORTED_TOKENS = 8
    TOUCHED_ROWS = 9
    PARTIAL_SUMS = 10
    ALIGNED_TOKENS = 11


QUANTITIES: dict[Quantity, str] = {
    Quantity.ONE: "1",
    Quantity.TOKENS: "b*t",
    Quantity.SCORES: "b*t^2",
    Quantity.PADDED_TOKENS: "b*ceil128(t)",
    Quantity.POSITIONS: "t",
    Quantity.CHUNK: "ceil(b*t/chunks)",
    Quantity.SQUARE: "t^2",
    Quantity.SCORES_AND_SINK: "b*t*(t+1)",
    Quantity.SORTED_TOKENS: "n",
    Quantity.TOUCHED_ROWS: "min(n, V)",
    Quantity.PARTIAL_SUMS: "(n//10 + min(n, V))",
    Quantity.ALIGNED_TOKENS: "b*ceil32(t)",
}
"""Quantity -> how formulas write it; b is the micro-batch size, t the sequence length, V the vocabulary.

n is b*t where that is more than 3072, and nothing otherwise: beyond, the embedding's backward sorts.
"""

EMBEDDING_DIRECT_INDICES = 3072
EMBEDDING_ROWS_PER_PART = 10
"""Limits in aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu."""


class Part(IntEnum):
    """The components (DESIGN section 5) that a tape's tensors belong to."""

    ACTIVATIONS = 0
    LOGITS = 1
    TEMPORARIES = 2
    GRADIENTS = 3


WIDTH = len(Quantity)
Form = tuple[int, ...]
"""Bytes as coefficients of the quantities, for each part in turn: ``form[part * WIDTH + quantity]``."""

ZERO: Form = (0,) * (WIDTH * len(Part))


def quantities(batch: int, length: int, chunks: int, vocab: int) -> tuple[int, ...]:
    """Return the value of every quantity for one batch of sequences.

    Args:
        batch: Sequences.
        length: Tokens of each.
        chunks: Chunks of a chunked loss.
        vocab: Rows of the embedding.
    """
    tokens = batch * length
    rounded, aligned = batch * round_up(length, 128), batch * round_up(length, 32)
    chunk = -(-tokens // chunks)
    scores, square = tokens * length, length * length
    many = tokens if tokens > EMBEDDING_DIRECT_INDICES else 0
    touched = min(many, vocab)
    partial = many // EMBEDDING_ROWS_PER_PART + touched
    return (1, tokens, scores, rounded, length, chunk, square, scores + tokens, many, touched, partial, aligned)


def add_forms(*forms: Form) -> Form:
    """Return the sum of forms."""
    total = forms[0]
    for form in forms[1:]:
        total = tuple(map(add, total, form))
    return total


def scale_form(form: Form, factor: int) -> Form:
    """Return ``form`` times an integer."""
    return tuple(map(factor.__mul__, form))


def single_form(part: Part, quantity: Quantity, coefficient: int) -> Form:
    """Return the form of one tensor."""
    form = [0] * len(ZERO)
    form[part * WIDTH + quantity] = coefficient
    return tuple(form)


def part_bytes(form: Form, values: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of each part, given the values of the quantities."""
    return tuple(sum(map(mul, form[start : start + WIDTH], values)) for start in range(0, len(form), WIDTH))


def total_bytes(form: Form, values: Sequence[int]) -> int:
    """Return the bytes of all parts together."""
    return sum(part_bytes(form, values))


def with_totals(form: Form) -> Form:
    """Return the coefficients of all parts together, one for each quantity."""
    first, second = form[:WIDTH], form[WIDTH : 2 * WIDTH]
    third, fourth = form[2 * WIDTH : 3 * WIDTH], form[3 * WIDTH :]
    return tuple(map(add, map(add, first, second), map(add, third, fourth)))
