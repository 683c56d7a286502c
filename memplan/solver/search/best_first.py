"""The best settings that fit: a best-first search for the Pareto front.

Combinations fall into classes by evidence, quality risk and precision. Within a class they are ordered
by estimated time, which depends on no memory figure: the fastest is tried first, each against lower
bounds of its bytes (persistent, then transient, shared by many), and planned in full only when these
fit. The first that fits is the fastest of its class. A class is abandoned as soon as what remains in it
is dominated: no faster than a combination of a class that is at least as good.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush

from memplan.catalog.catalog import Catalog
from memplan.catalog.hardware.hardware_tables import hardware_tables
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.plan.allowances import Allowances, allowances_for, communicating, communicators_of
from memplan.plan.job_allowances import devices_for, with_engine
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.plan.sizes.largest_model import able_devices
from memplan.solver.largest_value import Gauge, gauge_of
from memplan.solver.search.cluster import rates_among
from memplan.solver.search.evidence_levels import STATUSES, Evidence, Standing
from memplan.solver.search.pareto_front import FINE, Class, Combination, no_worse, ranked
from memplan.solver.search.sizes import Run, Sizes
from memplan.solver.search.space import Space, StateChoice, optimizer_names
from memplan.solver.search.timing import Rates
from memplan.step.kernels.card_support import refuse_unable
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import TrainingSetup
from memplan.training.stack_models import as_trained


@dataclass(frozen=True, slots=True)
class Miss:
    """The combination that needs the least memory, where none fits."""

    combination: Combination
    plan: MemoryPlan
    smallest_gpu: Device | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a search."""

    front: tuple[Combination, ...]  # The Pareto front, best first
    tight: bool  # Whether these may not fit at the upper end
    considered: int  # Combinations in the space
    compiled: int  # Plans that were compiled
    rates: Rates  # The rates behind the time estimates


@dataclass(frozen=True, slots=True)
class _Arm:
    """A combination whose batch is not chosen yet."""

    state: StateChoice
    standing: Standing
    run: Run
    room: int  # Bytes left for transient tensors, gradients included
    update: int  # Estimated time of the optimizer step
    soonest: int  # Lower bound of the time per token over its batches

    def timed(self) -> Iterator[tuple[int, int]]:
        """Yield (time, index) of each batch that may fit."""
        run, room = self.run, self.room
        for index, steps in enumerate(run.steps):
            if run.peak_bytes(index) <= room:
                yield run.token_femtoseconds(index, self.update), index
            elif steps == 1:
                return


@dataclass(frozen=True, slots=True)
class _Least:
    """A combination at its smallest batch."""

    state: StateChoice
    run: Run
    gauge: Gauge
    persistent: int


