"""Model, setup and GPU meet here: every byte of a training job at its fullest instant."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from operator import mul

from memplan.catalog.entries import Gpu
from memplan.catalog.kernel_profiles import AttentionKernel, KernelProfile
from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.plan.allowances import beside_engine
from memplan.plan.job_allowances import allowances_of, engine_bytes
from memplan.plan.jobs.beyond_peak import apart_bytes, compiler_doubt_bytes
from memplan.plan.jobs.forms_by_regime import Compiled, FormsByRegime
from memplan.plan.jobs.unmodelled_jobs import refuse_unmodelled, refuse_whole_load
from memplan.plan.memory_plan import Device, MemoryPlan, fullest_rank, verdict_of
from memplan.step.beside.second_forward import all_on_card, with_states_beside
from memplan.step.divided.divided_model import divided
from memplan.step.instants import StepForms
from memplan.step.kernels.loss_pieces import LARGE_CARD_BYTES
from memplan.step.kernels.refused_row_masks import may_pad
from memplan.step.regimes import regime_of
from memplan.step.states.model_states import ModelStates, with_cast_biases
from memplan.step.states.optimizer_scratch import step_temporaries
from memplan.step.states.parallel_shards import bucket_bytes, is_sharded, runs_engine
from memplan.step.states.partitioned_weights import rank_model_states
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.moments import Instant
from memplan.training.adapters import adapter_tensors
from memplan.training.resolved import TrainingSetup
from memplan.training.stack_models import built_by, with_model_built
from memplan.units import round_up

BLOCK_BYTES = 512
"""What CUDA's caching allocator rounds every tensor up to (kMinBlockSize, c10/core/AllocatorConfig.h)."""

Kernels = tuple[KernelProfile, *tuple[KernelProfile | AttentionKernel | None, ...]]

CardKind = tuple[str, str | None, str, bool]


def card_kind(gpu: Gpu) -> CardKind:
    """Return all of a card that decides how a job runs on it: cards that have it in common have one plan."""
    return gpu.vendor, gpu.compute_capability, gpu.architecture, gpu.cuda_total_bytes > LARGE_CARD_BYTES


def _kernels(setup: TrainingSetup) -> Kernels:
    """Return all of a setup that a card decides and its closed forms depend on."""
    seconds = [kernel for second in setup.seconds.values() for kernel in _kernels(second.setup)]
    return setup.profile, setup.masked_attention, setup.wide_attention, setup.tower_attention, *seconds  # type: ignore[return-value]


def _of_rank(model: Model, setup: TrainingSetup) -> Model:
    """Return a model as a rank of a pipeline has it; itself, where there is none."""
    if setup.config.parallel.pipeline == 1:
        return model
    from memplan.step.pipelines.pipeline_schedules import staged

    return staged(model, setup)


