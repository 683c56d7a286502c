"""Linear forms: bytes as coefficients of the quantities that batch and sequence length decide.

Every tensor of a training step has a size that is proportional to one of a few quantities. Sums of
such sizes stay closed forms, so a model is worked out once and evaluated for any batch and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from operator import add, mul
from typing import NamedTuple

from memplan.documents.frozen_values import dataclass
from memplan.model.gated_delta_net import CHUNK_TOKENS
from memplan.units import ceil_div, round_up


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
    PREDICTED_TOKENS = 12
    TILE_TOKENS = 13
    BLOCK_PAIRS = 14
    ROW_CHUNK = 15
    LAST_ROW_CHUNK = 16
    PADDED_SCORES = 17
    SEQUENCES = 18
    DELTA_CHUNKS = 19
    EARLIER_DELTA_CHUNKS = 20
    LAST_PREDICTED_ROWS = 21
    PADDED_SQUARE = 22
    ANSWER_TOKENS = 23
    ANSWERED_TOKENS = 24
    SHARD_TOKENS = 25
    NEXT_TILE_TOKENS = 26
    PATCHES = 27
    IMAGE_TOKENS = 28
    TABLE_ROWS = 29
    NEXT_CHUNK = 30
    BUCKETED_TOKENS = 31
    LAST_CHUNK = 32
    SCAN_CHUNKS = 33
    SCAN_BOUNDS = 34
    SCAN_PAIRS = 35
    SCAN_SQUARE = 36
    EXPERT_ROWS = 37
    DECODED_TOKENS = 38
    DECODED_POSITIONS = 39
    COLUMN_TOKENS = 40
    EXAMPLES = 41
    COMPARED = 42
    CACHED_TOKENS = 43


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
    Quantity.PREDICTED_TOKENS: "b*(t-1)",
    Quantity.TILE_TOKENS: "min(b*(t-1), 4096)",
    Quantity.BLOCK_PAIRS: "b*m*(m + 1)",
    Quantity.ROW_CHUNK: "b*r",
    Quantity.PADDED_SCORES: "b*t*ceil16(t)",
    Quantity.LAST_ROW_CHUNK: "b*(t - (ceil(t/r) - 1)*r)",
    Quantity.SEQUENCES: "b",
    Quantity.DELTA_CHUNKS: "b*ceil(t/64)",
    Quantity.EARLIER_DELTA_CHUNKS: "b*max(ceil(t/64) - 4, 0)",
    Quantity.LAST_PREDICTED_ROWS: "b*(t - 1 - (ceil(t/r) - 1)*r)",
    Quantity.PADDED_SQUARE: "t*ceil16(t)",
    Quantity.ANSWER_TOKENS: "b*c",
    Quantity.ANSWERED_TOKENS: "b*(c+1)",
    Quantity.SHARD_TOKENS: "b*t/tp",
    Quantity.NEXT_TILE_TOKENS: "min(max(b*(t-1) - 4096, 0), 4096)",
    Quantity.PATCHES: "b*p",
    Quantity.IMAGE_TOKENS: "b*i",
    Quantity.TABLE_ROWS: "p8192",
    Quantity.NEXT_CHUNK: "n2",
    Quantity.BUCKETED_TOKENS: "b*ceil128(t+1)",
    Quantity.LAST_CHUNK: "n3",
    Quantity.SCAN_CHUNKS: "b*s",
    Quantity.SCAN_BOUNDS: "b*(s+1)",
    Quantity.SCAN_PAIRS: "b*(s+1)^2",
    Quantity.SCAN_SQUARE: "(s+1)^2",
    Quantity.EXPERT_ROWS: "ceil(b*t*k/E)",
    Quantity.DECODED_TOKENS: "min(b*t, d)",
    Quantity.DECODED_POSITIONS: "min(t, d)",
    Quantity.COLUMN_TOKENS: "c*b*t",
    Quantity.EXAMPLES: "b",
    Quantity.COMPARED: "b*m",
    Quantity.CACHED_TOKENS: "b*l",
}
"""Quantity -> how formulas write it; b is the micro-batch size, t the sequence length, c its tokens that are generated, or the columns whose embeddings are compared, V the vocabulary.