class Search:
    """A search over one space for one model, device and sequence length.

    Args:
        experimental: Whether experimental parts are allowed.
    """

    def __init__(
        self, model: Model, space: Space, device: Device, length: int, catalog: Catalog, *, experimental: bool
    ) -> None:
        if model.spec.tower is not None:
            model = as_trained(model, resolve(space.base, catalog, space.base.description))
        self.model, self.space, self.device, self.length, self.catalog = model, space, device, length, catalog
        self.rates = rates_among(space.base.parallel.data, space.cluster, device, catalog)
        self.sizes = Sizes(model, space, length, catalog, self.rates, device.gpu)
        self.most_status = STATUSES.index("experimental" if experimental else "works")
        evidence = Evidence(catalog, space.base.adapter is not None)
        self.tight = False
        self._coarse: dict[tuple[object, ...], tuple[int, int]] = {}
        self.states = list(self._allowed_states(evidence))
        self.base = resolve(space.base, catalog, "base")
        self.reserve_bytes = self.base.reserve_bytes

    def _allowed_states(self, evidence: Evidence) -> Iterator[tuple[StateChoice, Standing]]:
        """Yield the state choices that are allowed, each with its evidence."""
        for state in self.space.states(self.catalog):
            weights = state.weights
            formed = weights.compute_dtype if weights.coded else weights.dtype
            names = optimizer_names(state.optimizer, self.catalog)
            standing = evidence.standing(weights.dtype, formed, state.gradient or formed, state.master, names)
            known = STATUSES.index(standing.status) <= self.most_status
            if known and (setup := self._able(state)) and self._within_host(state):
                yield state, evidence.recorded(standing, setup.config.evidence)

    def _able(self, state: StateChoice) -> TrainingSetup | None:
        """Return the setup of a combination, or None where its parallel layout or this device cannot update it."""
        try:
            setup, _ = self.sizes.resolved(state)
            refuse_unable(setup, self.device.gpu)
        except CannotAnswerError:
            return None
        return setup

    def _within_host(self, state: StateChoice) -> bool:
        limit = self.space.host_bytes
        return limit is None or state.offload == "none" or self.sizes.host_bytes(state) <= limit

    # ---------------------------------------------------------------- the front
    def run(self, *, tight: bool = False) -> Outcome:
        """Return the Pareto front of what fits, best first.

        Args:
            tight: Also take what fits only at the expected value.
        """
        self.tight = tight
        most = {key: gauge.most_requested_bytes(tight) for key, gauge in self._gauges().items()}
        classes = self._classes(most)
        fastest: dict[Class, Combination] = {}
        for own in sorted(classes):
            bound = min((f.token_femtoseconds for other, f in fastest.items() if no_worse(other, own)), default=None)
            best = self._fastest(classes[own], own, bound)
            if best is not None:
                fastest[own] = best
        return Outcome(tuple(ranked(fastest.values())), tight, self.space.size, self.sizes.compiled, self.rates)

    def _gauges(self) -> dict[tuple[bool, str], Gauge]:
        """Return the device's gauge, by whether codes are trained and by allocator."""
        usable = self.device.usable_bytes(self.reserve_bytes)
        return {
            (coded, allocator): Gauge(usable, self._allowances(coded, allocator))
            for coded in (False, True)
            for allocator in self.space.allocators
        }

    def _allowances(self, coded: bool, allocator: str) -> Allowances:
        """Return the allowances, without the communication streams, which depend on the plan."""
        share, tables = self.catalog.tables.reserve_share(allocator, coded), hardware_tables(self.catalog.root)
        allowances = allowances_for(self.device.gpu, self.device.count, share, tables)
        allowances = with_engine(allowances, self.base, self.device)
        communicators = communicators_of(self.device.gpu, self.space.base.parallel, tables)
        return communicating(allowances, 0, communicators) if communicators else allowances

    def _codes(self, state: StateChoice) -> bool:
        return state.weights.coded and self.space.base.adapter is None

    def _classes(self, most: Mapping[tuple[bool, str], int]) -> dict[Class, list[_Arm]]:
        """Return the combinations, batch not chosen yet, whose persistent bytes fit."""
        classes: dict[Class, list[_Arm]] = {}
        sequences = max(b * self.space.steps(b) for b in self.space.batches)
        for state, standing in self.states:
            persistent = self.sizes.persistent_bytes(state)
            rooms = {name: most[self._codes(state), name] - persistent for name in self.space.allocators}
            if max(rooms.values()) < 0:
                continue
            gradient_bytes = self.sizes.gradient_bytes(state)
            update = self.sizes.update_picoseconds(state)
            least = update * 1000 // (sequences * self.length)
            members = {
                life: classes.setdefault(self.class_of(state, standing, life), []) for life in self.space.lifetimes
            }
            for run in self.sizes.runs_of(state.weights, state.gradient):
                way, room = run.way, rooms[run.way.allocator]
                if run.batches and room >= (0 if way.lifetime == "layer" else gradient_bytes):
                    members[way.lifetime].append(_Arm(state, standing, run, room, update, run.quickest + least))
        return classes

    def class_of(self, state: StateChoice, standing: Standing, lifetime: str) -> Class:
        """Return the class of a combination."""
        key = (state.weights.dtype, *state.optimizer.items())
        if key not in self._coarse:
            self._coarse[key] = self._coarseness(state)
        released, offloaded = int(lifetime == "layer"), int(state.offload == "cpu")
        return standing.rank, standing.risk, released, *self._coarse[key], offloaded

    def _coarseness(self, state: StateChoice) -> tuple[int, int]:
        """Return how coarse weights and optimizer states are; a state in the parameter's dtype is as coarse as the weights."""
        weights = self.catalog.formats[state.weights.dtype]
        optimizer = self.catalog.optimizers[optimizer_names(state.optimizer, self.catalog)[0]]
        widths = [
            weights.bytes_per_element if slot.as_parameter else Fraction(slot.block_bytes, slot.block_elements)
            for slot in optimizer.slots
            if slot.layout == "elementwise"
        ]
        return -int(FINE * weights.bytes_per_element), -int(FINE * min(widths, default=Fraction(0)))

    def _fastest(self, arms: Sequence[_Arm], own: Class, bound: int | None) -> Combination | None:
        """Return the fastest combination that fits and beats a bound, or None."""
        heap = [(arm.soonest, 0, index, 0) for index, arm in enumerate(arms) if bound is None or arm.soonest < bound]
        heapify(heap)
        while heap:
            time, stage, index, place = heappop(heap)
            if bound is not None and time >= bound:
                return None
            arm = arms[index]
            if stage == 0:
                for soon, at in arm.timed():
                    if bound is None or soon < bound:
                        heappush(heap, (soon, 1, index, at))
            elif self._fits(arm, arm.run.batches[place]):
                batch, way = arm.run.batches[place], arm.run.way
                step = arm.run.step_picoseconds(place, arm.update)
                return Combination(
                    arm.state, way, batch, arm.standing, own, time, step, self.sizes.plan(arm.state, way, batch)
                )
        return None

    def _fits(self, arm: _Arm, batch: int) -> bool:
        plan = self.sizes.plan(arm.state, arm.run.way, batch)
        most = arm.room + self.sizes.persistent_bytes(arm.state)
        if plan.forms.stream_bytes and not self.tight:
            most = gauge_of(plan.setup, self.device, plan.forms.stream_bytes).most_requested_bytes()
        requested = plan.requested_bytes if self.tight else plan.upper_requested_bytes
        return requested(batch, self.length) + plan.rounding_bytes <= most

    # ---------------------------------------------------------------- nothing fits
    def nearest_miss(self) -> Miss | None:
        """Return the combination that needs the least device memory, then host memory; None where none is allowed."""
        heap: list[tuple[int, int, int, int]] = []
        arms: list[_Least] = []
        gauges = self._gauges()
        for state, _ in self.states:
            persistent, gradient_bytes = self.sizes.persistent_bytes(state), self.sizes.gradient_bytes(state)
            host = self.sizes.host_bytes(state)
            for run in self.sizes.runs_of(state.weights, state.gradient):
                if run.batches:
                    way = run.way
                    gauge = gauges[self._codes(state), way.allocator]
                    least = persistent + (gradient_bytes if way.lifetime == "step" else 0)
                    heap.append((gauge.upper_bytes(least, 0), 0, host, len(arms)))
                    arms.append(_Least(state, run, gauge, persistent))
        heapify(heap)
        while heap:
            _, stage, host, index = heappop(heap)
            arm = arms[index]
            if stage == 2:
                return self._miss(arm)
            heappush(heap, (self._need(stage, arm), stage + 1, host, index))
        return None

    def _need(self, stage: int, arm: _Least) -> int:
        """Return the upper end of what an arm needs: first a lower bound, then exactly."""
        if stage == 0:
            return arm.gauge.upper_bytes(arm.persistent + arm.run.peak_bytes(0), 0)
        batch = arm.run.batches[0]
        plan = self.sizes.plan(arm.state, arm.run.way, batch)
        upper = arm.gauge.upper_bytes(plan.upper_requested_bytes(batch, self.length), plan.rounding_bytes)
        return upper + plan.forms.stream_bytes

    def _miss(self, arm: _Least) -> Miss:
        state, way, batch = arm.state, arm.run.way, arm.run.batches[0]
        standing = next(standing for own, standing in self.states if own is state)
        update = self.sizes.update_picoseconds(state)
        time, step = arm.run.token_femtoseconds(0, update), arm.run.step_picoseconds(0, update)
        compiled = self.sizes.plan(state, way, batch)
        group = self.class_of(state, standing, way.lifetime)
        combination = Combination(state, way, batch, standing, group, time, step, compiled)
        plan = compiled.evaluate(self.device, batch, self.length)
        enough = smallest_gpu(compiled, plan, self.catalog, lambda one: one.verdict == "fits")
        return Miss(combination, plan, enough)


def smallest_gpu(
    compiled: CompiledPlan, plan: MemoryPlan, catalog: Catalog, fits: Callable[[MemoryPlan], bool]
) -> Device | None:
    """Return the GPU of the catalog with the least memory that can run what a plan is of and where it ``fits``, or None."""
    devices = devices_for(compiled.setup, [Device(gpu, name) for name, gpu in catalog.gpus.entries.items()])
    devices.sort(key=lambda device: (device.usable_bytes(compiled.setup.reserve_bytes), device.name))
    sizes = plan.micro_batch_size, plan.sequence_length
    return next((one for one in able_devices(compiled, devices) if fits(compiled.evaluate(one, *sizes))), None)
