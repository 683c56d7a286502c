"""Several plans of one model: ``memplan.fit``, a row for every shipped config, and ``memplan.compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Unpack

from memplan.catalog.catalog import Catalog
from memplan.errors import CannotAnswerError, MemplanError
from memplan.library.answers.answer import Answer
from memplan.library.answers.planned_job import Plan
from memplan.library.job_options import JobInputs, JobOptions, ModelGiven, job_inputs, settings_of
from memplan.library.lookup import find_setup
from memplan.library.lookup.config_lookup import ConfigGiven
from memplan.model.model import Model
from memplan.plan.memory_plan import Device, Verdict
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import simulated
from memplan.report.document import Document
from memplan.step.kernels.on_card import emulated_dtype
from memplan.training.half_precision import fp16_settings
from memplan.training.resolved import TrainingSetup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARED = ("bf16-adamw", "tier1")


@dataclass(frozen=True, repr=False, eq=False)
class Fit(Answer):
    """A model on a GPU under every shipped config.

    Attributes:
        rows: A plan for each config, those that fit first, and of them the one that needs least.
        left_out: Configs that contradict what was asked for, each with the reason.
        catalog: What names were looked up in.
        settings: What was set in some configs, by name, for a GPU that only emulates bf16.
    """

    rows: tuple[Plan, ...]
    left_out: tuple[str, ...]
    catalog: Catalog
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The best verdict of any config."""
        return self.rows[0].verdict

    @property
    def configs(self) -> tuple[str, ...]:
        """The configs that were planned, in the order of the rows."""
        return tuple(row.config for row in self.rows)

    @property
    def fitting(self) -> tuple[Plan, ...]:
        """The plans that fit at the upper end too."""
        return tuple(row for row in self.rows if row.verdict == "fits")

    def figure(self) -> Figure:
        """Return a bar for each config."""
        from memplan.report.pictures.plan_bars import plan_bars

        return plan_bars([row.memory for row in self.rows])

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:
        """Return the answer of ``memplan fit`` without ``--config``."""
        from memplan.report.plans.fit_answer import rows_document

        plans = [row.memory for row in self.rows]
        catalog_hash = self.catalog.hash if full else ""
        return rows_document(
            plans, catalog_hash, unit, strict=strict, full=full, left_out=self.left_out, settings=self.settings
        )


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(Answer):
    """Plans side by side.

    Attributes:
        rows: A plan for each column: configs first, then GPUs.
        catalog: What names were looked up in.
        several: Whether more than one GPU was named.
    """

    rows: tuple[Plan, ...]
    catalog: Catalog
    several: bool

    @property
    def differences(self) -> dict[str, list[object]]:
        """Keys of the training configs in which the plans differ, each with every plan's value."""
        return {item["key"]: item["values"] for item in self.to_dict()["differences"]}

    def figure(self) -> Figure:
        """Return a bar for each plan."""
        from memplan.report.pictures.plan_bars import plan_bars

        return plan_bars([row.memory for row in self.rows])

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:
        """Return the answer of ``memplan compare``."""
        from memplan.report.plans.compare_answer import compare_document

        plans = [row.memory for row in self.rows]
        catalog_hash = self.catalog.hash if full else ""
        return compare_document(plans, catalog_hash, unit, several=self.several, strict=strict)


def fit(model: ModelGiven = None, **options: Unpack[JobOptions]) -> Fit:
    """Return a plan of a model on a GPU under every shipped config, those that fit first.

    Args:
        model: As :func:`memplan.plan` takes it.
        options: Keywords of :class:`memplan.JobOptions`, but for ``config``.

    Raises:
        MemplanError: As :func:`memplan.plan` raises it, where no config can be planned at all.
        TypeError: ``config`` was given, which is :func:`memplan.plan`'s question.

    Example:
        >>> import memplan
        >>> answer = memplan.fit("llama-3.2-1b", gpu="rtx4090", micro_batch_size=1)
        >>> answer.verdict, "qlora" in [plan.config for plan in answer.fitting]
        ('fits', True)
    """
    every = "it plans every shipped one; memplan.plan() plans one"
    inputs = job_inputs("fit", model, options, refused={"config": every})
    known = inputs.model()
    device = inputs.device()
    plans, left_out, settings = _plans(inputs, known, device)
    from memplan.report.plans.fit_answer import ORDER

    rows = sorted(plans, key=lambda plan: (ORDER[plan.verdict], plan.expected_bytes))
    return Fit(tuple(rows), left_out, inputs.catalog, settings)


