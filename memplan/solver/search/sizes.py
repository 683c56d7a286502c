"""Bytes and times of combinations, summed from parts that are each computed once.

The persistent bytes of a combination are a sum: weights and gradients depend on their formats, optimizer
states on the optimizer and the weights' element size, and master weights on their own format. The transient
bytes of forward and backward do not depend on the optimizer except for the scratch of its update, and are
the same for all weights that decode alike. So a few hundred parts describe hundreds of thousands of
combinations; each sum is a lower bound until the combination has been planned in full.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import Gpu, Optimizer, UpdateScratch
from memplan.catalog.update_classes import NO_UPDATE as NO_CLASS
from memplan.documents.frozen_values import dataclass
from memplan.model.inventory import Inventory, merged
from memplan.model.model import Model
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.space import PassChoice, Space, StateChoice, WeightChoice
from memplan.solver.search.timing import (
    Rates,
    UpdateWork,
    Work,
    micro_batch_picoseconds,
    update_picoseconds,
    update_work,
    work_of,
)
from memplan.step.states.model_states import ModelStates
from memplan.step.states.optimizer_scratch import tensor_temporaries, trained_kinds
from memplan.step.states.parallel_shards import bucket_bytes
from memplan.step.states.partitioned_weights import rank_model_states
from memplan.training.adapters import adapter_tensors
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.rules.frozen_rules import with_frozen

NO_UPDATE = Optimizer(
    "No update",
    "none",
    "Lower bound of a pass under any optimizer.",
    (),
    (),
    UpdateScratch("in-place"),
    implementation=NO_CLASS,
    step="in-place",
)
"""An optimizer without states and scratch, for weights of any format."""

STORES_GRADIENTS = "adamw-int8"
"""Its stand-in for coded weights and for gradients in another dtype, which only the bundled optimizer supports; its
scratch is subtracted."""


@dataclass(frozen=True, slots=True)
class WeightStates:
    """Weights and gradients of a combination, whatever the optimizer."""

    states: ModelStates
    state_key: tuple[object, ...]  # All that an optimizer's states depend on
    trained_bytes: int  # Stored weights that are trained
    tape_key: tuple[object, ...]  # All that the tape depends on; equal keys give equal transient bytes
    work: Work


@dataclass(frozen=True, slots=True)
class Stepped:
    """What an optimizer adds to weights and gradients: persistent bytes, and work."""

    bytes: int
    work: UpdateWork


class Sizes:
    """Parts of combinations, each computed on first use.

    Args:
        gpu: Which it is; kernels are those that run there.
    """

    def __init__(self, model: Model, space: Space, length: int, catalog: Catalog, rates: Rates, gpu: Gpu) -> None:
        self.model, self.space, self.length, self.catalog, self.rates = model, space, length, catalog, rates
        self.gpu = gpu
        self.compiled = 0
        self._resolved: dict[tuple[object, ...], tuple[TrainingSetup, ModelStates]] = {}
        self._weight_states: dict[tuple[str, str | None], WeightStates] = {}
        self._stepped: dict[tuple[object, ...], Stepped] = {}
        self._runs: dict[tuple[object, ...], Run] = {}
        self._all_runs: dict[tuple[str, str | None], list[Run]] = {}
        self._transient: dict[tuple[object, ...], tuple[CompiledPlan, int, dict[int, int]]] = {}
        self._plans: dict[tuple[object, ...], CompiledPlan] = {}
        self._first_way = next(space.passes())
        whole = with_frozen(model, space.base.freeze, "freeze").inventory
        self._inventory = whole if space.base.parallel.engine == "fsdp1" else merged(whole)  # units are by layer
        self._adapters: Inventory | None = None

    # ---------------------------------------------------------------- persistent bytes
    def setup(self, state: StateChoice, way: PassChoice | None = None, batch: int | None = None) -> TrainingSetup:
        """Return a combination with its names looked up."""
        batch = batch or self.space.batches[-1]
        return resolve(self.space.config(state, way or self._first_way, batch), self.catalog, "combination")

    def states(self, setup: TrainingSetup) -> ModelStates:
        """Return the states of a setup, equal tensors merged."""
        if self._adapters is None:
            adapters = adapter_tensors(self.model, setup)
            self._adapters = adapters if setup.config.parallel.engine == "fsdp1" else merged(adapters)
        return rank_model_states(setup, self._inventory, self._adapters, self.model.spec.hidden_size)

    def resolved(self, state: StateChoice) -> tuple[TrainingSetup, ModelStates]:
        """Return a combination with its names looked up, and its states; both are the same for every pass.

        Raises:
            CannotAnswerError: No optimizer can update it under its parallel layout.
        """
        key = _key(state)
        if key not in self._resolved:
            setup = self.setup(state)
            self._resolved[key] = setup, self.states(setup)
        return self._resolved[key]

    def weight_states(self, weights: WeightChoice, gradient: str | None) -> WeightStates:
        """Return the states of weights and gradients, whatever the optimizer."""
        key = (weights.name, gradient)
        if key not in self._weight_states:
            setup = self._plain(weights, gradient)
            states = self.states(setup)
            tape_key = tuple(
                (e.element_bytes, e.copy_bytes, e.quantized, e.formed_bytes, e.gradient_bytes) for e in states.tensors
            )
            own = (weights.compute_dtype, setup.autocast, weights.loss_scaling)
            state_key = tuple((e.format_name if not e.quantized else "", e.element_bytes) for e in states.tensors)
            trained = sum(e.tensor.count * e.weight_bytes for e in states.tensors if e.trainable)
            work = work_of(self.model, setup, states)
            self._weight_states[key] = WeightStates(states, state_key, trained, (tape_key, own), work)
        return self._weight_states[key]

    def _plain(
        self, weights: WeightChoice, gradient: str | None, way: PassChoice | None = None, batch: int | None = None
    ) -> TrainingSetup:
        """Return the setup of a pass without an update, or with one whose scratch is subtracted later."""
        stored = (weights.coded or gradient is not None) and self.space.base.adapter is None
        name = STORES_GRADIENTS if stored else "sgd"
        state = StateChoice(weights, "none", gradient, {"default": name}, "fused", self.space.newton_schulz[0])
        setup = self.setup(state, way, batch)
        return setup if stored else replace(setup, optimizers=dict.fromkeys(setup.optimizers, NO_UPDATE))

    def persistent_bytes(self, state: StateChoice) -> int:
        """Return the persistent bytes of a combination, without gradients."""
        weight_states = self.weight_states(state.weights, state.gradient)
        gradients, hidden = weight_states.states.gradient_bytes, self.model.spec.hidden_size
        width = FLOAT_BYTES[self.space.base.compute_dtype]
        buckets = bucket_bytes(self.space.base.parallel, width, gradients, hidden)
        retained = weight_states.states
        total = retained.weight_bytes + retained.average_bytes + buckets + retained.staged_bytes
        return total + self._stepped_by(state, weight_states).bytes

    def host_bytes(self, state: StateChoice) -> int:
        """Return the host memory that a combination's offloaded states take: half of the traffic in and out."""
        return self._stepped_by(state, self.weight_states(state.weights, state.gradient)).work.host_bytes // 2

    def _stepped_by(self, state: StateChoice, weight_states: WeightStates) -> Stepped:
        optimizer = tuple(state.optimizer.items())
        ways = (state.optimizer_kernel, state.newton_schulz, state.master, state.offload)
        key = (weight_states.state_key, state.gradient, optimizer, ways)
        if key not in self._stepped:
            setup, states = self.resolved(state)
            self._stepped[key] = Stepped(states.state_bytes + states.master_bytes, update_work(setup, states))
        return self._stepped[key]

    def gradient_bytes(self, state: StateChoice) -> int:
        """Return the bytes of all gradients together."""
        return self.weight_states(state.weights, state.gradient).states.gradient_bytes

    # ---------------------------------------------------------------- transient bytes
    def run_of(self, weights: WeightChoice, gradient: str | None, way: PassChoice) -> Run:
        """Return forward and backward under some weights and gradients; cached."""
        key = (weights.name, gradient, way)
        if key not in self._runs:
            self._runs[key] = Run(self, weights, gradient, way)
        return self._runs[key]

    def runs_of(self, weights: WeightChoice, gradient: str | None) -> list[Run]:
        """Return forward and backward in every way they may run; cached."""
        key = (weights.name, gradient)
        if key not in self._all_runs:
            self._all_runs[key] = [self.run_of(weights, gradient, way) for way in self.space.passes()]
        return self._all_runs[key]

    def transient_bytes(self, weights: WeightChoice, gradient: str | None, way: PassChoice, batch: int) -> int:
        """Return a lower bound of the transient bytes of forward and backward, gradients included.

        The scratch of the plan's own optimizer is subtracted; one figure serves all weights with equal tape keys.
        """
        again = self.space.steps(batch) > 1
        key = (self.weight_states(weights, gradient).tape_key, way.lifetime, way.checkpointing, way.loss, again)
        if key not in self._transient:
            plan = self._compile(self._plain(weights, gradient, way, batch))
            kinds = trained_kinds(plan.states.tensors)
            scratch_bytes = max((tensor_temporaries(plan.setup, entry).bytes for entry in kinds), default=0)
            self._transient[key] = (plan, plan.constant_bytes + scratch_bytes, {})
        plan, apart, peaks = self._transient[key]
        if batch not in peaks:
            peaks[batch] = max(0, plan.requested_bytes(batch, self.length) - apart)
        return peaks[batch]

    def plan(self, state: StateChoice, way: PassChoice, batch: int) -> CompiledPlan:
        """Return a combination, planned in full."""
        key = (_key(state), way, self.space.steps(batch) > 1)
        if key not in self._plans:
            self._plans[key] = self._compile(self.setup(state, way, batch))
        return self._plans[key]

    def _compile(self, setup: TrainingSetup) -> CompiledPlan:
        self.compiled += 1
        return CompiledPlan(self.model, setup).on(self.gpu)

    # ---------------------------------------------------------------- time
    def update_picoseconds(self, state: StateChoice) -> int:
        """Return the estimated time of an optimizer step."""
        weight_states = self.weight_states(state.weights, state.gradient)
        work = self._stepped_by(state, weight_states).work
        return update_picoseconds(weight_states.trained_bytes, weight_states.states.gradient_bytes, work, self.rates)