tp is the number of GPUs that share matrices. m is the number of blocks of 128 tokens in a sequence; r is ceil(t/chunks), or how many of its tokens a loss takes at once.
n is b*t where that is more than 3072, and nothing otherwise: beyond, the embedding's backward sorts.
p8192 is the number of positions that a model has tables for, n2 that of tokens by which a second piece of a loss takes more, n3 those
that are left for the last of pieces with as many tokens each.
A token passes through k of E experts, which are as often chosen each. Of rows that are looked up in a coded table d are decoded at a time.
m is also how many anchors are compared with all other texts at a time, l how many tokens of a row its cache has, the last one with them. p is the number of patches of a row's images, i that of the tokens which they become. s is the number of chunks of a sequence that state
space layers scan.
"""

EMBEDDING_DIRECT_INDICES = 3072
EMBEDDING_ROWS_PER_PART = 10
"""Limits in aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu."""

LATE_CHUNKS = 3
"""Chunks of a gated delta network at the end of a sequence that are told one by one, as the first is; those between are alike."""

TILE_TOKENS = 4096
"""Tokens whose logits are formed together (``TOKEN_CHUNK_SIZE`` in trl/kernels/chunked_logprob.py, 1.16.0)."""


DECODED_ELEMENTS = 1 << 20
"""Elements of a coded weight that are decoded at a time, in whole rows (``DECODE_CHUNK`` in memplan/muon/weights/quantised.py)."""


class Part(IntEnum):
    """The components (DESIGN section 5) that a tape's tensors belong to."""

    ACTIVATIONS = 0
    LOGITS = 1
    TEMPORARIES = 2
    GRADIENTS = 3


Storage = tuple[Part, Quantity, int]
"""What a storage counts as, what its bytes are proportional to, and how many there are for each unit of that."""

Coefficients = tuple[int, ...]
"""Bytes for one of each quantity, in the order of :class:`Quantity`."""

NOTHING: Coefficients = (0,) * len(Quantity)


