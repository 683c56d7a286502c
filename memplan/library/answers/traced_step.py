"""What torch would do: ``memplan.trace`` runs a training step on tensors without memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from memplan.allocator.results import AllocatorResult
from memplan.catalog.catalog import Catalog
from memplan.catalog.hardware.contexts import context_range
from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.documents.escaping import json_text
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.host.this_machine import require_torch
from memplan.library.answers.answer import Answer
from memplan.library.answers.trace_answer import TracedStep, model_line, trace_document
from memplan.library.argument_kinds import checked
from memplan.library.job_options import FilePath, JobInputs, JobOptions, ModelGiven, job_inputs, model_of, settings_of
from memplan.library.lookup.model_lookup import released_keys
from memplan.model.model import Model
from memplan.plan.jobs.unmodelled_jobs import refuse_unlearned
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.report.document import Document
from memplan.step.beside.second_forward import all_on_card
from memplan.trace.recording.trace_result import Trace
from memplan.training.resolved import TrainingSetup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 3
"""Steps of the reference model: on an H200 the allocator's segments grew by up to 4 % in the third, and not after."""
MOST_LISTED, LIMIT_LISTED = 10, 1000
"""Tensors that are listed at the peak where no number is given, and at most."""
DEFAULT_CAPABILITY = "9.0"
DEFAULT_GPU = "h100-sxm-80gb"
"""The GPU that decides the allowances beside a trace for which none is named."""


class TraceOptions(JobOptions, total=False):
    """Keywords of a trace, besides those of every job; None means that it is not given.

    Attributes:
        hf: Folder with a ``config.json`` whose model is traced in transformers' own code, in place of a model.
        module: ``package.module:factory`` of your own ``nn.Module``, in place of a model.
        alloc_conf: The allocator's settings, as ``PYTORCH_CUDA_ALLOC_CONF``.
        largest: Tensors to list at the peak.
        progress: Is told what is being done.
    """

    hf: FilePath | None
    module: str | None
    alloc_conf: str
    largest: int
    progress: Callable[[str], None] | None


@dataclass(frozen=True, repr=False, eq=False)
class Traced(Answer):
    """A training step as torch runs it, with the allocator's replay and the formula beside it.

    Attributes:
        step: The trace and what was made of it.
        catalog: What names were looked up in.
    """

    step: TracedStep
    catalog: Catalog

    @property
    def requested_bytes(self) -> int:
        """Live tensors, and what kernels allocate inside themselves, at the peak."""
        return self.step.trace.peak_bytes

    @property
    def components(self) -> dict[str, int]:
        """Requested bytes at the peak by component."""
        return {str(name): size for name, size in self.step.trace.peak.components.items()}

    @property
    def difference_bytes(self) -> int | None:
        """What the formula plans beyond the trace; None where there is no formula for what was traced."""
        plan = self.step.plan
        return None if plan is None else plan.requested_bytes - self.requested_bytes

    @property
    def survives(self) -> bool | None:
        """Whether the allocator gets by on the GPU that was named; None where none was."""
        return None if self.step.on_device is None else self.step.on_device.survives

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:  # noqa: ARG002
        """Return the answer of ``memplan trace``."""
        return trace_document(self.step, unit)

    def timeline(self, form: Literal["svg", "json"] = "svg") -> str:
        """Return what is alive over the step as a picture, or as JSON."""
        if form == "svg":
            from memplan.report.figures import picture_of

            return picture_of(self.figure(), ".svg").decode()
        from memplan.trace.recording.trace_result import timeline_json

        data = timeline_json(self.step.trace)
        for tensor in data["largest_at_peak"]:
            tensor["line"] = model_line(tensor["line"])
        return json_text(data, indent=1)

    def figure(self) -> Figure:
        """Return memory over the step by component, with what the GPU has where one was named."""
        from memplan.library.answers.trace_answer import traced_figure

        return traced_figure(self.step)


