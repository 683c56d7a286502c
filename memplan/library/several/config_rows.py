"""A model under every shipped config, and under the methods that people choose from: ``memplan.fit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike, fspath
from typing import TYPE_CHECKING, Unpack

from memplan.catalog.catalog import Catalog
from memplan.documents.opening import shown_path, usable_path
from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError
from memplan.library.answers.answer import Answer
from memplan.library.answers.planned_job import Plan
from memplan.library.argument_kinds import checked
from memplan.library.job_options import JobInputs, JobOptions, ModelGiven, job_inputs, keys_set, settings_of
from memplan.library.lookup import find_setup
from memplan.library.lookup.trainer_files import is_trainer_file
from memplan.model.model import Model
from memplan.plan.memory_plan import Device, MemoryPlan, Verdict
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import at_a_glance, simulated
from memplan.report.document import Document
from memplan.step.kernels.card_support import emulated_dtype
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.half_precision import fp16_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("qlora", "lora", "bf16-adamw-8bit", "bf16-adamw", "mixed-adamw")
"""Configs that people choose from: adapters on 4 or 16 bits, all weights with states in 8 bits, in bf16, and mixed."""
CHECKPOINTING = ("full", "none")


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train."""

    plan: MemoryPlan  # At the batch and length that were asked for
    batch: int  # The largest micro-batch that fits, 0 where none does; others than the plan's by the allocator's share


@dataclass(frozen=True, repr=False, eq=False)
class Fit(Answer):
    """A model on a GPU under every shipped config, and under the methods that people choose from.

    Attributes:
        inputs: What was asked.
        known: The model.
        device: The GPU.
    """

    inputs: JobInputs
    known: Model
    device: Device

    @cached_property
    def _planned(self) -> tuple[Sequence[MemoryPlan], tuple[str, ...], Mapping[str, tuple[str, ...]]]:
        return _plans(self.inputs, self.known, self.device)

    @cached_property
    def rows(self) -> tuple[Plan, ...]:
        """A plan for each config, those that fit first, and of them the one that needs least.

        The least that one needs is looked for where its tensors have room at all; elsewhere it is what it needs with memory
        to spare, which takes half as long.
        """
        return tuple(Plan(plan, self.catalog) for plan in self._simulated(least=True))

    @cached_property
    def _quick_rows(self) -> Sequence[MemoryPlan]:
        """The same without the least that each needs, which takes half as long."""
        return self._simulated(least=False)

    def _simulated(self, *, least: bool) -> Sequence[MemoryPlan]:
        from memplan.report.plans.fit_answer import ORDER

        plans = [simulated(plan, least=least and not plan.exceeds_device) for plan in self._planned[0]]
        return sorted(plans, key=lambda plan: (ORDER[plan.verdict], plan.device_bytes))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Configs that contradict what was asked for, each with the reason."""
        return self._planned[1]

    @property
    def settings(self) -> Mapping[str, tuple[str, ...]]:
        """What was set in some configs, by name, for a GPU that only emulates bf16."""
        return self._planned[2]

    @property
    def catalog(self) -> Catalog:
        """What names were looked up in."""
        return self.inputs.catalog

    @cached_property
    def methods(self) -> tuple[Method, ...]:
        """The methods that people choose from, and the best experimental one, with checkpointing and without.

        One whose tensors alone are more than the device has is not simulated: its reserve is a share.
        """
        ways = [(way.plan if way.plan.exceeds_device else at_a_glance(way.plan), way.batch) for way in self._ways]
        return tuple(Method(plan, _batch(plan, batch)) for plan, batch in ways)

    @cached_property
    def _ways(self) -> tuple[Method, ...]:
        """The same planned with shares, as they are sought."""
        return _methods(self.inputs, self.known, self.device)

    def refuse_nothing(self) -> None:
        """Raise where nothing can be planned.

        Raises:
            MemplanError: The first config's reason.
        """
        if not self._ways and not self._planned[0]:
            raise CannotAnswerError("no shipped config can be planned")

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
        """Return a bar for each method, with checkpointing and without."""
        from memplan.report.pictures.plan_bars import plan_bars

        return plan_bars([method.plan for method in self.methods])

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:
        """Return the answer of ``memplan fit`` without ``--config``."""
        from memplan.report.plans.fit_answer import rows_document

        plans = [row.memory for row in self.rows] if full else self._quick_rows
        catalog_hash = self.catalog.hash if full else ""
        document = rows_document(
            plans, catalog_hash, unit, strict=strict, full=full, left_out=self.left_out, settings=self.settings
        )
        return document if document.exit_code == 0 else replace(document, exit_code=self._code(strict))

    def overview(self, unit: str = "", *, strict: bool = False) -> Document:
        """Return what ``memplan fit`` without ``--config`` shows first: the methods, for a terminal.

        All of its rows are planned only where no method fits: another config may.
        """
        from memplan.report.screens.methods_screen import methods_screen

        code = self._code(strict) and int(not self._any_fits(strict))
        rows = [(method.plan, method.batch) for method in self.methods]
        missing = [name for name in METHODS if name not in {plan.setup.name for plan, _ in rows}]
        return Document({}, exit_code=code, screen=lambda canvas: methods_screen(rows, missing, canvas, unit))

    def _any_fits(self, strict: bool) -> bool:
        """Whether any config fits; one whose tensors alone are more than the device has is not simulated."""
        from memplan.report.plans.plan_answer import exit_code

        plans = (plan for plan in self._planned[0] if not plan.exceeds_device)
        return any(exit_code(simulated(plan, least=False), strict) == 0 for plan in plans)

    def _code(self, strict: bool) -> int:
        from memplan.report.plans.plan_answer import exit_code

        return min((exit_code(method.plan, strict) for method in self.methods), default=1)


@checked
def fit(model: ModelGiven = None, **options: Unpack[JobOptions]) -> Fit:
    """Return a plan of a model on a GPU under every shipped config, those that fit first.

    Args:
        model: As :func:`memplan.plan` takes it.
        options: Keywords of :class:`memplan.JobOptions`, but for ``config``.

    Raises:
        InvalidFileError: ``model`` is a trainer's file, which is a job: :func:`memplan.plan` plans it.
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
    if isinstance(model, str | PathLike) and is_trainer_file(fspath(model)):
        raise InvalidFileError(
            [f"{shown_path(usable_path(fspath(model)))}: names a training job: memplan.plan() plans it"]
        )
    answer = Fit(inputs, inputs.model(), inputs.device())
    answer.refuse_nothing()
    return answer