@dataclass(frozen=True, slots=True)
class Form:
    """Bytes of each component as a linear form in the quantities: forms add up, and are multiplied by integers.

    Example:
        >>> form = single_form(Part.LOGITS, Quantity.TOKENS, 3) + single_form(Part.GRADIENTS, Quantity.ONE, 5) * 2
        >>> form.coefficient(Part.LOGITS, Quantity.TOKENS), form.total_bytes(quantities(2, 100, (50, 8), Pieces(8)))
        (3, 610)
    """

    # Coefficients of each part in turn; where a part is empty, :data:`NOTHING` itself saves arithmetic.
    parts: tuple[Coefficients, ...]

    def __add__(self, other: Form) -> Form:
        """Return the bytes of both."""
        if other is ZERO:
            return self
        pairs = zip(self.parts, other.parts, strict=True)
        return Form(tuple([x if y is NOTHING else y if x is NOTHING else tuple(map(add, x, y)) for x, y in pairs]))

    def __sub__(self, other: Form) -> Form:
        """Return the bytes without those of ``other``."""
        return self + other * -1

    def __mul__(self, factor: int) -> Form:
        """Return the bytes of so many."""
        if factor == 1:
            return self
        return Form(tuple(c if c is NOTHING else tuple(map(factor.__mul__, c)) for c in self.parts))

    def of(self, part: Part) -> Coefficients:
        """Return the coefficients of one part."""
        return self.parts[part]

    def only(self, part: Part) -> Form:
        """Return the form of one part alone."""
        return Form(tuple(self.parts[own] if own is part else NOTHING for own in Part))

    def coefficient(self, part: Part, quantity: Quantity) -> int:
        """Return how many bytes of a part there are for each unit of a quantity."""
        return self.parts[part][quantity]

    def totals(self) -> Coefficients:
        """Return the coefficients of all parts together."""
        total = NOTHING
        for own in self.parts:
            if own is not NOTHING:
                total = own if total is NOTHING else tuple(map(add, total, own))
        return total

    def bytes(self, part: Part, values: Sequence[int]) -> int:
        """Return the bytes of one part, given the values of the quantities."""
        return _bytes(self.parts[part], values)

    def part_bytes(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of each part, given the values of the quantities."""
        return tuple([_bytes(coefficients, values) for coefficients in self.parts])

    def total_bytes(self, values: Sequence[int]) -> int:
        """Return the bytes of all parts together, given the values of the quantities."""
        return _bytes(self.totals(), values)


def _bytes(coefficients: Coefficients, values: Sequence[int]) -> int:
    return 0 if coefficients is NOTHING else sum(map(mul, coefficients, values))


ZERO = Form((NOTHING,) * len(Part))


def single_form(part: Part, quantity: Quantity, coefficient: int) -> Form:
    """Return the form of one tensor."""
    if not coefficient:
        return ZERO
    own, parts = list(NOTHING), list(ZERO.parts)
    own[quantity] = coefficient
    parts[part] = tuple(own)
    return Form(tuple(parts))


def constant_form(part: Part, size: int) -> Form:
    """Return so many bytes, whatever batch and length are."""
    return single_form(part, Quantity.ONE, size)


def fixed_form(form: Form, values: Sequence[int]) -> Form:
    """Return the bytes that a form has for these values of the quantities, whatever others it is asked for."""
    return sum((constant_form(part, form.bytes(part, values)) for part in Part), ZERO)


def answered_tokens(batch: int, length: int, answer: int) -> int:
    """Return the tokens that have labels, ``answer`` of each of ``batch`` sequences; 0 for all that have a token before them."""
    return batch * min(answer or length, length - 1)


class Pieces(NamedTuple):
    """What a loss is formed in."""

    number: int  # Chunks of all tokens
    tokens: int = 0  # Tokens of a chunk; 0 where that follows from their number
    row: int = 0  # Tokens of one sequence in a chunk, likewise
    next_rows: int = 0  # Rows by which a second piece takes more than the first


def quantities(
    batch: int,
    length: int,
    table: tuple[int, int],
    pieces: Pieces,
    answer: int = 0,
    ranks: int = 1,
    images: tuple[int, int] = (0, 0),
    table_rows: int = 0,
    scanned: int = 0,
    routed: tuple[int, int] = (0, 1),
) -> tuple[int, ...]:
    """Return the value of every quantity for one batch of sequences.

    Args:
        batch: Sequences.
        length: Tokens of each.
        table: Rows and columns of the embedding.
        pieces: What the loss is formed in.
        answer: Tokens of one sequence that have labels; 0 for all that have a token before them.
        ranks: GPUs that share each sequence between the matrices that they share.
        images: Patches of a sequence's images, and the tokens that they become.
        table_rows: Positions of rotary tables that have other rows than a sequence or the model.
        scanned: Tokens of a chunk that state space layers scan; 0 where there are none.
        routed: Experts that a token passes through, and how many there are.
    """
    tokens = batch * length
    rounded, aligned = batch * round_up(length, 128), batch * round_up(length, 32)
    chunk = pieces.tokens or ceil_div(tokens, pieces.number)
    scores, square = tokens * length, length * length
    blocks = -(-length // 128)
    pairs = batch * blocks * (blocks + 1)
    row = pieces.row or ceil_div(length, pieces.number)
    rows = -(-length // row)
    many = tokens if tokens > EMBEDDING_DIRECT_INDICES else 0
    touched, decoded = min(many, table[0]), max(DECODED_ELEMENTS // table[1], 1)
    answered = answered_tokens(batch, length, answer)
    tile = min(answered, TILE_TOKENS)
    delta = ceil_div(length, CHUNK_TOKENS)
    attended = (1, tokens, scores, rounded, length, chunk, square, scores + tokens)
    embedded = (many, touched, many // EMBEDDING_ROWS_PER_PART + touched, aligned)
    predicted = (tokens - batch, tile, pairs, batch * row, batch * (length - (rows - 1) * row))
    last = batch * (length - 1 - (rows - 1) * row)
    sequences = (tokens * round_up(length, 16), batch, batch * delta, batch * max(delta - LATE_CHUNKS - 1, 0), last)
    labelled = (length * round_up(length, 16), answered, answered + batch, tokens // ranks)
    ends = (min(answered - tile, TILE_TOKENS), batch * images[0], batch * images[1], table_rows, pieces.next_rows)
    bucketed = (batch * round_up(length + 1, 128), (tokens - batch - 1) % chunk + 1)
    layers = (*_chunks_scanned(batch, length, scanned), ceil_div(tokens * routed[0], routed[1]))
    looked_up = (min(tokens, decoded), min(length, decoded), tokens, batch, batch * batch, tokens)
    return attended + embedded + predicted + sequences + labelled + ends + bucketed + layers + looked_up


def with_columns(values: tuple[int, ...], columns: int, batch: int, length: int, together: int) -> tuple[int, ...]:
    """Return the values of the quantities of a forward, with those of all columns whose embeddings are compared.

    Args:
        columns: Texts of each example.
        batch: Examples; ``length``: tokens of each text.
        together: Anchors that are compared with all others at a time.
    """
    return (
        *values[: Quantity.COLUMN_TOKENS],
        columns * batch * length,
        batch,
        batch * together,
        values[Quantity.CACHED_TOKENS],
    )


def with_cached(values: Sequence[int], rows: int, tokens: int) -> tuple[int, ...]:
    """Return the values of the quantities of a forward of one token of each row, which attends to so many that are cached."""
    own = dict(enumerate(values))
    own |= {
        Quantity.SCORES: rows * tokens,
        Quantity.SCORES_AND_SINK: rows * (tokens + 1),
        Quantity.CACHED_TOKENS: rows * tokens,
    }
    own |= {Quantity.PADDED_SCORES: rows * round_up(tokens, 16), Quantity.PADDED_SQUARE: round_up(tokens, 16)}
    return tuple(own.values())


def _chunks_scanned(batch: int, length: int, tokens: int) -> tuple[int, ...]:
    """Return what state space layers scan, in chunks of so many tokens: chunks, their bounds, and pairs of bounds, of one row too."""
    scans = ceil_div(length, tokens) if tokens else 0
    return batch * scans, batch * (scans + 1), batch * (scans + 1) ** 2, (scans + 1) ** 2
