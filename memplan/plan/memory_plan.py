"""The answer as a value: the peak of a training step against a device, and every line that explains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from memplan.catalog.entries import Gpu
from memplan.documents.frozen_values import dataclass
from memplan.model.model import Model
from memplan.plan.allowances import Allowances, MachineProfile
from memplan.plan.assumptions import assumptions, not_modelled
from memplan.plan.bytes_per_parameter import BytesPerParameter, bytes_per_parameter
from memplan.plan.components import Component, InstantForm, SavedTensor, components, instant_forms, saved_tensors
from memplan.step.kernels.family_code import dropouts
from memplan.step.units.host_memory import HostMemory
from memplan.training.own_settings import OwnSetting
from memplan.training.resolution.resolved_keys import resolved_keys
from memplan.training.resolved import TrainingSetup

if TYPE_CHECKING:
    from memplan.step.instants import StepForms
    from memplan.step.pipelines.rank_timeline import RankRow
    from memplan.step.states.model_states import ModelStates
    from memplan.step.tapes.moments import Instant

UNLISTED = "a GPU of "
"""What the name of a device that is in no catalog begins with; its memory follows."""

GPUS_PER_NODE = 8
"""GPUs of a node where nothing says how many."""

SEARCHED = "a search plans with shares, which cost nothing"
"""Why the reserve of a plan is a share that nobody has tried to simulate."""

Verdict = Literal["fits", "tight", "no"]


def verdict_of(device_bytes: int, upper_bytes: int, usable_bytes: int) -> Verdict:
    """Return whether what a device needs fits: at the upper end, as expected only, or not at all."""
    return "fits" if upper_bytes <= usable_bytes else "tight" if device_bytes <= usable_bytes else "no"


@dataclass(frozen=True, slots=True)
class Device:
    """What a job has to fit on."""

    gpu: Gpu  # Catalog entry, or one made from ``--gpu-memory``
    name: str  # Its catalog name
    count: int = 1  # Devices whose memory is pooled
    profile: MachineProfile | None = None  # The card's own workspaces and context where they were measured
    host_memory_bytes: int | None = None  # Memory of a node's host that jobs may take; None for any amount
    node_gpus: int = GPUS_PER_NODE  # GPUs of a node, which share that

    @property
    def counted_name(self) -> str:
        """Its name, with how many where memory is pooled."""
        return self.name if self.count == 1 else f"{self.count} x {self.name}"

    @property
    def options(self) -> tuple[str, str]:
        """The words that name one of it on a command line."""
        unlisted = self.name.startswith(UNLISTED)
        return ("--gpu-memory", self.name.removeprefix(UNLISTED)) if unlisted else ("--gpu", self.name)

    @property
    def memory_bytes(self) -> int:
        """Memory of all devices as the driver reports it."""
        return self.gpu.memory_bytes * self.count

    def usable_bytes(self, reserve_bytes: int) -> int:
        """Return the memory of all devices that CUDA offers, less what is to be kept free on each."""
        return max(0, self.gpu.cuda_total_bytes - reserve_bytes) * self.count


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change of the training config, planned."""

    change: str  # What to do, as settings that ``--set`` takes
    saves_bytes: int  # How much less the device needs
    flips_verdict: bool  # Whether the job fits then
    cost: str  # What it costs besides memory
    device_bytes: int  # What the device needs then, with memory to spare
    needed_bytes: int  # What it is expected to need then: less, where the job runs in what little there is
    own: tuple[OwnSetting, ...] = ()  # The settings in the words of the job's stack

    def verdict_in(self, usable_bytes: int) -> str:
        """Say whether the job fits then, may fit, or needs another change besides."""
        return "fits" if self.flips_verdict else "tight" if self.needed_bytes <= usable_bytes else "not yet"

    @property
    def own_text(self) -> str:
        """The settings in the words of the job's stack, or nothing where it takes memplan's."""
        return ", ".join(dict.fromkeys(setting.text for setting in self.own if setting.own_key is not None))


