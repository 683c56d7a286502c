"""The named rules behind printed cells: from what the data says of a cell to the figure that follows.

Each rule is one sentence and one function. It raises ``LookupError`` where a cell asks it for
an input that it does not have, an error in our data that the tests find.
"""

from collections.abc import Callable
from fractions import Fraction

from memplan.documents.frozen_values import dataclass
from memplan.documents.printed_numbers import Interval, Value
from memplan.published import notes_accounting
from memplan.published.judged_tables import CellInputs


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the notes."""

    text: str  # What it does, in a sentence
    value: Callable[[CellInputs], Value]  # The figure of a cell


# ------------------------------------------------------------------ accountings
def _parts(accounting: str) -> Callable[[CellInputs], Value]:
    def value(inputs: CellInputs) -> Value:
        quantity = inputs.named("quantity")
        parts = notes_accounting.parts_of(accounting, inputs.named("config"))
        baseline = notes_accounting.parts_of(accounting, "fp16-adam").total
        figures = {
            "weights": Fraction(parts.weights),
            "gradients": Fraction(parts.gradients),
            "states": Fraction(parts.states),
            "total": parts.total,
            "improvement": baseline / parts.total,
        }
        return (figures[quantity],)

    return value


def _parameters(accounting: str) -> Callable[[CellInputs], Value]:
    def value(inputs: CellInputs) -> Value:
        return (notes_accounting.largest_parameters(accounting, inputs.named("config"), _memory_bytes(inputs)),)

    return value


def _memory_bytes(inputs: CellInputs) -> int:
    count = inputs.origin.count or 1
    return notes_accounting.card_gigabytes(notes_accounting.SCALE, inputs.named("gpu")) * count * notes_accounting.GB


def _first_card(inputs: CellInputs) -> Value:
    return notes_accounting.first_card(inputs.named("config"), inputs.counted("elements"))


def _largest_llama(inputs: CellInputs) -> Value:
    return notes_accounting.largest_llama(inputs.named("config"), _memory_bytes(inputs))


GPU_WORDS = {"rtx4090": "RTX 4090", "h100-sxm-80gb": "H100"}


def _minimum_gpus(inputs: CellInputs) -> Value:
    config, billions = inputs.named("config"), Fraction(inputs.counted("elements"))
    if inputs.named("quantity") == "bytes":
        return (notes_accounting.state_bytes(config, billions),)
    count, gpu = notes_accounting.minimum_gpus(config, billions)
    return f"{count}x {GPU_WORDS[gpu]}"


def _activations(inputs: CellInputs) -> Value:
    return (
        notes_accounting.activation_bytes(
            inputs.counted("batch"), inputs.counted("sequence"), inputs.named("quantity") == "full"
        ),
    )


def _traffic(inputs: CellInputs) -> Value:
    quantity, dtype = inputs.named("quantity"), inputs.named("dtype")
    if quantity == "ratio":
        return (notes_accounting.traffic_bytes("total", "fp32") / notes_accounting.traffic_bytes("total", dtype),)
    return (notes_accounting.traffic_bytes(quantity, dtype),)


def _buffer(inputs: CellInputs) -> Value:
    dtype = inputs.named("dtype")
    if inputs.named("quantity") == "ratio":
        return (notes_accounting.buffer_bytes("fp32") / notes_accounting.buffer_bytes(dtype),)
    return (notes_accounting.buffer_bytes(dtype),)


# ------------------------------------------------------------------ stored numbers
ELEMENT_BYTES: dict[str, Fraction] = {
    "adam": Fraction(8),
    "fp32": Fraction(4),
    "fp16": Fraction(2),
    "bf16": Fraction(2),
    "fp8": Fraction(1),
    "int8-block": notes_accounting.int8_bytes_per_element(),
}


def _stored(inputs: CellInputs) -> Value:
    return ((inputs.origin.elements or 1) * ELEMENT_BYTES[inputs.named("dtype")],)


def _int8(inputs: CellInputs) -> Value:
    saved = 1 - notes_accounting.int8_bytes_per_element() / 4
    figures: dict[str, tuple[Fraction, ...]] = {
        "block": (Fraction(notes_accounting.BLOCK_ELEMENTS),),
        "reduction": (saved,),
        "change": (-saved,),
        "saving": (
            (inputs.origin.elements or 1) * (ELEMENT_BYTES["adam"] - notes_accounting.int8_bytes_per_element()),
        ),
    }
    return figures[inputs.named("quantity")]


def _shape(inputs: CellInputs) -> Value:
    """Return the parameters of a shape without its norms."""
    shape = inputs.library.shapes[inputs.named("shape")]
    matrices = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)
    return (matrices + (1 if shape.tied else 2) * shape.vocab * shape.hidden,)


def _coefficient(inputs: CellInputs) -> Value:
    return (notes_accounting.YOU_JIACHENG[inputs.counted("iteration") - 1][inputs.named("quantity")],)


# ------------------------------------------------------------------ arithmetic on printed cells
def _repeats(inputs: CellInputs) -> Value:
    cell, values = inputs.printed(inputs.named("of"))
    return tuple(values) if inputs.origin.quantity == "number" else cell.printed


def _ratio(inputs: CellInputs) -> Value:
    return (inputs.printed(inputs.named("of"))[1][0] / inputs.printed(inputs.named("to"))[1][0],)


def _change(inputs: CellInputs) -> Value:
    before, after = inputs.printed(inputs.named("of"))[1][0], inputs.printed(inputs.named("to"))[1][0]
    return (after / before - 1,)


def _difference(inputs: CellInputs) -> Value:
    before, after = inputs.printed(inputs.named("of"))[1][0], inputs.printed(inputs.named("to"))[1][0]
    return (before - after, 1 - after / before)


def _ends(values: list[Fraction]) -> tuple[Fraction, Fraction]:
    return values[0], values[1] if len(values) > 1 else values[0]


def _sum(inputs: CellInputs) -> Value:
    terms = [_ends(inputs.printed(part.strip())[1][:2]) for part in inputs.named("of").split(" + ")]
    low, high = sum(term[0] for term in terms), sum(term[1] for term in terms)
    return (Fraction(low),) if low == high else (Fraction(low), Fraction(high))


def _share(inputs: CellInputs) -> Value:
    """Return how much less ``to`` is than ``of``, both printed as ranges."""
    before, after = (_ends(inputs.printed(inputs.named(name))[1][:2]) for name in ("of", "to"))
    shares = sorted(1 - after[end] / before[end] for end in (0, 1))
    return (Interval(shares[0], shares[1]),)


def _saving_of(inputs: CellInputs) -> Value:
    """Return the difference of the two cells of ``of``, and its share of the range ``to``."""
    before, after = (inputs.printed(part.strip())[1][0] for part in inputs.named("of").split(" - "))
    low, high = _ends(inputs.printed(inputs.named("to"))[1][:2])
    return (before - after, Interval((before - after) / high, (before - after) / low))


def _seconds(inputs: CellInputs) -> Value:
    """Return seconds and minutes of so many tokens at the printed rate ``to``."""
    seconds = inputs.counted("elements") / inputs.printed(inputs.named("to"))[1][0]
    return (seconds, seconds / 60)


def _decades(inputs: CellInputs) -> Value:
    """Return the powers of ten between the two exponents ``index`` and ``iteration``."""
    return (Fraction(inputs.counted("iteration") - inputs.counted("index")),)


def _halves(_: CellInputs) -> Value:
    """Return what two bytes and one save of four and two: the least and the most."""
    return (1 - ELEMENT_BYTES["fp8"] / ELEMENT_BYTES["fp16"], 1 - ELEMENT_BYTES["fp8"] / ELEMENT_BYTES["fp32"])


# ------------------------------------------------------------------ experiments
def _experiment(inputs: CellInputs) -> Value:
    """Return the interval of our record; empty where it has none."""
    measure = inputs.named("measure")
    interval = inputs.records.interval(inputs.named("record"), inputs.origin.select or {}, measure)
    if interval is None:
        return ()
    scale = Fraction(1, 100) if measure.endswith("_percent") else Fraction(1)
    return (Interval(interval.low * scale, interval.high * scale),)


CLOSE_PERCENT = 5
"""Up to so much more loss than fp32 a run is close; see memplan/lab/training/training_record.py."""


def _training_record(inputs: CellInputs) -> Value:
    """Return the verdict of a record of training, or of a row of an experiment by its gap."""
    if inputs.origin.select is None:
        return inputs.records.verdict(inputs.named("record"))
    interval = inputs.records.interval(inputs.named("record"), inputs.origin.select, "gap_percent")
    return "" if interval is None else "close" if interval.high <= CLOSE_PERCENT else "behind"


RULES: dict[str, Rule] = {
    "notes-scale": Rule(
        "Weights, gradients and states without scales, as notes-scale counts them.", _parts(notes_accounting.SCALE)
    ),
    "notes-scale-parameters": Rule(
        "0.80 of decimal GB over notes-scale's bytes per parameter.", _parameters(notes_accounting.SCALE)
    ),
    "notes-first-card": Rule(
        "The first card in the script's order whose GB hold nominal parameters x bytes per parameter (12, 3.06, 1.81) / 0.80.",
        _first_card,
    ),
    "notes-largest-llama": Rule(
        "The largest of 1B, 3B, 8B, 70B and 405B, nominal, within 0.80 of decimal GB at 12, 3.06 or 1.81 bytes.",
        _largest_llama,
    ),
    "notes-precision": Rule(
        "Weights (Q4 at 0.5), gradients and states without scales.", _parts(notes_accounting.PRECISION)
    ),
    "notes-precision-parameters": Rule(
        "0.85 of decimal GB less a buffer of 3 x 4096^2, over notes-precision's bytes per parameter.",
        _parameters(notes_accounting.PRECISION),
    ),
    "notes-min-gpus": Rule(
        "Nominal parameters x 12 or 3 bytes in decimal GB; up to 24 one RTX 4090, else one H100 for each 80.",
        _minimum_gpus,
    ),
    "notes-activations": Rule("(2 h s b + b a s^2) x 32 layers x 2 bytes, a third with checkpointing.", _activations),
    "notes-traffic": Rule("8 n^2 numbers for each iteration, n = 4096.", _traffic),
    "notes-buffer": Rule("Three matrices of 4096 x 4096.", _buffer),
    "stored": Rule("Numbers x bytes of each.", _stored),
    "int8-b128-fp32": Rule("One byte each and an fp32 scale for 128: 1 + 4/128.", _int8),
    "shape": Rule(
        "Embedding, head, and in each layer four matrices of attention and three of the feed-forward.", _shape
    ),
    "you-jiacheng": Rule("You Jiacheng's five coefficient triples.", _coefficient),
    "repeats": Rule("Repeats another printed cell.", _repeats),
    "ratio": Rule("Ratio of two printed cells.", _ratio),
    "change": Rule("Relative change between two printed cells.", _change),
    "difference": Rule("Difference of two printed cells, and its share of the first.", _difference),
    "sum": Rule("Sum of printed cells.", _sum),
    "share": Rule("Relative saving between two printed ranges.", _share),
    "saving-of": Rule("Difference of two printed cells, and its share of a printed range.", _saving_of),
    "seconds": Rule("Steps x batch x sequence over the printed tokens per second.", _seconds),
    "decades": Rule("Powers of ten between the ends of the range.", _decades),
    "narrower-dtype": Rule("FP8 in place of FP16, and of FP32.", _halves),
    "experiment": Rule("Our own run of the experiment, over several seeds.", _experiment),
    "training-record": Rule(
        "Our record of training with it, which bears it out from close to fp32 on (at most 5 % more loss).",
        _training_record,
    ),
}
"""Name -> rule."""

MEASURED = frozenset(("experiment",))
"""Rules whose figure is an interval of measurements, which the printed one has to lie in."""
