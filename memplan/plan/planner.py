"""Model, setup and GPU meet here: every byte of a training job at its fullest instant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from operator import mul

from memplan.catalog.entries import Gpu
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.model import Model
from memplan.plan.allowances import (
    Allowances,
    allowances_for,
    beside_engine,
    communicating,
    communicators_of,
    measured_allowances,
)
from memplan.plan.memory_plan import Device, MemoryPlan, verdict_of
from memplan.step.behind_forward import EVALUATION
from memplan.step.blocks.block_settings import Regime
from memplan.step.blocks.cross_entropy import PIECE_TOKENS, STRETCH_TOKENS
from memplan.step.blocks.fused_linear_loss import linear_chunk
from memplan.step.blocks.token_chunk_loss import TOKEN_CHUNK, TOKEN_CHUNKS
from memplan.step.divided.divided_model import divided
from memplan.step.instants import StepForms, compile_step, regime_of, step_on_tape
from memplan.step.kernels.family_code import family_code
from memplan.step.kernels.on_card import on_card
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.states.cast_biases import with_cast_biases
from memplan.step.states.parallel_shards import bucket_bytes, is_flat, is_partitioned, is_sharded, runs_engine
from memplan.step.states.partitioned_weights import held_states
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import Coefficients, Part, constant_form, fixed_form, quantities
from memplan.step.tapes.played import Instant, dominant
from memplan.training.adapters import adapter_tensors, adapts_experts
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.stack_models import built_by
from memplan.units import round_up
from memplan.values import dataclass

BLOCK_BYTES = 512
"""What CUDA's caching allocator rounds every tensor up to (kMinBlockSize, c10/core/AllocatorConfig.h)."""


def devices_for(setup: TrainingSetup, devices: Sequence[Device]) -> list[Device]:
    """Return the devices that a setup is for: where states are offloaded, those with memory of their own.

    Raises:
        CannotAnswerError: None is left, or memory is pooled for a setup that says how it shares out.
    """
    ranks = setup.config.parallel.gpus
    if ranks > 1 and any(device.count > 1 for device in devices):
        raise CannotAnswerError(
            f"parallel.data: {ranks} plans one GPU of {ranks}; leave it out where memory of several GPUs is pooled"
        )
    suited = [device for device in devices if not (setup.offloads_states and device.gpu.unified_memory)]
    for device in devices if not suited else ():
        raise CannotAnswerError(
            f"offload.optimizer_states: {device.name} shares its memory with the CPU, so that moving states there frees none"
        )
    return suited


def allowances_of(setup: TrainingSetup, device: Device, stream_bytes: int = 0) -> Allowances:
    """Return the allowances for a setup on a device, or on one of the several that it is for.

    Args:
        setup: The training setup.
        device: What the job, or one rank of it, has to fit on.
        stream_bytes: Buffers of collectives that no other stream can use.

    Raises:
        CannotAnswerError: States are to lie in host memory, which the device shares.
    """
    devices_for(setup, [device])
    alone = allowances_for(device.gpu, device.count, setup.reserve_share, setup.hardware)
    alone = alone if device.profile is None else measured_allowances(alone, device.profile, device.count)
    communicators = communicators_of(device.gpu, setup.config.parallel, setup.hardware)
    return communicating(alone, stream_bytes, communicators) if communicators else alone


def searched_allowances(
    setup: TrainingSetup, device: Device, stream_bytes: int = 0, *, least: bool = False
) -> Allowances:
    """Return the allowances of a device whatever a step takes; see :func:`with_engine`."""
    return with_engine(allowances_of(setup, device, stream_bytes), setup, device, least=least)


def with_engine(allowances: Allowances, setup: TrainingSetup, device: Device, *, least: bool = False) -> Allowances:
    """Return allowances with an engine that generates on the device.

    Args:
        allowances: Those without it.
        setup: The training setup.
        device: What the job has to fit on.
        least: Leave out an engine that sleeps, for who looks at its plan besides.

    Raises:
        CannotAnswerError: The engine sleeps, so that what it takes depends on the step.
    """
    engine = engine_bytes(setup, device, 0)
    if not engine or not setup.rollout.sleeps:
        return beside_engine(allowances, engine)
    if least:
        return allowances
    raise CannotAnswerError(
        "method.rollout.sleeps: what an engine that sleeps takes depends on the step, and is not searched; memplan fit plans it"
    )