@checked
def trace(model: ModelGiven = None, **options: Unpack[TraceOptions]) -> Traced:
    """Return what torch allocates in a real training step, run on tensors without memory; no GPU is needed.

    Args:
        model: As :func:`memplan.plan` takes it.
        options: Keywords of :class:`memplan.TraceOptions` and of :class:`memplan.JobOptions`.

    Raises:
        CannotAnswerError: torch is not installed, or something cannot be traced.
        InvalidFileError: More than one thing to trace.
        MemplanError: As :func:`memplan.plan` raises it.

    Example:
        >>> import memplan
        >>> memplan.trace("gpt2", config="fp32-adamw", sequence_length=32).difference_bytes  # doctest: +SKIP
        0
    """
    inputs = job_inputs("trace", model, options, TraceOptions)
    named = [value for value in (inputs.given, options.get("hf"), options.get("module")) if value is not None]
    if len(named) > 1 or (named and inputs.shapes is not None):
        raise InvalidFileError(
            ["give one thing to trace: MODEL, shapes, --hf DIR, --module PKG.MOD:FACTORY or --history FILE"]
        )
    listed = options.get("largest", MOST_LISTED)
    if type(listed) is not int or not 0 <= listed <= LIMIT_LISTED:
        raise InvalidFileError([f"largest: expected a whole number from 0 to {LIMIT_LISTED:,}, got {listed!r}"])
    require_torch()
    subject = _subject(inputs, options)
    note = options.get("progress") or _say_nothing
    note("loading torch")
    run, title = _traced(subject, note)
    note(f"replaying {len(run.events):,} events through the allocator")
    return Traced(_replayed_step(subject, run, title), inputs.catalog)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is traced, how it is trained, and on which GPU, if one was named."""

    model: Model | None
    setup: TrainingSetup
    device: Device | None
    options: TraceOptions
    catalog: Catalog


def _subject(inputs: JobInputs, options: TraceOptions) -> _Subject:
    """Return what is to be traced."""
    hf, module = options.get("hf"), options.get("module")
    device = inputs.device() if inputs.names_device else None
    model = None if module is not None else _known_model(inputs, hf)
    setup = _setup(inputs, model, hf)
    if setup.config.parallel.data > 1 and (module is not None or hf is not None):
        raise CannotAnswerError(
            "parallel.data: several GPUs are traced with models of the catalog only, not with --hf or --module"
        )
    if model is not None:
        refuse_unlearned(model, setup.config.sequence_length)
        setup = all_on_card(setup, model, inputs.catalog.gpus[DEFAULT_GPU] if device is None else device.gpu)
    return _Subject(model, setup, device, options, inputs.catalog)


def _say_nothing(_: str) -> None:
    """Take no note of progress."""


def _known_model(inputs: JobInputs, hf: FilePath | None) -> Model | None:
    """Return the model, or None where transformers has code for a config that memplan has no formula for."""
    if hf is None:
        return inputs.model()
    try:
        return model_of(os.fspath(hf), inputs.shapes, inputs.catalog)
    except CannotAnswerError:
        return None


TRANSFORMERS_KERNELS = ("stack=bundled", "kernels.norm=composite", "kernels.optimizer=fused", "kernels.loss=fp32")
"""Kernels of transformers' own code: norms in Python, ``adamw_torch_fused``, logits upcast for the loss."""


def _setup(inputs: JobInputs, model: Model | None, hf: FilePath | None) -> TrainingSetup:
    """Return the training setup; transformers' own code runs with its own kernels, unless others are set."""
    settings = settings_of(inputs.options.get("set"))
    if (
        hf is None
        or inputs.options.get("stack") is not None
        or any(setting.startswith(("kernels", "stack")) for setting in settings)
    ):
        return inputs.setup(model, gpus=inputs.gpus)
    settings = (*TRANSFORMERS_KERNELS, *settings)
    return JobInputs(inputs.catalog, inputs.given, {**inputs.options, "set": settings}).setup(model, gpus=inputs.gpus)


