"""One job on one GPU: ``memplan.plan``, and ``memplan.job`` for many plans of one model and config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import MAXIMUM_TOKENS
from memplan.errors import InvalidFileError, escaped, shown_value
from memplan.library.answers.answer import Answer
from memplan.library.argument_kinds import checked
from memplan.library.component_values import Components
from memplan.library.job_options import LIMITS, JobOptions, ModelGiven, job_inputs, number_problems
from memplan.library.lookup import find_device
from memplan.plan.memory_plan import Device, MemoryPlan, Suggestion, Verdict
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve import simulation
from memplan.report.document import Block, Document
from memplan.report.plans.plan_answer import answer, plan_document

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memplan.plan.reserve.step_timeline import Timeline
    from memplan.plan.suggested.suggestions import WhatIf
    from memplan.report.canvas import Canvas


@dataclass(frozen=True, repr=False, eq=False)
class Plan(Answer):
    """What a training job needs on a GPU, and whether it fits.

    Attributes:
        memory: The whole plan: every instant, total, form and assumption.
        catalog: What names were looked up in.

    Example:
        >>> import memplan
        >>> plan = memplan.plan("llama-3.1-8b", gpu="rtx4090", config="qlora")
        >>> plan.verdict, plan.components["logits"] < plan.expected_bytes < plan.usable_bytes
        ('fits', True)
    """

    memory: MemoryPlan
    catalog: Catalog

    @property
    def model(self) -> str:
        """The model's name."""
        return self.memory.model.spec.name

    @property
    def config(self) -> str:
        """The training config's name or file."""
        return self.memory.setup.name

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return self.memory.device.name

    @property
    def verdict(self) -> Verdict:
        """``fits`` at the upper end too, ``tight`` as expected only, or ``no``."""
        return self.memory.verdict

    @property
    def expected_bytes(self) -> int:
        """What ``nvidia-smi`` is expected to show at the peak."""
        return self.memory.device_bytes

    @property
    def upper_bytes(self) -> int:
        """The upper end of the interval around the expected bytes."""
        return self.memory.upper_bytes

    @property
    def usable_bytes(self) -> int:
        """What the GPU has for the job."""
        return self.memory.usable_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory, where something is offloaded to it."""
        return self.memory.host_bytes

    @property
    def peak_instant(self) -> str:
        """When the most memory is in use."""
        return self.memory.peak.name

    @property
    def instants(self) -> dict[str, int]:
        """Requested bytes at each instant of the step."""
        return dict(self.memory.instants)

    @property
    def training(self) -> dict[str, Any]:
        """The training config with every default filled in, which ``config`` takes back."""
        data: dict[str, Any] = self.to_dict()["training"]
        return data

    @cached_property
    def components(self) -> Components:
        """Bytes by component at the peak; they add up to ``expected_bytes``."""
        return Components({line.name: line for line in self.memory.components})

    @property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """What to change where the job does not fit, those that make it fit first; none where it fits."""
        return self.advised.suggestions

    @cached_property
    def advised(self) -> MemoryPlan:
        """The whole plan with its suggestions."""
        if self.verdict == "fits":
            return self.memory
        from memplan.plan.suggested.suggestions import with_suggestions

        return with_suggestions(self.memory, self.catalog)

    @property
    def sentence(self) -> str:
        """The answer in one sentence, with the cheapest change that makes the job fit."""
        return answer(self.advised)

    def document(self, unit: str = "", *, strict: bool = False, full: bool = True) -> Document:
        """Return the answer of ``memplan fit --config``."""
        document = plan_document(self.advised, self.catalog.hash if full else "", unit, strict)
        return replace(document, screen=lambda canvas: self._screen(canvas, unit))

    def _screen(self, canvas: Canvas, unit: str) -> tuple[Block, ...]:
        from memplan.report.screens.plan_screen import plan_screen
        from memplan.solver.largest_per_device import room_left

        return plan_screen(self.advised, canvas, unit, room_left(self.memory) if self.verdict == "fits" else {})

    @cached_property
    def timeline(self) -> Timeline:
        """What is alive over the step, component by component: its events, or its instants where they are not told."""
        from memplan.plan.reserve.step_timeline import step_timeline

        return step_timeline(self.memory)

    def figure(self) -> Figure:
        """Return memory over the step by component, with what the GPU has."""
        from memplan.report.pictures.step_figure import plan_figure

        return plan_figure(self.memory, self.timeline)

    @cached_property
    def what_if(self) -> tuple[WhatIf, ...]:
        """What one change at a time would do, with a share as the allocator's reserve on both sides."""
        from memplan.plan.suggested.suggestions import what_if

        return what_if(self.memory, self.catalog)

    def html(self, command: str = "") -> str:
        """Return the answer of ``memplan report``: one HTML file, which loads nothing.

        Args:
            command: A command line that asks the same, to be shown.
        """
        from memplan.library.answers.notebook import report_page

        return report_page(self, command)

    def explanation(self, unit: str = "") -> Document:
        """Return the answer of ``memplan explain``: every formula with its values put in, and its source."""
        from memplan.report.plans.explain_answer import explain_document

        return explain_document(self.memory, self.catalog.hash, unit)

    def __repr__(self) -> str:
        return f"<memplan.Plan: {escaped(answer(self.memory))}>"

    def _repr_html_(self) -> str:
        from memplan.library.answers.notebook import plan_html

        return plan_html(self.memory, self.sentence)