def _methods(inputs: JobInputs, model: Model, device: Device) -> tuple[Method, ...]:
    """Return the methods of a model on a device, those that can be planned, with the allocator's share."""
    from memplan.solver.largest_per_device import fitting_batch

    kinds = () if ("activation_checkpointing",) in keys_set(inputs) else CHECKPOINTING
    ways = [replace(inputs, options={**inputs.options, "activation_checkpointing": kind}) for kind in kinds] or [inputs]
    experimental = _experimental(ways[0], model, device)
    methods = []
    for name in (*METHODS, *experimental):
        for way in ways:
            with suppress(MemplanError):
                known = experimental.get(name) if way is ways[0] else None
                compiled = known or CompiledPlan(model, _suited(name, way, model, device)[0])
                plan = compiled.evaluate(device)
                methods.append(Method(plan, fitting_batch(compiled, plan)))
    return tuple(methods)


def _batch(plan: MemoryPlan, batch: int) -> int:
    """Return the largest batch that was found with shares, and what the simulated plan says of its own."""
    own = plan.micro_batch_size
    return max(batch, own) if plan.verdict == "fits" else min(batch, own - 1)


def _experimental(inputs: JobInputs, model: Model, device: Device) -> Mapping[str, CompiledPlan]:
    """Return the experimental config to show, if any: one that fits, of those the one that trained closest to fp32."""
    from memplan.plan.suggested.suggested_configs import SOUND
    from memplan.report.plans.fit_answer import ORDER
    from memplan.training.learning import records_of

    records = records_of(inputs.catalog)
    learnt = {name: records.verdict(evidence) for evidence, name in inputs.catalog.configs.listed("evidence")}
    able: dict[str, CompiledPlan] = {}
    for name in (name for name, verdict in learnt.items() if verdict in SOUND and name not in METHODS):
        with suppress(MemplanError):
            setup, _ = _suited(name, inputs, model, device)
            if setup.config.status == "experimental":
                able[name] = CompiledPlan(model, setup)
    small = [name for name, plan in able.items() if plan.ranks or plan.persistent_bytes <= device.memory_bytes]
    for names in (small, able):  # all of them only where none of the small ones runs
        result = []
        for name in names:
            with suppress(MemplanError):
                plan = able[name].evaluate(device)
                result.append((ORDER[plan.verdict], SOUND.index(learnt[name]), plan.device_bytes, name))
        if result and (best := min(result))[0] < ORDER["no"]:
            break
    return {best[-1]: able[best[-1]]} if result else {}


def _plans(
    inputs: JobInputs, model: Model, device: Device
) -> tuple[list[MemoryPlan], tuple[str, ...], Mapping[str, tuple[str, ...]]]:
    """Return plans of the shipped configs, why others cannot be planned, and what was set in some for the device."""
    plans: list[MemoryPlan] = []
    refused: list[MemplanError] = []
    reasons: dict[str, str] = {}
    settings: dict[str, tuple[str, ...]] = {}
    for name in inputs.catalog.configs:
        try:
            setup, own = _suited(name, inputs, model, device)
            plans.append(CompiledPlan(model, setup).evaluate(device))
            settings |= {name: own} if own else {}
        except MemplanError as error:
            refused.append(error)
            reasons[name] = "; ".join(str(error).splitlines())
    if refused and not plans:
        raise refused[0]
    if inputs.gpus > 1 and reasons:
        line = "not planned with zero_stage 3; --config NAME says why, --set parallel.zero_stage=0 replicates"
        return plans, (f"{', '.join(reasons)}: {line}",), settings
    alike: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        alike.setdefault(reason, []).append(name)
    return plans, tuple(f"{', '.join(names)}: {reason}" for reason, names in alike.items()), settings


def _suited(name: str, inputs: JobInputs, model: Model, device: Device) -> tuple[TrainingSetup, tuple[str, ...]]:
    """Return a shipped config for a device, and what is set in it: one of adapters is in fp16 where bf16 is emulated."""
    given = inputs.overrides(inputs.gpus)
    setup = find_setup(name, given, inputs.catalog, model)
    key = next((".".join(path) for path in keys_set(inputs) if path[0] == "adapter" and len(path) > 1), None)
    if key and inputs.catalog.configs[name].adapter is None:
        raise CannotAnswerError(f"{key} was set, and it trains all weights; --config NAME plans it with adapters")
    if not emulated_dtype(setup, device.gpu):
        return setup, ()
    if setup.config.adapter is None:
        raise CannotAnswerError(
            f"{device.name} only emulates {setup.config.compute_dtype}; --config NAME plans it all the same"
        )
    own = settings_of(dict(fp16_settings(setup.config, inputs.catalog)))
    changed = replace(given, settings=(*given.settings, *own))
    return find_setup(name, changed, inputs.catalog, model), own