class Run:
    """Forward and backward of some weights and gradients at every batch: bytes on first use, and times.

    Attributes:
        batches: Micro-batches that are allowed, ascending.
        steps: Accumulation steps that go with each.
        quickest: Lower bound of the time per token of forward and backward alone.
    """

    def __init__(self, sizes: Sizes, weights: WeightChoice, gradient: str | None, way: PassChoice) -> None:
        space, length = sizes.space, sizes.length
        self.sizes, self.weights, self.gradient, self.way = sizes, weights, gradient, way
        self.batches = [batch for batch in space.batches if space.allowed(way, batch)]
        self.steps = [space.steps(batch) for batch in self.batches]
        self.tokens = [steps * batch * length for steps, batch in zip(self.steps, self.batches, strict=True)]
        self._peaks: dict[int, int] = {}
        work = sizes.weight_states(weights, gradient).work
        self.micro = [
            micro_batch_picoseconds(
                work, sizes.rates, batch, length, checkpointing=way.checkpointing, loss=way.loss, accumulates=steps > 1
            )
            for steps, batch in zip(self.steps, self.batches, strict=True)
        ]
        each = ((micro, batch * length) for micro, batch in zip(self.micro, self.batches, strict=True))
        self.quickest = min((micro * 1000 // tokens for micro, tokens in each), default=0)

    def peak_bytes(self, index: int) -> int:
        """Return a lower bound of the transient bytes at a batch."""
        if index not in self._peaks:
            batch = self.batches[index]
            self._peaks[index] = self.sizes.transient_bytes(self.weights, self.gradient, self.way, batch)
        return self._peaks[index]

    def step_picoseconds(self, index: int, update: int) -> int:
        """Return the estimated time of an optimizer step with all its micro-batches."""
        return self.steps[index] * self.micro[index] + update

    def token_femtoseconds(self, index: int, update: int) -> int:
        """Return the same per token."""
        return self.step_picoseconds(index, update) * 1000 // self.tokens[index]


def _key(state: StateChoice) -> tuple[object, ...]:
    return (
        state.weights.name,
        state.master,
        state.gradient,
        tuple(state.optimizer.items()),
        state.optimizer_kernel,
        state.newton_schulz,
        state.offload,
    )
