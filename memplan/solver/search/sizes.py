"""Bytes and times of combinations, put together from parts that are each computed once.

A combination's states are a sum: weights and gradients depend on how those are stored, optimizer
states on the optimizer and the weights' element size, and master weights on themselves. What
forward and backward hold depends on none of the optimizers but for scratch memory of their
updates, and weights that are decoded alike are alike to it. So a few hundred parts describe
hundreds of thousands of combinations; each is a lower bound until it has been planned whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import Optimizer
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
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.states.optimizer_scratch import tensor_temporaries, trained_kinds
from memplan.step.states.parallel_shards import bucket_bytes
from memplan.training.adapters import adapter_tensors
from memplan.training.resolved import TrainingSetup, resolve

NO_UPDATE = Optimizer("No update", "sgd", "Lower bound of a pass under any optimizer.", (), (), implementation="none")
"""An optimizer that keeps nothing, takes nothing and has any weights."""

STORES_GRADIENTS = "adamw-int8"
"""The same for coded weights and for gradients in a dtype of their own, which the bundled optimizer alone takes; its scratch
memory is taken off."""


@dataclass(frozen=True, slots=True)
class Held:
    """States under some weights and gradients.

    Attributes:
        kind: All that an optimizer's states depend on.
        trained_bytes: Stored weights that are trained.
        look: All that a tape sees of the weights; equal looks give equal passes.
    """

    states: ModelStates
    kind: tuple[object, ...]
    trained_bytes: int
    look: tuple[object, ...]
    work: Work


@dataclass(frozen=True, slots=True)
class Stepped:
    """What an optimizer adds to weights and gradients: bytes that stay, and work."""

    bytes: int
    work: UpdateWork


class Sizes:
    """Parts of combinations, each computed when it is first asked for.

    Args:
        model: The model.
        space: Where combinations come from.
        length: Tokens per sequence.
        catalog: Where names are looked up.
        rates: Of the GPU.
    """

    def __init__(self, model: Model, space: Space, length: int, catalog: Catalog, rates: Rates) -> None:
        self.model, self.space, self.length, self.catalog, self.rates = model, space, length, catalog, rates
        self.compiled = 0
        self._chosen: dict[tuple[object, ...], tuple[TrainingSetup, ModelStates]] = {}
        self._held: dict[tuple[str, str | None], Held] = {}
        self._stepped: dict[tuple[object, ...], Stepped] = {}
        self._runs: dict[tuple[object, ...], Run] = {}
        self._all_runs: dict[tuple[str, str | None], list[Run]] = {}
        self._passing: dict[tuple[object, ...], tuple[CompiledPlan, int, dict[int, int]]] = {}
        self._plans: dict[tuple[object, ...], CompiledPlan] = {}
        self._first_way = next(space.passes())
        self._inventory = merged(model.inventory)
        self._adapters: Inventory | None = None

    # ---------------------------------------------------------------- what stays
    def setup(self, state: StateChoice, way: PassChoice | None = None, batch: int | None = None) -> TrainingSetup:
        """Return a combination with its names looked up."""
        batch = batch or self.space.batches[-1]
        return resolve(self.space.config(state, way or self._first_way, batch), self.catalog, "combination")

    def states(self, setup: TrainingSetup) -> ModelStates:
        """Return the states of a setup, tensors that are alike as one."""
        if self._adapters is None:
            self._adapters = merged(adapter_tensors(self.model, setup))
        return model_states(setup, self._inventory, self._adapters)

    def chosen(self, state: StateChoice) -> tuple[TrainingSetup, ModelStates]:
        """Return a combination with its names looked up, and its states, whatever the pass.

        Raises:
            CannotAnswerError: Nothing updates it, or several GPUs cannot share it.
        """
        key = _key(state)
        if key not in self._chosen:
            setup = self.setup(state)
            self._chosen[key] = setup, self.states(setup)
        return self._chosen[key]

    def held(self, weights: WeightChoice, gradient: str | None) -> Held:
        """Return what weights and gradients hold, whatever the optimizer."""
        key = (weights.name, gradient)
        if key not in self._held:
            setup = self._plain(weights, gradient)
            states = self.states(setup)
            look = tuple(
                (e.element_bytes, e.copy_bytes, e.quantized, e.formed_bytes, e.gradient_bytes) for e in states.tensors
            )
            own = (weights.compute_dtype, setup.autocast, weights.loss_scaling)
            kind = tuple((e.format_name if not e.quantized else "", e.element_bytes) for e in states.tensors)
            trained = sum(e.tensor.count * e.weight_bytes for e in states.tensors if e.trainable)
            work = work_of(self.model, setup, states)
            self._held[key] = Held(states, kind, trained, (look, own), work)
        return self._held[key]

    def _plain(
        self, weights: WeightChoice, gradient: str | None, way: PassChoice | None = None, batch: int | None = None
    ) -> TrainingSetup:
        """Return a pass without an update, or with one whose scratch memory is taken off."""
        stored = (weights.coded or gradient is not None) and self.space.base.adapter is None
        name = STORES_GRADIENTS if stored else "sgd"
        state = StateChoice(weights, "none", gradient, {"default": name}, "fused", self.space.newton_schulz[0])
        setup = self.setup(state, way, batch)
        return setup if stored else replace(setup, optimizers=dict.fromkeys(setup.optimizers, NO_UPDATE))

    def always_bytes(self, state: StateChoice) -> int:
        """Return the bytes that a combination holds at every instant, gradients left out."""
        held = self.held(state.weights, state.gradient)
        buckets = bucket_bytes(self.space.base.parallel, held.states.gradient_bytes)
        total = held.states.weight_bytes + held.states.average_bytes + buckets
        return total + self._stepped_by(state, held).bytes

    def host_bytes(self, state: StateChoice) -> int:
        """Return the host memory that a combination's offloaded states take: half of what passes in and out."""
        return self._stepped_by(state, self.held(state.weights, state.gradient)).work.host_bytes // 2

    def _stepped_by(self, state: StateChoice, held: Held) -> Stepped:
        optimizer = tuple(state.optimizer.items())
        ways = (state.optimizer_kernel, state.newton_schulz, state.master, state.offload)
        key = (held.kind, state.gradient, optimizer, ways)
        if key not in self._stepped:
            setup, states = self.chosen(state)
            self._stepped[key] = Stepped(states.state_bytes + states.master_bytes, update_work(setup, states))
        return self._stepped[key]

    def kept_gradient_bytes(self, state: StateChoice) -> int:
        """Return the bytes of all gradients together."""
        return self.held(state.weights, state.gradient).states.gradient_bytes

    # ---------------------------------------------------------------- what passes
    def run_of(self, weights: WeightChoice, gradient: str | None, way: PassChoice) -> Run:
        """Return how forward and backward run under some weights and gradients, the same one each time."""
        key = (weights.name, gradient, way)
        if key not in self._runs:
            self._runs[key] = Run(self, weights, gradient, way)
        return self._runs[key]

    def runs_of(self, weights: WeightChoice, gradient: str | None) -> list[Run]:
        """Return how they run in every way, the same list each time."""
        key = (weights.name, gradient)
        if key not in self._all_runs:
            self._all_runs[key] = [self.run_of(weights, gradient, way) for way in self.space.passes()]
        return self._all_runs[key]

    def passing_bytes(self, weights: WeightChoice, gradient: str | None, way: PassChoice, batch: int) -> int:
        """Return the least that forward, backward and their gradients need above what stays.

        What the plan's own optimizer takes while it steps is taken off; one serves all weights that look alike.
        """
        again = self.space.steps(batch) > 1
        key = (self.held(weights, gradient).look, way.lifetime, way.checkpointing, way.loss, again)
        if key not in self._passing:
            plan = self._compile(self._plain(weights, gradient, way, batch))
            self._passing[key] = (plan, plan.constant_bytes + _scratch_bytes(plan), {})
        plan, apart, peaks = self._passing[key]
        if batch not in peaks:
            peaks[batch] = max(0, plan.requested_bytes(batch, self.length) - apart)
        return peaks[batch]

    def plan(self, state: StateChoice, way: PassChoice, batch: int) -> CompiledPlan:
        """Return a combination planned whole."""
        key = (_key(state), way, self.space.steps(batch) > 1)
        if key not in self._plans:
            self._plans[key] = self._compile(self.setup(state, way, batch))
        return self._plans[key]

    def _compile(self, setup: TrainingSetup) -> CompiledPlan:
        self.compiled += 1
        return CompiledPlan(self.model, setup)

    # ---------------------------------------------------------------- time
    def update_picoseconds(self, state: StateChoice) -> int:
        """Return the estimated time of an optimizer step."""
        held = self.held(state.weights, state.gradient)
        work = self._stepped_by(state, held).work
        return update_picoseconds(held.trained_bytes, held.states.gradient_bytes, work, self.rates)