@dataclass(frozen=True, slots=False)
class MemoryPlan:
    """The answer: the peak of a training step, component by component, against a device.

    What explains it (components, assumptions, ...) is put together when it is first read, so that a search
    can evaluate thousands of plans of which it shows a few.
    """

    model: Model
    own: Model  # The same as the planned rank has it
    setup: TrainingSetup
    device: Device
    verdict: Verdict
    usable_bytes: int
    peak: Instant
    instants: tuple[tuple[str, int], ...]
    requested_bytes: int  # Live tensors and what kernels allocate inside themselves
    allocated_bytes: int  # After block rounding, and with libraries' workspaces
    reserved_bytes: int  # Segments that the allocator holds with memory to spare
    device_bytes: int  # What nvidia-smi shows then
    upper_bytes: int  # Upper end of the interval around ``device_bytes``
    persistent_bytes: int  # Weights, master weights, gradients kept and optimizer states
    states: ModelStates
    forms: StepForms
    parts: tuple[int, ...]  # Activations, logits, temporaries and gradients at the peak
    communication_bytes: int  # Gathered weights, and buffers and buckets that gradients are reduced in
    values: tuple[int, ...]  # Values of the quantities that the forms are made of
    evaluated_values: tuple[int, ...]  # The same for a forward that evaluates
    buffer_bytes: int
    rounding_bytes: int
    doubt_bytes: int  # What a compiler, or the mask of padding that nobody spoke of, may take besides, which the upper end includes
    padding_bytes: int  # What the upper end has for rows of which nobody said whether they have padding, the allocator's reserve included
    apart_bytes: int  # Reserved beyond the peak, as a CUDA graph's memory and the update's scratch stand apart; else 0
    allowances: Allowances
    micro_batch_size: int
    sequence_length: int
    # The least device total with which the run is known to survive, when the card is nearly full and the allocator
    # releases what it caches; the verdict rests on it.
    least_bytes: int
    lower_bytes: int  # Lower end of the interval: less than that is not to be had
    # Why the reserve is a share of the allocated bytes; empty where it is simulated.
    reserve_by_share: str = SEARCHED
    # The same job with its reserve as a share, which other plans of a search are compared with; None where this one is
    # that.
    by_share: MemoryPlan | None = None
    # What to change where it does not fit (:func:`memplan.plan.suggested.suggestions.with_suggestions`).
    suggestions: tuple[Suggestion, ...] = ()
    # Plans the job with padded rows, where nobody said whether they are.
    padded: Callable[[], MemoryPlan] | None = field(default=None, compare=False, repr=False)
    ranks: tuple[RankRow, ...] = ()  # The ranks of a pipeline, of which this is the fullest
    rank_plans: tuple[MemoryPlan, ...] = ()  # Their own plans

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """The lines of the sum at the peak, in the order of every table; they add up to the device total."""
        return components(self)

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """What the answer takes for granted, one sentence each."""
        return assumptions(self)

    @cached_property
    def not_modelled(self) -> tuple[str, ...]:
        """What the answer leaves out, one sentence each."""
        return not_modelled(self)

    @cached_property
    def bytes_per_parameter(self) -> BytesPerParameter:
        """Exact bytes per parameter of a large hidden matrix."""
        return bytes_per_parameter(self.setup)

    @cached_property
    def saved_tensors(self) -> tuple[SavedTensor, ...]:
        """What one layer of each kind saves for backward."""
        return saved_tensors(self)

    @cached_property
    def instant_forms(self) -> tuple[InstantForm, ...]:
        """Every instant at its fullest moment, as a closed form."""
        return instant_forms(self)

    @property
    def pads_rows(self) -> bool:
        """Whether rows of the micro-batch have padding."""
        return self.setup.config.pads(self.micro_batch_size * self.setup.rows_per_sample)

    @property
    def attention(self) -> str:
        """The kernel of attention that runs: rows with padding have a mask, which not every kernel takes."""
        masked = self.setup.masked_attention if self.pads_rows else None
        return masked or self.setup.profile.attention

    @property
    def gpu_count(self) -> int:
        """GPUs that the plan is about: those of its parallel setup, or those whose memory is pooled."""
        return max(self.device.count, self.setup.config.parallel.gpus)

    @property
    def host(self) -> HostMemory:
        """What one rank keeps in host memory, where an engine of several GPUs or a trainer of one keeps it there."""
        waiting = (tensors for part in self.forms.waiting for tensors in part.on_host(self.values))
        return HostMemory((*self.states.host.tensors, *waiting))

    @property
    def host_bytes(self) -> int:
        """Bytes of all that one rank has in host memory: optimizer states there, step counters, and what :attr:`host` lists."""
        return self.states.host_bytes + self.host.bytes - self.states.host.bytes

    @property
    def node_ranks(self) -> int:
        """Ranks of the job that run on one node."""
        return min(self.gpu_count, self.device.node_gpus)

    @property
    def node_name(self) -> str:
        """A node by its GPUs: ``node of 8 GPUs``."""
        return f"node of {self.node_ranks} GPU{'s' if self.node_ranks > 1 else ''}"

    @property
    def node_host_bytes(self) -> int:
        """Host memory that the ranks of a node take together, pinned tensors rounded up as torch does."""
        return self.node_ranks * (self.host.taken_bytes or self.host_bytes)

    @property
    def needed_bytes(self) -> int:
        """What the device is expected to need: with memory to spare, or the least where the job runs in what little there is."""
        spare = self.upper_bytes <= self.usable_bytes or self.verdict == "no"
        return self.device_bytes if spare else self.least_bytes

    @property
    def releases_cache(self) -> bool:
        """Whether the job fits as its allocator releases what it caches: with memory to spare it would hold more than is usable."""
        return self.verdict == "fits" and self.upper_bytes > self.usable_bytes

    @property
    def most_bytes(self) -> int:
        """What the device needs at most: the interval's upper end, or the least that a job which releases its cache runs in."""
        return self.least_bytes if self.releases_cache else self.upper_bytes

    @property
    def exceeds_host(self) -> bool:
        """Whether that is more than a node has."""
        limit = self.device.host_memory_bytes
        return limit is not None and self.node_host_bytes > limit

    @property
    def exceeds_device(self) -> bool:
        """Whether blocks and context alone are more than the device has, whatever the allocator's reserve."""
        return self.allocated_bytes + self.allowances.context_bytes > self.usable_bytes

    @property
    def training(self) -> dict[str, Any]:
        """The keys of the training config with every default filled in, at the plan's own batch and length."""
        keys = resolved_keys(self.setup)
        residual, attention = dropouts(self.model.spec, self.setup)
        return keys | {
            "micro_batch_size": self.micro_batch_size,
            "sequence_length": self.sequence_length,
            "dropout": residual if residual == attention else None,
        }