def engine_bytes(setup: TrainingSetup, device: Device, step_bytes: int) -> int:
    """Return what an engine that generates on the same device takes at the peak.

    Args:
        setup: The training setup.
        device: What the job has to fit on.
        step_bytes: What a step takes at its peak beside what is always there.

    Formula:
        ``engine_fraction * memory``; less ``step_bytes`` where the engine sleeps, and a step has let go of these while it wakes

    Source:
        ``gpu_memory_utilization`` in vllm/config/cache.py (commit 002f10e): a share of the GPU, for each engine;
        ``VLLMGeneration`` in trl/generation/vllm_generation.py (1.16.0), lines 489 to 492 and 750: it sleeps at level 2,
        keeping nothing, and PyTorch's cache is emptied before it wakes.
    """
    if setup.config.method.rollout is None or setup.rollout.engine != "vllm":
        return 0
    share = int(device.gpu.cuda_total_bytes * setup.rollout.engine_fraction) * device.count
    return max(0, share - step_bytes) if setup.rollout.sleeps else share


def _refuse_wide_tables(model: Model, setup: TrainingSetup) -> None:
    """Raise for an embedding or head in floats wider than products are computed in.

    Such an embedding makes the whole residual stream as wide; plain torch refuses the products then.
    Autocast, which all weights in fp32 mean, is another matter.
    """
    roles = {tensor.role for tensor in model.inventory} & {"embedding", "head"}
    for role in () if setup.autocast or setup.kbit_floats else sorted(roles):
        name = setup.format_names[role]
        if FLOAT_BYTES.get(name, 0) > setup.compute_bytes:
            raise CannotAnswerError(
                f"{setup.name}: weights.{role} in {name} beside products in {setup.config.compute_dtype} is not modelled; "
                f"use {setup.config.compute_dtype}, or fp32 for all weights, which is autocast"
            )


EXPERT_PROJECTIONS = frozenset(("all-linear", "gate_proj", "up_proj", "down_proj"))
"""Targets of adapters that stacked experts have too."""


def _refuse_adapted_experts(model: Model, setup: TrainingSetup) -> None:
    """Raise for adapters that a library puts on stacked experts, where no tape has them or PEFT itself refuses."""
    adapter, code = setup.config.adapter, family_code(setup.stack.model_code, model.spec.architecture)
    if adapter is None or not code.adapts_experts or EXPERT_PROJECTIONS.isdisjoint(adapter.targets):
        return
    what, last = (
        f"{setup.stack.name} puts adapters on the stacked experts of {model.spec.name}",
        "which is not modelled",
    )
    if adapts_experts(model, setup):
        if adapter.kind != "dora" and not adapter.dropout:
            return
        last = f"which PEFT refuses with {'dropout' if adapter.dropout else adapter.kind}"
    raise CannotAnswerError(
        f"{setup.name}: adapter.targets: {what}, {last}; target projections of attention, such as q_proj"
    )


def _refuse_fused_adapters(setup: TrainingSetup) -> None:
    """Raise for adapters fused with projections beyond what the tape has of them."""
    adapter = setup.config.adapter
    if adapter is None or setup.profile.adapters != "fused":
        return
    if adapter.kind == "dora" or setup.residual_bytes != setup.compute_bytes:
        what = "dora" if adapter.kind == "dora" else "a residual stream in fp32 beside products in 16 bits"
        raise CannotAnswerError(
            f"{setup.name}: kernels.adapters: fused with {what}, as {setup.stack.name} runs it, is not modelled; use composite"
        )


@dataclass(frozen=True, slots=True)
class Compiled:
    """The closed forms of a step within one regime of batch and length.

    Attributes:
        candidates: For each instant, the moments that can be its fullest.
        totals: Each candidate's coefficients, all parts together: what a peak by itself needs.
    """

    forms: StepForms
    candidates: tuple[Instant, ...]
    totals: tuple[tuple[Coefficients, Instant], ...]