@dataclass(frozen=True, eq=False)
class Job:
    """A model under a training config, ready to be planned for any GPU, batch and sequence length.

    Attributes:
        compiled: Its closed forms.
        catalog: What names are looked up in.

    Example:
        >>> import memplan
        >>> job = memplan.job("llama-3.1-8b", config="qlora")
        >>> [job.plan("rtx4090", micro_batch_size=size).verdict for size in (1, 64)]
        ['fits', 'no']
    """

    compiled: CompiledPlan
    catalog: Catalog
    _devices: dict[str, Device] = field(default_factory=dict, repr=False)

    def plan(
        self,
        gpu: str | Device | None = None,
        *,
        micro_batch_size: int | None = None,
        sequence_length: int | None = None,
        simulated: bool = False,
    ) -> Plan:
        """Return the plan for a GPU.

        Args:
            gpu: Catalog name or alias, ``local``, or a device; else this machine's own.
            micro_batch_size: Sequences per device per forward pass; the config's own where it is not given.
            sequence_length: Tokens per sequence; likewise.
            simulated: Whether the allocator is simulated, as :func:`memplan.plan` does, which takes a hundred times as
                long; else its reserve is a share of the allocated bytes.

        Raises:
            MemplanError: No GPU has the name, or none was named and none is here.
            InvalidFileError: A number that is out of range, or more tokens than the model has positions.
        """
        problems = number_problems({"micro_batch_size": micro_batch_size, "sequence_length": sequence_length}, LIMITS)
        if problems:
            raise InvalidFileError(problems)
        config = self.compiled.setup.config
        if (micro_batch_size or config.micro_batch_size) * (sequence_length or config.sequence_length) > MAXIMUM_TOKENS:
            raise InvalidFileError(["sequence_length: batch times sequence length is beyond any machine"])
        device = gpu if isinstance(gpu, Device) else self._device(gpu)
        plan = self.compiled.evaluate(device, micro_batch_size, sequence_length)
        return Plan(simulation.simulated(plan) if simulated else plan, self.catalog)

    def _device(self, gpu: str | None) -> Device:
        """Return a GPU of the catalog, looked up once."""
        if not isinstance(gpu, str | None):
            raise InvalidFileError([f"gpu: expected text or a Device, got {shown_value(gpu)}"])
        if gpu is None or gpu not in self._devices:
            self._devices[gpu or "local"] = find_device(gpu, None, 1, self.catalog)
        return self._devices[gpu or "local"]


@checked
def plan(model: ModelGiven = None, **options: Unpack[JobOptions]) -> Plan:
    """Return what a training job needs on a GPU, and whether it fits.

    Args:
        model: Catalog name or alias, published id, directory, ``config.json``, GGUF or safetensors file, or shapes.
        options: Keywords of :class:`memplan.JobOptions`: ``gpu``, ``config`` (else ``bf16-adamw``),
            ``micro_batch_size``, ``sequence_length``, ``activation_checkpointing``, ``set``, ``gpus``, ...

    Returns:
        The plan; a job that does not fit is an answer, not an error.

    Raises:
        UnknownNameError: No model, GPU or config has the name; the message has the nearest.
        InvalidFileError: A file that is no model or config, or a value that is out of range.
        CannotAnswerError: A job that is not modelled, or no GPU named and none here.

    Example:
        >>> import memplan
        >>> plan = memplan.plan("llama-3.1-8b", gpu="rtx4090", config="bf16-adamw", sequence_length=4096)
        >>> plan.verdict, plan.suggestions[0].flips_verdict
        ('no', True)
    """
    return _plan(model, options, least=True)


def plan_at_a_glance(model: ModelGiven = None, **options: Unpack[JobOptions]) -> Plan:
    """Return what :func:`plan` does but for the least of a job that has memory to spare, which no screen shows."""
    return _plan(model, options, least=None)


def plan_by_share(model: ModelGiven = None, **options: Unpack[JobOptions]) -> Plan:
    """Return what :func:`plan` does but with a share of the allocated bytes as the allocator's reserve."""
    inputs = job_inputs("plan", model, options)
    known = inputs.model()
    device = inputs.device()
    setup = inputs.setup(known, gpus=inputs.gpus)
    return Plan(CompiledPlan(known, setup).evaluate(device), inputs.catalog)


def _plan(model: ModelGiven, options: JobOptions, *, least: bool | None) -> Plan:
    plan = plan_by_share(model, **options)
    return Plan(simulation.simulated(plan.memory, least=least), plan.catalog)


@checked
def job(model: ModelGiven = None, **options: Unpack[JobOptions]) -> Job:
    """Return a model under a training config, to be planned many times.

    Args:
        model: As :func:`memplan.plan` takes it.
        options: Keywords of :class:`memplan.JobOptions`, but for the device, which each plan has its own.

    Raises:
        MemplanError: As :func:`memplan.plan` raises it.
        TypeError: A keyword that names a device.

    Example:
        >>> import memplan
        >>> job = memplan.job("llama-3.2-1b", config="lora")
        >>> job.plan("rtx4090", sequence_length=1024).verdict
        'fits'
    """
    of_device = ("gpu", "gpu_memory", "gpus_per_node", "host_memory", "profile")
    refused = dict.fromkeys(of_device, "name the GPU in each plan")
    inputs = job_inputs("job", model, options, refused=refused)
    known = inputs.model()
    return Job(CompiledPlan(known, inputs.setup(known, gpus=inputs.gpus)), inputs.catalog)
