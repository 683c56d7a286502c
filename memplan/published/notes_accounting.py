"""The rules that the notes count by, as exact functions. They are theirs, not memplan's.

Three of them contradict each other: ``notes-scale`` uses 0.80 of a card, ``notes-precision`` 0.85
less a buffer, ``notes-min-gpus`` all of it. All take decimal gigabytes from the name on the box and
charge every parameter alike, without scales, embeddings, activations or context.

Source:
    https://github.com/SQCU/pfhe/tree/5494a6a: notes/2025-12-29-max-trainable-scale.md with
    scripts/max_scale_analysis.py, and notes/2025-12-29-newton-schulz-precision.md with
    scripts/memory_analysis_ns_precision.py and scripts/benchmark_ns_precision.py.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import cache

from memplan.catalog.catalog import data_directory
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import load_document
from memplan.documents.schemas import build
from memplan.errors import InvalidFileError, UnknownNameError, match_hint
from memplan.units import ceil_div

FILE = "configs/notes_rules.yaml"


@dataclass(frozen=True, slots=True)
class NotesCard:
    """A card of the notes, or several as one."""

    gigabytes: int  # Decimal, as on the box, of all of them
    gpu: str | None = None  # In the catalog
    count: int = 1


@dataclass(frozen=True, slots=True)
class Charge:
    """Bytes per parameter, as fractions in text."""

    weights: str
    gradients: str
    states: str

    @property
    def total(self) -> Fraction:
        """Sum of the parts."""
        return Fraction(self.weights) + Fraction(self.gradients) + Fraction(self.states)


@dataclass(frozen=True, slots=True)
class NotesRules:
    """Tables of the notes."""

    cards: Mapping[str, NotesCard]  # By the notes' name, in their order
    recommended: tuple[str, ...]  # GPUs of the catalog that they recommend something for
    models: Mapping[str, str]  # Nominal size, such as ``8B``, and the catalog's model
    charges: Mapping[str, Mapping[str, Charge]]  # Accounting, and what it charges each config that it knows

    @property
    def gigabytes(self) -> dict[str, int]:
        """Decimal gigabytes of each single card, by its name in the catalog."""
        singles = (card for card in self.cards.values() if card.count == 1)
        return {card.gpu: card.gigabytes for card in singles if card.gpu is not None}


@cache
def notes_rules() -> NotesRules:
    """Return the tables; they ship with memplan, and the tests validate them."""
    return build(NotesRules, load_document(data_directory() / FILE).data)


GB = 10**9
BILLION = 10**9

SCALE, PRECISION, MINIMUM_GPUS = "notes-scale", "notes-precision", "notes-min-gpus"
ACCOUNTINGS: dict[str, str] = {
    SCALE: "0.80 of decimal GB over bytes per parameter without scales (Q4 0.5625, IQ3 0.31, IQ2 0.25)",
    PRECISION: "0.85 of decimal GB less one Newton-Schulz buffer of 3 x 4096^2, over bytes per parameter with Q4 at 0.5",
    MINIMUM_GPUS: "all of the card's decimal GB over bytes per parameter with Q4 at 0.5, nominal model sizes",
}
"""Accounting -> what it does, in a phrase."""


def parts_of(accounting: str, config: str) -> Charge:
    """Return the bytes per parameter that an accounting charges a config with.

    Raises:
        UnknownNameError: The notes say nothing of the config; the message has those that they know.
    """
    known = notes_rules().charges[accounting]
    if config not in known:
        raise UnknownNameError(
            f"accounting {accounting}: the notes have no rule for config {config!r}; they have {', '.join(known)}"
        )
    return known[config]


def card_gigabytes(accounting: str, gpu: str) -> int:
    """Return the decimal gigabytes of a card of the notes.

    Raises:
        UnknownNameError: They have no such card.
    """
    sizes = notes_rules().gigabytes
    if gpu not in sizes:
        hint = match_hint(gpu, sizes)
        raise UnknownNameError(
            f"accounting {accounting}: the notes have no GPU {gpu!r}{hint}; they have {', '.join(sizes)}"
        )
    return sizes[gpu]


# ------------------------------------------------------------------ largest parameter counts
USABLE: dict[str, Fraction] = {SCALE: Fraction("0.80"), PRECISION: Fraction("0.85"), MINIMUM_GPUS: Fraction(1)}
"""Accounting -> share of the card that it uses."""

BUFFER_SIDE, FP16_BYTES = 4096, 2
DTYPE_BITS: dict[str, int] = {"fp32": 32, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def buffer_bytes(dtype: str) -> Fraction:
    """Return the notes' Newton-Schulz buffer: three matrices of 4096 x 4096.

    Formula:
        ``3 * 4096^2 * bits / 8``
    """
    return Fraction(3 * BUFFER_SIDE**2 * DTYPE_BITS[dtype], 8)


def largest_parameters(accounting: str, config: str, memory_bytes: int) -> Fraction:
    """Return the most parameters that an accounting lets into memory.

    Formula:
        ``(usable * memory - buffer) / bytes_per_parameter``. Only ``notes-precision`` has a buffer:
        in fp32 with FP16 weights, Adam too, and in bf16 with Q4 weights.

    Args:
        accounting: One of :data:`ACCOUNTINGS`.
        memory_bytes: Decimal gigabytes of all cards together, in bytes.
    """
    parts = parts_of(accounting, config)
    buffer = Fraction(0)
    if accounting == PRECISION:
        buffer = buffer_bytes("fp32" if Fraction(parts.weights) == FP16_BYTES else "bf16")
    return (USABLE[accounting] * memory_bytes - buffer) / parts.total


# ------------------------------------------------------------------ what fits where
FITS_TOTALS: dict[str, int] = {"fp16-adam": 2, "tier1": 2, "tier3": 2}
"""Config -> decimals that its bytes per parameter are cut to in the tables of what fits where."""


def _fits_total(config: str) -> Fraction:
    return Fraction(round(parts_of(SCALE, config).total, FITS_TOTALS[config]))


def first_card(config: str, billions: int) -> str:
    """Return the first card of the script's list that holds a nominal size, or ``>640GB``.

    Formula:
        The first with ``GB * 10^9 >= billions * 10^9 * bytes_per_parameter / 0.80``.
    """
    needed = billions * BILLION * _fits_total(config) / USABLE[SCALE]
    return next((name for name, card in notes_rules().cards.items() if card.gigabytes * GB >= needed), ">640GB")


def largest_llama(config: str, memory_bytes: int) -> str:
    """Return the largest nominal Llama that ``0.80 * memory / bytes_per_parameter`` holds."""
    most = USABLE[SCALE] * memory_bytes / _fits_total(config)
    fitting = [size for size in notes_rules().models if int(size.removesuffix("B")) * BILLION <= most]
    return fitting[-1] if fitting else "< 1B"


def state_bytes(config: str, billions: Fraction) -> Fraction:
    """Return what ``notes-min-gpus`` charges a nominal size with.

    Formula:
        ``billions * 10^9 * bytes_per_parameter``
    """
    return billions * BILLION * parts_of(MINIMUM_GPUS, config).total


def minimum_gpus(config: str, billions: Fraction) -> tuple[int, str]:
    """Return the GPUs that ``notes-min-gpus`` says a nominal size needs: their number, their catalog name.

    Formula:
        One RTX 4090 up to 24 GB; beyond, ``ceil(bytes / 80 GB)`` H100.

    Raises:
        InvalidFileError: A size that is not positive.
    """
    if billions <= 0:
        raise InvalidFileError([f"accounting {MINIMUM_GPUS}: expected a positive nominal size, got {billions}"])
    needed = state_bytes(config, billions)
    if needed <= card_gigabytes(MINIMUM_GPUS, "rtx4090") * GB:
        return 1, "rtx4090"
    size = Fraction(needed, card_gigabytes(MINIMUM_GPUS, "h100-sxm-80gb") * GB)
    return ceil_div(size.numerator, size.denominator), "h100-sxm-80gb"


# ------------------------------------------------------------------ activations and traffic
def activation_bytes(batch: int, sequence: int, checkpointed: bool) -> Fraction:
    """Return the notes' activation memory of Llama-7B in FP16.

    Formula:
        ``(2 h s b + b a s^2) * L * 2`` with L = 32, h = 4096, a = 32; a third of it with checkpointing.
    """
    layers, hidden, heads = 32, 4096, 32
    whole = (2 * hidden * sequence * batch + batch * heads * sequence**2) * layers * 2
    return Fraction(whole, 3 if checkpointed else 1)


def traffic_bytes(quantity: str, dtype: str) -> Fraction:
    """Return the notes' memory traffic of one Newton-Schulz iteration at 4096 x 4096.

    Formula:
        A matrix is ``n^2 * bits / 8``; an iteration moves ``2 X + 4 A + 2 X``.
    """
    matrix = Fraction(BUFFER_SIDE**2 * DTYPE_BITS[dtype], 8)
    return {"matrix": matrix, "total": 8 * matrix}[quantity]


# ------------------------------------------------------------------ 8-bit momentum
BLOCK_ELEMENTS, SCALE_BYTES = 128, 4


def int8_bytes_per_element() -> Fraction:
    """Return the bytes of an element of 8-bit momentum: a code, and an fp32 scale for each 128."""
    return 1 + Fraction(SCALE_BYTES, BLOCK_ELEMENTS)


YOU_JIACHENG: tuple[Mapping[str, Fraction], ...] = tuple(
    {name: Fraction(text) for name, text in zip("abc", row.split(), strict=True)}
    for row in (
        "4.0848 -6.8946 2.9270",
        "3.9505 -6.3029 2.6377",
        "3.7418 -5.5913 2.3037",
        "2.8769 -3.1427 1.2046",
        "2.8366 -3.0525 1.2012",
    )
)
"""Coefficients of five iterations, https://x.com/YouJiacheng/status/1893704552689303901."""
