"""Predicted, traced and measured side by side, with the tolerance of each comparison."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from memplan.measure.measured import Measurement
from memplan.measure.records.prediction import Prediction
from memplan.measure.task import Task
from memplan.model.spec import MixtureOfExperts
from memplan.units import MIB

Compared = Literal["predicted", "traced"]

STATES = ("weights", "master_weights", "gradients", "optimizer_states", "host", "buffers")
TOTALS = ("requested", "allocated", "reserved", "device")
SEGMENTS = ("reserved", "device")
"""Totals that are no error on a card of limited memory: of 24 runs one held 10.6 % more than it needed to."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a measurement may be from what was said: a share, and bytes besides."""

    share: Fraction
    bytes: int
    reason: str

    def of(self, size: int) -> int:
        """Return the tolerance in bytes for a figure of ``size`` bytes."""
        return size * self.share.numerator // self.share.denominator + self.bytes


HOST_COUNTED = "states in host memory are counted in, since the CPU's allocator cannot tell them from the device's"
EXACT = Tolerance(Fraction(0), 0, "distinct storages are counted: equal to the byte")
CPU_PEAK = Tolerance(
    Fraction(1, 10_000), 0, "step counters and random-number states lie on the CPU and are in no trace: 0.01 %"
)
CPU_NARROW = Tolerance(
    Fraction(1, 1_000), 2_300_000, "oneDNN's 16-bit products take scratch memory of up to 2.2 MiB: 0.1 % besides"
)
RANDOM_STATE_BYTES = 5_056
"""What checkpointing keeps of each layer it recomputes: the CPU generator's state (``torch.get_rng_state()``, v2.13.0)."""
CPU_FORMULA = Tolerance(Fraction(1, 1_000), 0, "the formula follows the same kernels: 0.1 %")
CUDA: Mapping[str, Tolerance] = {
    "requested": Tolerance(
        Fraction(1, 10_000), 0, "trace with cuBLAS's workspaces; what sorting takes is left out: 0.01 %"
    ),
    "allocated": Tolerance(
        Fraction(1, 200), 0, "simulated allocator; places of equal rank are the driver's choice: 0.5 %"
    ),
    "reserved": Tolerance(Fraction(3, 100), 0, "simulated allocator, segments below or above those before: 3 %"),
    "device": Tolerance(Fraction(3, 100), 0, "segments and measured context: 3 %"),
}
CUDA_FORMULA = Tolerance(
    Fraction(1, 1_000),
    2 * MIB,
    "the formula leaves out cuBLASLt's workspace, 1 MiB a thread, and small reductions: 0.1 % besides",
)
SIMULATOR = Tolerance(
    Fraction(1, 100), 0, "this run's own memory history through the simulated allocator: its error alone, 1 %"
)
CUDA_INSTANT = Tolerance(Fraction(1, 200), 0, "as the requested peak: 0.5 %")
CUDA_MIXTURE_FORWARD = Tolerance(
    Fraction(1, 100),
    0,
    "1 % after forward: measured before experts were scaled in fp32, as their family does; to be measured again",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    component: str  # A component, a total, or ``instant: NAME``
    predicted_bytes: int | None
    traced_bytes: int | None
    measured_bytes: int
    compared: Compared  # Whether the measurement is held against the formula or the trace
    difference_bytes: int  # Measured less that
    tolerance_bytes: int
    agrees: bool
    reason: str


def rows_of(task: Task, prediction: Prediction, measurement: Measurement) -> list[Row]:
    """Return every comparison that the device can be measured for.

    On the CPU the formula, which knows CUDA's kernels, is held against the measured peak only where
    both run the same operations: attention and norms step by step, and no dropout.
    """
    boundary = list(_boundary(task, prediction, measurement)) if task.capacity_bytes else []
    if measurement.status == "out of memory":
        return boundary
    return [
        *_states(prediction, measurement),
        *_totals(task, prediction, measurement),
        *_simulator(measurement),
        *_instants(task, prediction, measurement),
        *boundary,
    ]


def rows_of_ranks(task: Task, predictions: Sequence[Prediction], measurements: Sequence[Measurement]) -> list[Row]:
    """Return every comparison of one process, or of several: a row for all of them that have it, where it is the same."""
    ranks: dict[str, list[int]] = {}
    ranks_of: dict[Row, list[int]] = {}
    for rank, (prediction, measurement) in enumerate(zip(predictions, measurements, strict=True)):
        for row in rows_of(task, prediction, measurement):
            ranks.setdefault(row.component, []).append(rank)
            ranks_of.setdefault(row, []).append(rank)
    order = list(ranks)
    rows = sorted(ranks_of.items(), key=lambda item: (order.index(item[0].component), item[1]))
    return [row if own == ranks[row.component] else _of_ranks(row, own) for row, own in rows]


def _of_ranks(row: Row, ranks: Sequence[int]) -> Row:
    named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return replace(row, component=f"{row.component}, {named}")


def _boundary(task: Task, prediction: Prediction, measurement: Measurement) -> Iterator[Row]:
    """Yield whether a run on a card of limited memory went as predicted: a false FITS disagrees."""
    upper, capacity, ran = prediction.totals["upper"], task.capacity_bytes, measurement.status == "measured"
    if not ran:
        reason = "ran out of memory with that much: the plan's upper end must be above it"
        yield Row(
            component="boundary",
            predicted_bytes=upper,
            traced_bytes=None,
            measured_bytes=capacity,
            compared="predicted",
            difference_bytes=capacity - upper,
            tolerance_bytes=0,
            agrees=upper > capacity,
            reason=reason,
        )
    traced = prediction.traced_totals["device"]
    reason = "the simulated allocator survives where the run did, and only there, with 1 % of the memory more or less"
    agrees = prediction.survives == ran
    yield Row(
        component="boundary, simulator",
        predicted_bytes=None,
        traced_bytes=traced,
        measured_bytes=capacity,
        compared="traced",
        difference_bytes=capacity - traced,
        tolerance_bytes=0,
        agrees=agrees,
        reason=reason,
    )


def _row(
    name: str, predicted: int | None, traced: int | None, measured: int, compared: Compared, tolerance: Tolerance
) -> Row:
    said = predicted if compared == "predicted" else traced
    assert said is not None
    allowed, difference = tolerance.of(said), measured - said
    agrees = abs(difference) <= allowed
    return Row(
        component=name,
        predicted_bytes=predicted,
        traced_bytes=traced,
        measured_bytes=measured,
        compared=compared,
        difference_bytes=difference,
        tolerance_bytes=allowed,
        agrees=agrees,
        reason=tolerance.reason,
    )


def _states(prediction: Prediction, measurement: Measurement) -> Iterator[Row]:
    for name in STATES:
        measured, predicted = measurement.components.get(name, 0), prediction.components.get(name, 0)
        moved = name == "optimizer_states" and "host" in prediction.components
        if measured or predicted or moved:
            traced = prediction.traced_components.get(name)
            compared: Compared = "traced" if prediction.holds_less and traced is not None else "predicted"
            yield _row(name, predicted, traced, measured, compared, EXACT)


def _totals(task: Task, prediction: Prediction, measurement: Measurement) -> Iterator[Row]:
    for name in TOTALS:
        if name not in measurement.totals or (task.capacity_bytes and name in SEGMENTS):
            continue
        measured = measurement.totals[name]
        predicted, traced = prediction.totals[name], prediction.traced_totals[name]
        if task.device == "cuda":
            yield _row(name, predicted, traced, measured, "traced", CUDA[name])
            if name == "requested":
                yield _row(f"{name}, formula", predicted, traced, measured, "predicted", CUDA_FORMULA)
            continue
        yield _row(name, predicted, traced, measured, "traced", _counted(task, CPU_PEAK))
        # Whether the CPU build runs what the formula counts for CUDA. There dropout keeps other masks, and offloaded
        # states pass through two buffers where the CPU has one.
        profile, given = task.setup.profile, task.setup.config.dropout
        spec = task.model.spec
        dropout = max(spec.dropout, spec.attention_dropout) if given is None else given
        same_operations = (
            profile.attention == "math"
            and profile.norm == "composite"
            and not dropout
            and not task.setup.offloads_states
        )
        if same_operations and prediction.rank == 0:
            yield _row(f"{name}, formula", predicted, traced, measured, "predicted", _counted(task, CPU_FORMULA))


def _simulator(measurement: Measurement) -> Iterator[Row]:
    """Yield how far the simulator is off when it is fed what really happened: the rest is the trace's error."""
    history = measurement.counters.get("history")
    if history:
        simulated, measured = history["simulated_reserved_peak_bytes"], history["measured_reserved_peak_bytes"]
        yield _row("reserved, simulator alone", None, simulated, measured, "traced", SIMULATOR)


def _instants(task: Task, prediction: Prediction, measurement: Measurement) -> Iterator[Row]:
    for name, measured in measurement.instants.items():
        traced = prediction.traced_instants.get(name)
        if traced is None:
            continue
        predicted = prediction.instants.get(name)
        tolerance = instant_tolerance(task, name, onednn=bool(measurement.counters.get("onednn", True)))
        yield _row(f"instant: {name}", predicted, traced, measured, "traced", tolerance)


def instant_tolerance(task: Task, name: str, *, onednn: bool) -> Tolerance:
    """Return the tolerance of the need at the instant called ``name``.

    Args:
        onednn: Whether a CPU's products may have been oneDNN's, as in records that do not say so.
    """
    if task.device == "cuda":
        if name != "forward":
            return CUDA_INSTANT
        parts = [run.layer.feed_forward for run in task.model.spec.runs]
        scaled = any(isinstance(part, MixtureOfExperts) and part.fp32_scores for part in parts)
        return CUDA_MIXTURE_FORWARD if scaled else CUDA_INSTANT
    exact = (task.setup.compute_bytes == 4 or not onednn) and not task.setup.trains_codes
    return _counted(task, CPU_PEAK if exact else CPU_NARROW)


def _counted(task: Task, tolerance: Tolerance) -> Tolerance:
    """Return the tolerance of a CPU's figure, with the generator's states, and a word on states in host memory."""
    if task.setup.checkpointing != "none":
        layers = sum(run.count for run in task.model.spec.runs)
        reason = (
            f"{tolerance.reason}; checkpointing keeps the CPU generator's state of a layer until it is computed again"
        )
        tolerance = replace(tolerance, bytes=tolerance.bytes + layers * RANDOM_STATE_BYTES, reason=reason)
    if not task.setup.offloads_states:
        return tolerance
    return replace(tolerance, reason=f"{tolerance.reason}; {HOST_COUNTED}")