class CompiledPlan:
    """A model under a setup, ready to be evaluated for any batch, sequence length and device.

    Args:
        setup: The training setup; its batch and sequence length are the defaults.
        known: Its states, where they are known from another card.

    Attributes:
        model: The model as its stack builds it.
        own: The same as a rank has it.

    Raises:
        CannotAnswerError: A part of the model whose memory is not modelled.
    """

    def __init__(self, model: Model, setup: TrainingSetup, known: ModelStates | None = None) -> None:
        self.model = built_by(model, setup)
        setup = with_model_built(setup, self.model, model)
        self.own = model = _of_rank(divided(self.model, setup), setup)
        self.setup = setup
        refuse_unmodelled(model, setup)
        adapters = () if known else adapter_tensors(model, setup)
        states = known or with_states_beside(
            rank_model_states(setup, model.inventory, adapters, model.spec.hidden_size), setup.seconds
        )
        self._regimes = FormsByRegime(self.model, model, setup, states)
        if setup.formats["hidden_matrix"].product == "integers":
            regime = regime_of(model, setup, setup.config.micro_batch_size, setup.config.sequence_length)
            states = with_cast_biases(states, self._regimes.tapes(regime)[1].cast_biases(), setup.config.compute_dtype)
            self._regimes = FormsByRegime(self.model, model, setup, states)
        self.states = states
        self._by_card: dict[CardKind, CompiledPlan] = {}
        self._sizes: dict[tuple[int, int], tuple[tuple[int, ...], Compiled, int, list[int]]] = {}
        self._by_kernels: dict[Kernels, CompiledPlan] = {_kernels(setup): self}
        self._whole: tuple[CompiledPlan, Gpu] | None = None  # What a card's own plan was made of, and the card
        self.bucket_bytes = bucket_bytes(
            setup.config.parallel, setup.compute_bytes, states.gradient_bytes, model.spec.hidden_size
        )
        self.bucket_bytes += states.staged_bytes
        self.constant_bytes = states.weight_bytes + states.master_bytes + states.state_bytes + states.average_bytes
        self.constant_bytes += self.bucket_bytes

    @cached_property
    def ranks(self) -> tuple[CompiledPlan, ...]:
        """The plans of a pipeline's ranks where no stage is named; answers are then those of the fullest rank."""
        parallel = self.setup.config.parallel
        if parallel.pipeline == 1 or parallel.stage is not None:
            return ()
        from memplan.step.pipelines.pipeline_schedules import at_stage

        setups = (at_stage(self.setup, stage) for stage in range(parallel.pipeline))
        return tuple([CompiledPlan(self.model, setup) for setup in setups])

    def on(self, gpu: Gpu) -> CompiledPlan:
        """Return the plan as the job runs on a card: itself, where the card changes nothing.

        Raises:
            CannotAnswerError: The card cannot do something that the job needs.
        """
        key = card_kind(gpu)
        if key not in self._by_card:
            plan = self._with_setup(all_on_card(self.setup, self.model, gpu))
            if may_pad(self.setup, 2):  # the kernel under a mask is the card's too
                plan = copy(plan)
                plan.__dict__.pop("_with_padding", None)
                plan._by_card, plan._whole = {}, (self, gpu)
            self._by_card[key] = plan._by_card[key] = plan
        return self._by_card[key]

    @property
    def kernels(self) -> Kernels:
        """All of a card that its closed forms depend on: plans on two cards that have them in common request the same."""
        return _kernels(self.setup)

    def _with_setup(self, setup: TrainingSetup) -> CompiledPlan:
        """Return the plan of a setup that differs in its kernels, or only in what is said of it."""
        if setup is self.setup:
            return self
        if _kernels(setup) not in self._by_kernels:
            # No card decides these, but for biases that a forward casts.
            states = None if setup.formats["hidden_matrix"].product == "integers" else self.states
            self._by_kernels[_kernels(setup)] = CompiledPlan(self.model, setup, states)
        plan = copy(self._by_kernels[_kernels(setup)])
        plan.setup, plan._by_card = setup, {}
        return plan

    def compiled(self, batch: int | None = None, length: int | None = None) -> Compiled:
        """Return the closed forms that hold for a batch and a length, by default the setup's; see :class:`FormsByRegime`."""
        config = self.setup.config
        return self._regimes.compiled(batch or config.micro_batch_size, length or config.sequence_length)

    @property
    def forms(self) -> StepForms:
        """The closed forms for the setup's own batch and length."""
        return self.compiled().forms

    @property
    def candidates(self) -> tuple[Instant, ...]:
        """The instants that can be the peak, for the setup's own batch and length."""
        return self.compiled().candidates

    @cached_property
    def rounding_bytes(self) -> int:
        """What block rounding adds to weights, gradients and states, exactly; shards of gradients come unit by unit."""
        total = 0
        by_unit = is_sharded(self.setup.config.parallel)
        flat = runs_engine(self.setup.config.parallel)
        for entry in (entry for entry in self.states.tensors if not (flat and entry.trainable)):
            gradient = 0 if by_unit else entry.gradient_bytes
            sizes = (entry.weight_bytes, entry.master_bytes, gradient, entry.state_bytes)
            total += entry.tensor.count * sum(round_up(size, BLOCK_BYTES) - size for size in sizes)
        return total + sum(round_up(size, BLOCK_BYTES) - size for size in self.forms.unit_gradients)

    @property
    def persistent_bytes(self) -> int:
        """Weights, master weights, optimizer states, and gradients where they live for the whole step."""
        accumulates = self.setup.config.gradients.lifetime == "step"
        gradients = self.states.gradient_bytes if accumulates else 0
        if self.setup.config.parallel.pipeline > 1:  # more, where a view of some keeps others
            gradients = sum(self.forms.unit_gradients)
        return self.states.weight_bytes + self.states.master_bytes + self.states.state_bytes + gradients

    def values(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the values of the quantities that the forms are made of.

        Raises:
            InvalidFileError: The model has fewer learned positions than ``length``.
        """
        return self._regimes.values(batch, length)

    def requested_bytes(self, batch: int, length: int) -> int:
        """Return the requested peak for one micro-batch of ``batch`` sequences."""
        if self.ranks:
            return max(rank.requested_bytes(batch, length) for rank in self.ranks)
        values = self.values(batch, length)
        compiled = self.compiled(batch, length)
        peak: int = max(sum(map(mul, form, values)) + item.partial_bytes(values) for form, item in compiled.totals)
        return self.constant_bytes + compiled.forms.buffers.total_bytes(values) + peak

    def upper_requested_bytes(self, batch: int, length: int) -> int:
        """Return the requested peak that the upper end is of: under the mask of padding, unless somebody said whether rows have some."""
        if self.ranks:
            return max(rank.upper_requested_bytes(batch, length) for rank in self.ranks)
        return max(self.requested_bytes(batch, length), self._padded(batch, length)[1])

    def least_bytes(self, batch: int, length: int) -> int:
        """Return what is there all the time and, on one GPU, what layers are given or the update takes: less than any step's peak; nothing is taped."""
        config, setup = self.setup.config, self.setup
        if config.parallel.gpus > 1:
            return self.constant_bytes
        stream = batch * length * self.own.spec.hidden_size * setup.residual_bytes
        if config.offload.activations != "none":
            return self.constant_bytes + stream
        every = range(self.own.spec.num_hidden_layers)  # each keeps its input where it is computed again
        again = all(map(setup.computes_again, every)) and setup.stack.input_gradients != "trained-layers"
        waits = config.gradients.lifetime == "step"
        update = step_temporaries(setup, self.states.tensors).bytes + self.states.gradient_bytes if waits else 0
        return self.constant_bytes + max(stream * (len(every) if again else 1), update)

    def saved_bytes(self, batch: int, length: int) -> int:
        """Return what is there all the time and what :meth:`FormsByRegime.saved_bytes` tells beside it: no more than a step requests at its peak.

        It takes a third of the time of the closed forms. Nothing is said of what ranks save that hold shards.
        """
        config = self.setup.config
        if is_sharded(config.parallel) or config.offload.activations != "none" or config.compile != "none":
            return self.least_bytes(batch, length)
        return self.constant_bytes + self._regimes.saved_bytes(batch, length)

    @cached_property
    def _with_padding(self) -> CompiledPlan | None:
        """The same job with rows that have padding; None where it is not planned."""
        with suppress(CannotAnswerError):
            if self._whole is not None:
                whole, gpu = self._whole
                return whole._with_padding and whole._with_padding.on(gpu)
            setup = replace(self.setup, config=replace(self.setup.config, padded_rows=True))
            states = None if setup.formats["hidden_matrix"].product == "integers" else self.states
            return CompiledPlan(self.model, setup, states)
        return None

    def _padded(self, batch: int, length: int) -> tuple[CompiledPlan | None, int]:
        """Return the same job with rows that have padding, where nobody said whether they do, and the peak that it requests; 0 where it is not planned."""
        padded = self._with_padding if may_pad(self.setup, batch) else None
        with suppress(CannotAnswerError):  # code that is read as the step is played
            return padded, 0 if padded is None else padded.requested_bytes(batch, length)
        return None, 0

    def evaluate(self, device: Device, batch: int | None = None, length: int | None = None) -> MemoryPlan:
        """Return the plan for a device.

        Args:
            device: What the job has to fit on.
            batch: Sequences per micro-batch; the setup's when None.
            length: Tokens per sequence; the setup's when None.

        Raises:
            CannotAnswerError: The device cannot do something that the job needs.
        """
        plan = self.on(device.gpu)
        if plan is not self:
            return plan.evaluate(device, batch, length)
        if self.ranks:
            return fullest_rank([rank.evaluate(device, batch, length) for rank in self.ranks], self.setup)
        config = self.setup.config
        answer = self._evaluated(device, batch or config.micro_batch_size, length or config.sequence_length)
        return replace(answer, verdict="no") if answer.exceeds_host else answer

    def _sized(self, batch: int, length: int) -> tuple[tuple[int, ...], Compiled, int, list[int]]:
        """Return values, forms, the bytes of buffers and those requested at each instant, which are the same on all devices."""
        if (batch, length) not in self._sizes:
            values, compiled = self.values(batch, length), self.compiled(batch, length)
            buffers = compiled.forms.buffers.total_bytes(values)
            always = self.constant_bytes + buffers
            sizes = [
                always + sum(map(mul, form, values)) + item.partial_bytes(values) for form, item in compiled.totals
            ]
            self._sizes[batch, length] = values, compiled, buffers, sizes
        return self._sizes[batch, length]

    def _evaluated(self, device: Device, batch: int, length: int) -> MemoryPlan:
        """Return the plan of one rank for a device that can do all that the job needs."""
        values, compiled, buffers, sizes = self._sized(batch, length)
        always, requested = self.constant_bytes + buffers, max(sizes)
        peak = compiled.candidates[sizes.index(requested)]
        allowances = allowances_of(self.setup, device, compiled.forms.stream_bytes)
        allowances = beside_engine(allowances, engine_bytes(self.setup, device, requested - always))
        allocated = allowances.allocated_bytes(requested, self.rounding_bytes)
        instants = _by_instant(compiled.candidates, sizes)
        most = dict(instants)
        padded, size = self._padded(batch, length)  # of no compiled step
        doubt = max(0, size - requested) + compiler_doubt_bytes(self._regimes, batch, length, most)
        apart = apart_bytes(self._regimes, most, always)
        total, upper = allowances.device_bytes(allocated) + apart, allowances.upper_bytes(allocated + doubt) + apart
        usable = device.usable_bytes(self.setup.reserve_bytes)
        refuse_whole_load(self.model, self.setup, usable)
        return MemoryPlan(
            model=self.model,
            own=self.own,
            setup=self.setup,
            device=device,
            verdict=verdict_of(total, upper, usable),
            usable_bytes=usable,
            peak=peak,
            instants=instants,
            requested_bytes=requested,
            allocated_bytes=allocated,
            reserved_bytes=total - allowances.context_bytes,
            device_bytes=total,
            upper_bytes=upper,
            persistent_bytes=self.persistent_bytes,
            states=self.states,
            forms=compiled.forms,
            parts=_parts(peak, values),
            communication_bytes=peak.communication + self.bucket_bytes,
            values=values,
            buffer_bytes=buffers + self.states.average_bytes,
            rounding_bytes=self.rounding_bytes,
            doubt_bytes=doubt,
            padding_bytes=allowances.upper_reserved_bytes(max(0, size - requested)),
            padded=partial(padded.evaluate, device, batch, length) if padded else None,
            apart_bytes=apart,
            allowances=allowances,
            evaluated_values=self.values(self.setup.config.evaluation_batch_size or batch, length),
            micro_batch_size=batch,
            sequence_length=length,
            least_bytes=total,
            lower_bytes=total,
        )


def _parts(peak: Instant, values: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of each part at the peak; what is gathered there is told apart."""
    parts = list(peak.form.part_bytes(values))
    parts[Part.TEMPORARIES] += peak.partial_bytes(values) - peak.communication
    return tuple(parts)


def _by_instant(candidates: Sequence[Instant], sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    fullest: dict[str, int] = {}
    for candidate, size in zip(candidates, sizes, strict=True):
        fullest[candidate.name] = max(size, fullest.get(candidate.name, 0))
    return tuple(fullest.items())
