"""What to train with on a GPU: derived from the catalog and from the evidence, with what is not known named."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from memplan.catalog.entries import Status
from memplan.documents.frozen_values import dataclass
from memplan.model.model import Model
from memplan.plan.bytes_per_parameter import bytes_per_parameter
from memplan.plan.memory_plan import Device
from memplan.plan.sizes.largest_model import LargestModel, ModelsBySize, told
from memplan.step.kernels.card_support import emulated_dtype
from memplan.training.resolved import TrainingSetup

ESTABLISHED: tuple[Status, ...] = ("proven", "works")
TRIED: tuple[Status, ...] = ("experimental",)
SOUND = ("level", "indistinct", "close")
"""Verdicts of a record of training that are within 5 % of fp32, or that seeds cannot tell from it."""
ORDER: Mapping[Status, int] = {"proven": 0, "works": 1, "experimental": 2, "untried": 3, "diverges": 4}
PLAIN_PRECISIONS = ("bf16", "fp16", "fp32")
"""Precisions that Newton-Schulz needs nothing special for, the one to prefer first: bf16 has the range of fp32."""
NARROW_PRECISIONS = ("fp8", "int8")
"""Precisions that need scales, and kernels that use them."""


@dataclass(frozen=True, slots=True)
class SuggestedConfigs:
    """The suggested configs of a GPU."""

    device: Device  # The GPU, or several with their memory pooled
    # The config that holds the largest model among those whose status is works or better, with that model; None where
    # none holds any.
    established: LargestModel | None
    # One that holds a larger model, is experimental, and trained about as well as fp32 in the record behind it; None
    # where none does.
    experimental: LargestModel | None
    precision: str  # Of Newton-Schulz products
    # Narrow precisions with a higher rate on paper, and how many times as high.
    faster: tuple[tuple[str, Fraction], ...]
    # The largest model under each config that trains adapters alone, on weights of 4 bits and of 16.
    adapters: tuple[LargestModel, ...] = ()


def suggested_configs(
    models: Sequence[tuple[str, Model]],
    setups: Sequence[TrainingSetup],
    devices: Sequence[Device],
    verdict: Callable[[str], str],
    adapters: Sequence[tuple[TrainingSetup, TrainingSetup]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[SuggestedConfigs]:
    """Return the suggested configs of each device.

    Args:
        models: Catalog names and models.
        setups: Configs that train all weights.
        verdict: Says what the record of a name found; an experimental config's needs one of ``SOUND``.
        adapters: Configs that train adapters alone, each as it is and for a device that only emulates its dtype.
        progress: Is told how many answers there are for configs that train all weights, and of how many.
    """
    sound = sorted([setup for setup in setups if _sound(setup, verdict)], key=_bytes)
    answered = told(progress, len(sound) * len(devices))
    ordered = [(setup, ModelsBySize(models, setup)) for setup in sound]
    for _, by_size in ordered:
        by_size.refuse_all()
    result = [_suggested_configs(device, _rows(ordered, device, answered)) for device in devices]
    tuned = [_on_adapters(models, pair, devices) for pair in adapters]
    return [replace(row, adapters=tuple(rows[place] for rows in tuned)) for place, row in enumerate(result)]


def _bytes(setup: TrainingSetup) -> Fraction:
    return bytes_per_parameter(setup).total


def _rows(
    ordered: Sequence[tuple[TrainingSetup, ModelsBySize]], device: Device, answered: Callable[[], None] | None
) -> list[LargestModel]:
    """Return the largest model of a device under each setup that could be the best of its kind; experimental ones come last.

    Setups whose products run in a dtype that the device only emulates are not among them.
    """
    rows: list[LargestModel] = []
    for statuses in (ESTABLISHED, TRIED):
        larger = max((row.largest_fitting_parameters for row in rows), default=-1) + 1
        for setup, by_size in ordered:
            if setup.config.status not in statuses:
                continue
            if not emulated_dtype(setup, device.gpu):
                rows.append(by_size.largest(device, least=larger))
                larger = max(larger, rows[-1].largest_fitting_parameters)
            if answered is not None:
                answered()
    return rows


def _on_adapters(
    models: Sequence[tuple[str, Model]], pair: tuple[TrainingSetup, TrainingSetup], devices: Sequence[Device]
) -> list[LargestModel]:
    """Return the largest model of each device under a config, or under what stands for it where its dtype is emulated."""
    own = [emulated_dtype(pair[0], device.gpu) for device in devices]
    ordered = {emulated: ModelsBySize(models, pair[emulated]) for emulated in set(own)}
    for by_size in ordered.values():
        by_size.refuse_all()
    return [ordered[emulated].largest(device) for emulated, device in zip(own, devices, strict=True)]


def _suggested_configs(device: Device, rows: Sequence[LargestModel]) -> SuggestedConfigs:
    """Return the suggested configs of a device, given the largest model under each setup that could be one."""
    established, bold = _best(rows, ESTABLISHED), _best(rows, TRIED)
    least = 0 if established is None else established.largest_fitting_parameters
    larger = bold if bold is not None and bold.largest_fitting_parameters > least else None
    return SuggestedConfigs(device, established, larger, *_precision(device))


def _sound(setup: TrainingSetup, verdict: Callable[[str], str]) -> bool:
    config = setup.config
    return config.status in ESTABLISHED or (config.status in TRIED and verdict(config.evidence or "") in SOUND)


def _best(rows: Sequence[LargestModel], statuses: Collection[Status]) -> LargestModel | None:
    """Return the row with the largest model; of equals the better status, then the fewer bytes for a parameter."""
    fitting = [row for row in rows if row.setup.config.status in statuses and row.largest_fitting is not None]

    def order(row: LargestModel) -> tuple[int, int, Fraction, str]:
        return (
            -row.largest_fitting_parameters,
            ORDER[row.setup.config.status],
            row.bytes_per_parameter,
            row.setup.name,
        )

    return min(fitting, key=order, default=None)


def _precision(device: Device) -> tuple[str, tuple[tuple[str, Fraction], ...]]:
    """Return the plain precision to use, and the narrow ones that are faster on paper."""
    rates = device.gpu.dense_flops
    plain = next((name for name in PLAIN_PRECISIONS if name in rates), "bf16")
    narrow = ((name, Fraction(rates[name], rates[plain])) for name in NARROW_PRECISIONS if {name, plain} <= set(rates))
    return plain, tuple((name, ratio) for name, ratio in narrow if ratio > 1)