class Run:
    """Forward and backward of some weights and gradients at every batch: bytes, once asked for, and times.

    Attributes:
        batches: Micro-batches that are allowed, ascending.
        steps: Accumulation steps that go with each.
        quickest: Time per token of forward and backward alone that none of them beats.
    """

    def __init__(self, sizes: Sizes, weights: WeightChoice, gradient: str | None, way: PassChoice) -> None:
        space, length = sizes.space, sizes.length
        self.sizes, self.weights, self.gradient, self.way = sizes, weights, gradient, way
        self.batches = [batch for batch in space.batches if space.allowed(way, batch)]
        self.steps = [space.steps(batch) for batch in self.batches]
        self.tokens = [steps * batch * length for steps, batch in zip(self.steps, self.batches, strict=True)]
        self._peaks: dict[int, int] = {}
        work = sizes.held(weights, gradient).work
        self.micro = [
            micro_batch_picoseconds(
                work,
                sizes.rates,
                batch,
                length,
                checkpointing=way.checkpointing,
                loss=way.loss,
                accumulates=steps > 1,
            )
            for steps, batch in zip(self.steps, self.batches, strict=True)
        ]
        each = ((micro, batch * length) for micro, batch in zip(self.micro, self.batches, strict=True))
        self.quickest = min((micro * 1000 // tokens for micro, tokens in each), default=0)

    def peak_bytes(self, index: int) -> int:
        """Return the least that forward, backward and their gradients need above what stays, at a batch."""
        if index not in self._peaks:
            batch = self.batches[index]
            self._peaks[index] = self.sizes.passing_bytes(self.weights, self.gradient, self.way, batch)
        return self._peaks[index]

    def step_picoseconds(self, index: int, update: int) -> int:
        """Return the estimated time of an optimizer step with all its micro-batches."""
        return self.steps[index] * self.micro[index] + update

    def token_femtoseconds(self, index: int, update: int) -> int:
        """Return the same for each token."""
        return self.step_picoseconds(index, update) * 1000 // self.tokens[index]


def _scratch_bytes(plan: CompiledPlan) -> int:
    """Return the most scratch memory that a plan's optimizer can take at any instant."""
    kinds = trained_kinds(plan.states.tensors)
    return max((tensor_temporaries(plan.setup, entry).bytes for entry in kinds), default=0)


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