class CompiledPlan:
    """A model under a setup, ready to be evaluated for any batch, sequence length and device.

    Args:
        model: The model.
        setup: The training setup; its batch and sequence length are the defaults.

    Attributes:
        model: The model as its stack builds it.
        own: The same as a rank has it.

    Raises:
        CannotAnswerError: A part of the model whose memory is not modelled.
    """

    def __init__(self, model: Model, setup: TrainingSetup) -> None:
        self.model = built_by(model, setup)
        self.own = model = divided(self.model, setup)
        self.setup = setup
        _refuse_wide_tables(model, setup)
        _refuse_adapted_experts(model, setup)
        _refuse_fused_adapters(setup)
        if self.generates:
            from memplan.step.rollouts.generated_completions import refuse_generation

            refuse_generation(model.spec, setup)
        if setup.config.compile != "none":
            from memplan.step.compiled.compiled_model import refuse_compiled

            refuse_compiled(model.spec, setup)
        self.states = held_states(setup, model.inventory, adapter_tensors(model, setup), model.spec.hidden_size)
        self._by_regime: dict[tuple[Regime, int, int], Compiled] = {}
        self._on_tape: dict[Regime, tuple[StepInputs, ModelOnTape]] = {}
        self._by_card: dict[tuple[str, str | None, str], CompiledPlan] = {}
        self._by_profile: dict[KernelProfile, CompiledPlan] = {setup.profile: self}
        if setup.formats["hidden_matrix"].product == "integers":
            own = regime_of(model, setup, setup.config.micro_batch_size, setup.config.sequence_length)
            casts = self._tapes(own)[1].cast_biases()
            self.states = with_cast_biases(self.states, casts, setup.config.compute_dtype)
        states = self.states
        self.bucket_bytes = bucket_bytes(
            setup.config.parallel, setup.compute_bytes, states.gradient_bytes, model.spec.hidden_size
        )
        self.constant_bytes = states.weight_bytes + states.master_bytes + states.state_bytes + states.average_bytes
        self.constant_bytes += self.bucket_bytes

    def on(self, gpu: Gpu) -> CompiledPlan:
        """Return the plan as the job runs on a card: itself, where the card changes nothing.

        Args:
            gpu: The card.

        Raises:
            CannotAnswerError: The card cannot do something that the job needs.
        """
        key = (gpu.vendor, gpu.compute_capability, gpu.architecture)
        if key not in self._by_card:
            plan = self._with_setup(on_card(self.setup, self.model, gpu))
            self._by_card[key] = plan._by_card[key] = plan
        return self._by_card[key]

    def _with_setup(self, setup: TrainingSetup) -> CompiledPlan:
        """Return the plan of a setup that differs in its kernels, or only in what is said of it."""
        if setup is self.setup:
            return self
        if setup.profile not in self._by_profile:
            self._by_profile[setup.profile] = CompiledPlan(self.model, setup)
        plan = copy(self._by_profile[setup.profile])
        plan.setup, plan._by_card = setup, {}
        return plan

    def compiled(self, batch: int | None = None, length: int | None = None) -> Compiled:
        """Return the closed forms that hold for a batch and a length, by default the setup's.

        Args:
            batch: Sequences per micro-batch.
            length: Tokens per sequence.

        Raises:
            InvalidFileError: Generated completions leave no room for a prompt.
        """
        config = self.setup.config
        batch, length = batch or config.micro_batch_size, length or config.sequence_length
        if length <= self.setup.answer_length:
            told = f"completions of {self.setup.answer_length} tokens leave no prompt; see method.rollout.completion_length"
            raise InvalidFileError([f"sequence_length: {length}: {told}"])
        apart = (length if self.evaluates_apart or self.generates else 0, batch if self.generates else 0)
        key = regime_of(self.own, self.setup, batch, length), *apart
        if key not in self._by_regime:
            forms = self._forms(key[0])
            instants = self._with_evaluation(forms, length) if self.evaluates_apart else forms.candidates
            instants = (*instants, *self._generation(batch, length)) if self.generates else instants
            candidates = tuple(dominant(instants))
            totals = tuple((candidate.form.totals(), candidate) for candidate in candidates)
            self._by_regime[key] = Compiled(forms, candidates, totals)
        return self._by_regime[key]

    @property
    def evaluates_apart(self) -> bool:
        """Whether the job evaluates another number of rows than it trains on."""
        config = self.setup.config
        return config.evaluation and config.evaluation_batch_size is not None

    @property
    def generates(self) -> bool:
        """Whether the model generates the completions that it learns from."""
        return self.setup.config.method.rollout is not None and self.setup.rollout.engine == "transformers"

    def _generation(self, batch: int, length: int) -> Iterator[Instant]:
        """Yield the moments at which the rows that micro-batches of ``batch`` learn from are generated."""
        from memplan.step.rollouts.generated_completions import Completions, generating_setup, generation_moments

        setup, states = generating_setup(self.setup), self.states
        if setup is not self.setup:  # nothing is cast for products
            adapters = adapter_tensors(self.model, setup)
            states = held_states(setup, self.model.inventory, adapters, self.model.spec.hidden_size)

        def tapes(rows: int, tokens: int) -> tuple[StepInputs, ModelOnTape, Sequence[int]]:
            regime = regime_of(self.model, setup, rows, tokens)
            return *step_on_tape(self.model, setup, states, regime), self.values(rows, tokens)

        prompt = max(1, length - self.setup.answer_length)
        asked = Completions(batch * self.setup.generated_micro_batches, prompt, length)
        return generation_moments(self.model.spec, setup, asked, tapes)

    def _with_evaluation(self, forms: StepForms, length: int) -> tuple[Instant, ...]:
        """Return instants of which those of evaluation have its own rows, so that a micro-batch does not change them."""
        rows = self.setup.config.evaluation_batch_size
        assert rows is not None
        own = self._forms(regime_of(self.own, self.setup, rows, length))
        values = self.values(rows, length)
        more = own.buffers.total_bytes(values) - forms.buffers.total_bytes(self.values(1, length))
        evaluated = [instant for instant in own.candidates if instant.name == EVALUATION]
        fixed = [
            replace(one, form=fixed_form(one.form, values) + constant_form(Part.ACTIVATIONS, more)) for one in evaluated
        ]
        return (*(instant for instant in forms.candidates if instant.name != EVALUATION), *fixed)

    def _forms(self, regime: Regime) -> StepForms:
        """Return the closed forms of one rank's step."""
        if is_flat(self.setup.config.parallel):
            from memplan.step.ranks.engine_step import compile_engine_step

            return compile_engine_step(*self._tapes(regime))
        if self.setup.config.compile != "none":
            from memplan.step.compiled.compiled_model import compile_compiled_step

            return compile_compiled_step(*self._tapes(regime))
        if is_partitioned(self.setup.config.parallel):
            from memplan.step.ranks.gathered_step import compile_gathered_step

            return compile_gathered_step(*self._tapes(regime))
        if not is_sharded(self.setup.config.parallel):
            return compile_step(*self._tapes(regime))
        from memplan.step.ranks.parallel_step import compile_sharded_step

        return compile_sharded_step(self.own, self.setup, self.states, regime)

    def _tapes(self, regime: Regime) -> tuple[StepInputs, ModelOnTape]:
        if regime not in self._on_tape:
            self._on_tape[regime] = step_on_tape(self.own, self.setup, self.states, regime)
        return self._on_tape[regime]

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
        return self.states.weight_bytes + self.states.master_bytes + self.states.state_bytes + gradients

    def values(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the values of the quantities that the forms are made of.

        Raises:
            InvalidFileError: The model has fewer learned positions than ``length``.
        """
        positions = self.own.spec.learned_positions
        if 0 < positions < length:
            name = self.model.spec.name
            raise InvalidFileError([f"sequence_length: {length} is beyond the {positions} learned positions of {name}"])
        spec, profile = self.own.spec, self.setup.profile
        batch *= self.setup.rows_per_sample
        chunk = linear_chunk(batch * length, spec) if profile.loss == "fused-linear" else 0
        metrics = self.setup.stack.loop.metrics
        if most := {**dict.fromkeys(TOKEN_CHUNKS, TOKEN_CHUNK), "fp32-pieces": PIECE_TOKENS}.get(profile.loss):
            chunk = min(most, batch * (length - 1))
        elif self.setup.copies_logits:
            whole = metrics == "accuracy" and profile.loss == "fp32"
            answered = self.setup.answer_length or (length if whole else length - 1)
            chunk = min(PIECE_TOKENS, batch * answered)
        row = min(length, STRETCH_TOKENS) if profile.loss == "fp32-stretches" else 0
        answer, ranks = self.setup.answer_length, self.setup.config.parallel.tensor
        return quantities(batch, length, profile.loss_chunks, spec.vocab_size, chunk, row, answer, ranks)

    def requested_bytes(self, batch: int, length: int) -> int:
        """Return the requested peak for one micro-batch of ``batch`` sequences."""
        values = self.values(batch, length)
        compiled = self.compiled(batch, length)
        peak: int = max(sum(map(mul, form, values)) + item.partial_bytes(values) for form, item in compiled.totals)
        return self.constant_bytes + compiled.forms.buffers.total_bytes(values) + peak

    def saved_bytes(self, batch: int, length: int) -> int:
        """Return what is there all the time and what layers save for backward: less than any step requests at its peak.

        It takes a third of the time of the closed forms. Nothing is said of what ranks save that hold shards.
        """
        values = self.values(batch, length)
        config = self.setup.config
        if is_sharded(config.parallel) or self.setup.checkpointing != "none" or config.compile != "none":
            return self.constant_bytes
        _, taped = self._tapes(regime_of(self.own, self.setup, batch, length))
        counts = taped.counts()
        saved = sum(taped.layers[kind].tape.saved_form().total_bytes(values) * n for kind, n in counts.items())
        return self.constant_bytes + saved

    def _doubt_bytes(self, tokens: int) -> int:
        """Return what a compiler may take besides, which only a timing on the card decides."""
        if self.setup.config.compile == "none":
            return 0
        from memplan.step.compiled.compiled_model import padded_bytes

        return padded_bytes(self.model.spec, tokens)

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
        batch = batch or self.setup.config.micro_batch_size
        length = length or self.setup.config.sequence_length
        values = self.values(batch, length)
        compiled = self.compiled(batch, length)
        buffers = compiled.forms.buffers.total_bytes(values)
        always = self.constant_bytes + buffers
        sizes = [always + sum(map(mul, form, values)) + item.partial_bytes(values) for form, item in compiled.totals]
        requested = max(sizes)
        peak = compiled.candidates[sizes.index(requested)]
        allowances = allowances_of(self.setup, device, compiled.forms.stream_bytes)
        allowances = beside_engine(allowances, engine_bytes(self.setup, device, requested - always))
        allocated = allowances.allocated_bytes(requested, self.rounding_bytes)
        total = allowances.device_bytes(allocated)
        upper = allowances.upper_bytes(allocated + self._doubt_bytes(batch * length))
        usable = device.usable_bytes(self.setup.reserve_bytes)
        parts = list(peak.form.part_bytes(values))
        parts[Part.TEMPORARIES] += peak.partial_bytes(values) - peak.communication
        return MemoryPlan(
            model=self.model,
            setup=self.setup,
            device=device,
            verdict=verdict_of(total, upper, usable),
            usable_bytes=usable,
            peak=peak,
            instants=_by_instant(compiled.candidates, sizes),
            requested_bytes=requested,
            allocated_bytes=allocated,
            reserved_bytes=total - allowances.context_bytes,
            device_bytes=total,
            upper_bytes=upper,
            persistent_bytes=self.persistent_bytes,
            host_bytes=self.states.host_bytes,
            states=self.states,
            forms=compiled.forms,
            parts=tuple(parts),
            communication_bytes=peak.communication + self.bucket_bytes,
            values=values,
            buffer_bytes=buffers + self.states.average_bytes,
            rounding_bytes=self.rounding_bytes,
            allowances=allowances,
            evaluated_values=self.values(self.setup.config.evaluation_batch_size or batch, length),
            micro_batch_size=batch,
            sequence_length=length,
            least_bytes=total,
            lower_bytes=total,
        )


def _by_instant(candidates: Sequence[Instant], sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    fullest: dict[str, int] = {}
    for candidate, size in zip(candidates, sizes, strict=True):
        fullest[candidate.name] = max(size, fullest.get(candidate.name, 0))
    return tuple(fullest.items())