VERDICTS: tuple[Verdict, ...] = ("fits", "tight", "no")
"""Verdicts, the best first."""


def fullest_rank(plans: Sequence[MemoryPlan], setup: TrainingSetup) -> MemoryPlan:
    """Return the plan of a pipeline's rank whose GPU holds most, the first of equals, with a row for each; all of them have to fit.

    Args:
        plans: Those of all ranks.
        setup: The setup of the whole pipeline.
    """
    from memplan.step.pipelines.rank_timeline import rank_row

    parallel, layers = setup.config.parallel, plans[0].model.spec.num_hidden_layers
    rows = tuple(
        rank_row(rank, parallel, layers, one.persistent_bytes, one.peak.name, one.requested_bytes, one.device_bytes)
        for rank, one in enumerate(plans)
    )
    return replace(
        max(plans, key=lambda plan: plan.device_bytes),
        setup=setup,
        ranks=rows,
        rank_plans=tuple(plans),
        verdict=max((plan.verdict for plan in plans), key=VERDICTS.index),
        upper_bytes=max(plan.upper_bytes for plan in plans),  # buffers of another rank's streams may be larger
        least_bytes=max(plan.least_bytes for plan in plans),
        lower_bytes=max(plan.lower_bytes for plan in plans),
        reserve_by_share=next((plan.reserve_by_share for plan in plans if plan.reserve_by_share), ""),
    )