def _plans(
    inputs: JobInputs, model: Model, device: Device
) -> tuple[list[Plan], tuple[str, ...], Mapping[str, tuple[str, ...]]]:
    """Return plans of the shipped configs, why others cannot be planned, and what was set in some for the device.

    Raises:
        MemplanError: None can be planned; the last one's reason.
    """
    plans: list[Plan] = []
    reasons: dict[str, str] = {}
    settings: dict[str, tuple[str, ...]] = {}
    names = list(inputs.catalog.configs)
    for name in names:
        try:
            setup, own = _suited(name, inputs, model, device)
            plans.append(Plan(CompiledPlan(model, setup).evaluate(device), inputs.catalog))
            settings |= {name: own} if own else {}
        except MemplanError as error:
            if name == names[-1] and not plans:
                raise
            reasons[name] = "; ".join(str(error).splitlines())
    if inputs.gpus > 1 and reasons:
        line = "not planned with zero_stage 3; --config NAME says why, --set parallel.zero_stage=0 replicates"
        return plans, (f"{', '.join(reasons)}: {line}",), settings
    alike: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault(reason, []).append(name)
    return plans, tuple(f"{', '.join(names)}: {reason}" for reason, names in alike.items()), settings


def _suited(name: str, inputs: JobInputs, model: Model, device: Device) -> tuple[TrainingSetup, tuple[str, ...]]:
    """Return a shipped config for a device, and what is set in it: one of adapters is in fp16 where bf16 is emulated.

    Raises:
        CannotAnswerError: It trains all weights in bf16, which the device only emulates.
    """
    given = inputs.overrides(inputs.gpus)
    setup = find_setup(name, given, inputs.catalog, model)
    if not emulated_dtype(setup, device.gpu):
        return setup, ()
    if setup.config.adapter is None:
        raise CannotAnswerError(
            f"{device.name} only emulates {setup.config.compute_dtype}; --config NAME plans it all the same"
        )
    own = settings_of(dict(fp16_settings(setup.config, inputs.catalog)))
    changed = replace(given, settings=(*given.settings, *own))
    return find_setup(name, changed, inputs.catalog, model), own


def compare(
    model: ModelGiven = None,
    configs: Sequence[ConfigGiven] = COMPARED,
    *,
    on: Sequence[str | Device] = (),
    **options: Unpack[JobOptions],
) -> Comparison:
    """Return plans of a model side by side: every config on every GPU.

    Args:
        model: As :func:`memplan.plan` takes it.
        configs: Training configs, by name, by file, or as keys and values.
        on: GPUs, where there is more than the one that ``gpu`` names.
        options: Keywords of :class:`memplan.JobOptions`, but for ``config``.

    Raises:
        MemplanError: As :func:`memplan.plan` raises it.

    Example:
        >>> import memplan
        >>> answer = memplan.compare("llama-3.2-1b", ["lora", "qlora"], gpu="rtx4090")
        >>> [plan.verdict for plan in answer.rows], answer.differences["weights.hidden_matrix"]
        (['fits', 'fits'], ['bf16', 'nf4-dq'])
    """
    inputs = job_inputs("compare", model, options, refused={"config": "name all of them in configs"})
    known = inputs.model()
    setups = [find_setup(config, inputs.overrides(inputs.gpus), inputs.catalog, known) for config in configs]
    devices = inputs.devices_named(on)
    compiled = [CompiledPlan(known, setup) for setup in setups]
    rows = tuple(Plan(simulated(plan.evaluate(device)), inputs.catalog) for device in devices for plan in compiled)
    return Comparison(rows, inputs.catalog, several=len(devices) > 1)