def _traced(subject: _Subject, note: Callable[[str], None]) -> tuple[Trace, str]:
    """Return the trace, and what was traced."""
    module, hf = subject.options.get("module"), subject.options.get("hf")
    if module is not None:
        from memplan.trace.modules import trace_module

        note(f"tracing {module}")
        return trace_module(module, subject.setup), module
    if subject.setup.stack.name != DEFAULT_STACK:
        return _traced_stack(subject, note)
    if hf is not None:
        from memplan.trace.modules import trace_huggingface

        note(f"tracing transformers' implementation of {hf}")
        return trace_huggingface(Path(hf), subject.setup), f"transformers' implementation of {hf}"
    from memplan.trace.tracer import trace_training

    assert subject.model is not None
    name, device = subject.model.spec.name, subject.device
    capability = (device.gpu.compute_capability if device else None) or DEFAULT_CAPABILITY
    note(f"tracing {STEPS} steps of {name}")
    return trace_training(subject.model, subject.setup, compute_capability=capability, steps=STEPS), name


def _traced_stack(subject: _Subject, note: Callable[[str], None]) -> tuple[Trace, str]:
    """Return the trace of a stack's own code."""
    from memplan.dryrun.stack_trace import stack_trace
    from memplan.trace.stacks.registry import StackInputs, details_of

    model, setup, device = subject.model, subject.setup, subject.device
    if model is None:
        raise CannotAnswerError(
            "stack: memplan has no formula for this model; trace its code with --hf, without --stack"
        )
    capability = (device.gpu.compute_capability if device else None) or DEFAULT_CAPABILITY
    note(f"tracing the code of {setup.stack.name}")
    own = setup.stack.model_code == "own"  # which is built of shapes
    keys = {} if own else released_keys(model, subject.catalog)
    try:
        card_bytes = device.gpu.cuda_total_bytes if device else 0
        seconds = {role: released_keys(given, subject.catalog) for role, given in setup.beside.items()}
        inputs = StackInputs(
            model, keys, setup, capability, details_of(setup), card_bytes=card_bytes, second_keys=seconds
        )
        return stack_trace(setup.stack.name, inputs)
    except CannotAnswerError:
        if setup.unmodelled:  # what no such job can be, in place of where its code has failed
            raise CannotAnswerError(setup.unmodelled[0]) from None
        raise


def _replayed_step(subject: _Subject, run: Trace, title: str) -> TracedStep:
    """Return a trace with what the allocator does with it, and the formula's answer where there is one."""
    model, setup, device = subject.model, subject.setup, subject.device
    against = device or Device(subject.catalog.gpus[DEFAULT_GPU], DEFAULT_GPU)
    expandable = "expandable_segments:True" if setup.config.allocator == "expandable" else ""
    alloc_conf = subject.options.get("alloc_conf") or expandable
    on_device = None
    if device is not None:
        capacity = max(
            0, device.usable_bytes(setup.reserve_bytes) - context_range(device.gpu, setup.hardware).expected_bytes
        )
        on_device = replayed(run, alloc_conf, capacity)
    return TracedStep(
        title=title,
        trace=run,
        setup=setup,
        replayed=replayed(run, alloc_conf, None),
        on_device=on_device,
        plan=None if model is None or _has_no_formula(setup) else CompiledPlan(model, setup).evaluate(against),
        device=device,
        context_bytes=context_range(against.gpu, setup.hardware).expected_bytes,
        most_listed=subject.options.get("largest", MOST_LISTED),
    )


def _has_no_formula(setup: TrainingSetup) -> bool:
    """Tell whether a step is traced that nothing plans: of layers compiled one by one, say."""
    return bool(setup.unmodelled) or setup.config.compile == "layers"


def replayed(run: Trace, alloc_conf: str, capacity: int | None) -> AllocatorResult:
    """Return what the allocator does with the trace, with so many bytes to be had, or without a limit."""
    from memplan.allocator.caching_allocator import replay
    from memplan.allocator.settings import parse_alloc_conf

    events = ((1 if event.allocates else -1, event.storage, event.bytes) for event in run.events)
    return replay(events, parse_alloc_conf(alloc_conf), capacity, run.turns, run.streams)
