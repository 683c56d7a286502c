"""A training step under DeepSpeed's ZeRO 1 and 2: buckets and partitions lie around the tapes of whole weights.

Forward reads whole weights, which are views of flat tensors. In backward each gradient leaves as soon as it is formed
(:mod:`memplan.step.engines.reduced_gradients`); the step casts a rank's own to fp32, group by group
(:mod:`memplan.step.states.flat_partitions`), and gathers weights where they are. What comes out is the fullest rank at
each instant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.step.alive_around_layers import escaped_form, graph_of_loss, let_go, retained_graph
from memplan.step.engines.cut_sections import Segment, Segments, segments
from memplan.step.engines.reduced_gradients import Buckets, EngineBytes, Gradients, WholeGradients
from memplan.step.head_instants import after_backward, root_form, tied_sum
from memplan.step.instants import StepForms, backward_base, forward_instants, leaf_instants, saved_by_layers
from memplan.step.model_on_tape import ModelOnTape, PlayedModel
from memplan.step.states.flat_partitions import FlatGroup, RankShare, flat_groups, rank_shares, stepped_tensors
from memplan.step.states.optimizer_scratch import Temporaries
from memplan.step.states.parallel_shards import numbered, reduced_elements
from memplan.step.step_inputs import StepInputs, buffers
from memplan.step.tapes.linear_forms import ZERO, Form, Part, constant_form
from memplan.step.tapes.moments import Instant, dominant

NORM_BYTES = 8
"""Bytes of an element of a gradient whose norm is formed (``get_norm_dtype`` in deepspeed/runtime/zero/utils.py, 0.19.8)."""

FORMULA = "gradients of a partition in fp64 for their norm, or flat and cast to fp32, group by group"


@dataclass(frozen=True, slots=True)
class EnginePass:
    """One forward and backward of the engine."""

    inputs: StepInputs  # What is compiled
    taped: ModelOnTape  # The model on tape
    layers: tuple[Segments, ...]  # Its kinds of layers, cut where something happens beside their operations
    embedding: Segments  # What stands before the layers
    head: Segments  # What stands behind them, with the loss
    forward: Callable[[EnginePass, Following, PlayedModel], Iterator[Instant]]  # Yields the moments of forward
    # Yields the sum of the gradients of a tied embedding and head.
    tied: Callable[[EnginePass, Following, Form], Iterator[Instant]]
    # What each layer leaves until backward has ended, whatever its tape lets go of; and the gradient of its input in that.
    left: Form = ZERO
    left_gradient: Form = ZERO

    def instants(self, gradients: Gradients) -> Iterator[Instant]:
        """Yield the instants of one forward and backward."""
        inputs, taped = self.inputs, self.taped
        played = taped.played("layer", inputs.recomputation)
        following = Following(gradients)
        yield from self.forward(self, following, played)
        base, bare = backward_base(inputs, taped, ZERO)
        root = root_form(inputs, taped.settings)
        yield from following.through(self.head.backward, base + root + played.saved)
        waits = constant_form(Part.GRADIENTS, taped.head.delayed_bytes)
        yield from self._layers_backward(following, played, base + root + waits)
        left = self.left * sum(run.count for run in taped.runs) - self.left_gradient
        around = bare + escaped_form(taped, played) + root + left
        for moment in leaf_instants(inputs, taped, around):  # before the first layer has been let go of as a whole
            yield besides(moment, following.leaving)
        yield from following.through(self.embedding.backward, around + waits, "end of backward")
        yield from self.tied(self, following, around + waits)
        for moment in leaf_instants(inputs, taped, around):
            yield following.with_resident(moment)
        if not isinstance(gradients, WholeGradients):
            behind = around + (taped.handed.left_behind if taped.leaf is None else ZERO)
            last = Instant("end of backward", "reduction of the last bucket", behind)
            yield besides(last, gradients.end())

    def walk(self, gradients: Gradients) -> None:
        """Have all that is marked arrive, in order, where nothing of it is asked for."""
        following, name = Following(gradients), self.inputs.spec.names.layer
        layers = [
            (self.layers[kind], number)
            for kind, run in zip(self.taped.kinds, self.taped.runs, strict=True)
            for number in range(run.first, run.first + run.count)
        ]
        following.walk(self.embedding.forward, -1)
        for layer, number in layers:
            following.walk(layer.forward, number)
        following.walk(self.head.forward, -1)
        following.walk(self.head.backward, -1)
        for layer, number in reversed(layers):
            following.walk(layer.backward, number, name)
        following.walk(self.embedding.backward, -1)

    def _layers_backward(self, following: Following, played: PlayedModel, base: Form) -> Iterator[Instant]:
        """Yield the backward of all layers, the last first; of layers alike those that can be the fullest."""
        saved, taped, above = played.saved, self.taped, ZERO
        shared = self.left_gradient  # what a layer leaves of it is what the one below is given
        for kind, run in zip(reversed(taped.kinds), reversed(taped.runs), strict=True):
            part = played.layers[kind]
            following.forget()
            for number in range(run.first + run.count - 1, run.first - 1, -1):
                if number == run.first:
                    following.forget()
                saved -= part.saved
                around = (
                    base + saved + above + taped.handed.waiting(number + 1) - let_go(self.inputs, taped, number + 1)
                )
                own, name = self.inputs.spec.names.layer, f"layer {number + 1} backward"
                yield from following.through(self.layers[kind].backward, around, name, number, own)
                above, shared = above + part.escaped + self.left - shared, ZERO


def forward_beside(walk: EnginePass, following: Following, played: PlayedModel) -> Iterator[Instant]:
    """Yield the moments of forward, beside which nothing changes."""
    for moment in forward_instants(walk.inputs, walk.taped, played, retained_graph(walk.inputs, walk.taped)):
        yield following.with_resident(moment)


def tied_gradients(walk: EnginePass, following: Following, around: Form) -> Iterator[Instant]:
    """Yield the sum of the gradients of a tied embedding and head, and its arrival."""
    weight = walk.taped.weight(walk.inputs.spec.names.embedding)
    if weight is None or not walk.taped.settings.tied or not weight.trainable:
        return
    waits = constant_form(Part.GRADIENTS, walk.taped.head.delayed_bytes)
    for moment in tied_sum(walk.inputs, walk.taped, around, "layer"):
        yield following.with_resident(moment)
    formed = constant_form(Part.GRADIENTS, weight.formed_bytes)
    arrived = Instant("end of backward", f"{weight.name} gradient", around - waits + formed)
    yield following.arrive(weight.name, arrived)


def engine_pass(inputs: StepInputs, taped: ModelOnTape, *, visits: bool = False) -> EnginePass:
    """Return a forward and backward whose weights are whole; modules are marked as they begin and end where asked for.

    Raises:
        CannotAnswerError: A loss whose gradients leave otherwise.
    """
    setup = inputs.setup
    if taped.head.chunk is not None or taped.settings.backward_at_once:
        loss = setup.profile.loss
        engine = "DeepSpeed" if setup.config.parallel.engine == "deepspeed" else "FSDP1 with adapters"
        raise CannotAnswerError(f"{setup.name}: kernels.loss: {loss} is not modelled under {engine}; use fp32")
    layers = tuple(segments(section, inputs.recomputation, visits=visits) for section in taped.layers)
    embedding, head = (segments(section, visits=visits) for section in (taped.embedding, taped.head.section))
    return EnginePass(inputs, taped, layers, embedding, head, forward_beside, tied_gradients)


class EngineStep:
    """One step of DeepSpeed's engine.

    Args:
        inputs: What is compiled, with the scratch of the fullest rank's step.
        shares: What each rank has of their gradients.
    """

    def __init__(
        self, inputs: StepInputs, taped: ModelOnTape, groups: Sequence[FlatGroup], shares: Sequence[RankShare]
    ) -> None:
        setup = inputs.setup
        self.inputs, self.taped, self.groups, self.shares = inputs, taped, groups, shares
        self._pass = engine_pass(inputs, taped)
        self._width = setup.compute_bytes
        sizes = ((group.idle, pair) for group in self.groups for pair in zip(group.names, group.sizes, strict=True))
        self._sizes = {name: elements * self._width for idle, (name, elements) in sizes if name not in idle}
        zero = setup.config.parallel.deepspeed
        self._size = reduced_elements(setup.config.parallel, inputs.spec.hidden_size)
        self._copies = zero.reduce_scatter
        self._count = 2 if zero.overlap_comm else 1

    def instants(self) -> Iterator[Instant]:
        """Yield the candidates for the peak."""
        config = self.inputs.setup.config
        several, stage = config.gradient_accumulation_steps > 1, config.parallel.zero_stage
        leaves = stage == 2 or (self._count == 2 and not several)
        yield from self._pass.instants(
            self._buckets(last=not several) if leaves else self._whole_gradients(again=False)
        )
        if stage == 1 and not leaves and not several:
            yield self._reduced_at_the_end()
        if several:
            if stage == 2:
                second: Gradients = self._buckets().with_own()
            elif self._count == 2:
                second = self._buckets().with_whole(sum(self._sizes.values()))
            else:
                second = self._whole_gradients(again=True)
                yield replace(self._reduced_at_the_end(), name="second backward")
            for instant in self._pass.instants(second):
                yield replace(instant, name="second backward", operation=f"{instant.operation} ({instant.name})")
        graph = graph_of_loss(self.inputs, self.taped)  # the engine steps before the loop has let go of the loss
        for instant in after_backward(self.inputs, self.taped, 0):
            if instant.name == "gradient clipping":
                continue  # its norm is a part of the step
            yield instant.around(graph) if instant.name == "optimizer step" else instant

    def _buckets(self, *, last: bool = True) -> Buckets:
        """Return the buckets of a micro-step, be it the last: those before it sum up in host memory, where gradients go there."""
        stage = self.inputs.setup.config.parallel.zero_stage
        sizes = {"size": self._size, "count": self._count, "width": self._width}
        leaves = NORM_BYTES * last if self.inputs.setup.steps_on_host else None
        return Buckets(self.groups, self.shares, lingers=stage == 1, copies=self._copies, leaves=leaves, **sizes)

    def _whole_gradients(self, *, again: bool) -> WholeGradients:
        return WholeGradients(self._sizes, self._size * self._width * self._count, again=again)

    def _reduced_at_the_end(self) -> Instant:
        """Return the fullest moment of reducing gradients that have stayed whole, in the order of the model."""
        buckets = self._buckets().with_whole(sum(self._sizes.values()))
        moments = [*map(buckets.arrive, self._sizes), buckets.end()]
        root = root_form(self.inputs, self.taped.settings)
        form = graph_of_loss(self.inputs, self.taped) + root
        return besides(
            Instant("end of backward", "reduction of whole gradients", form),
            max(moments, key=lambda resident: resident.bytes),
        )


class Following:
    """Follows gradients through a backward, and leaves out moments at which no more is there than at an earlier one alike.

    Attributes:
        leaving: What was there before backward let go of the last layer as a whole.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._most: dict[int, int] = {}
        self.leaving = gradients.resident

    @property
    def resident(self) -> EngineBytes:
        """What is there besides."""
        return self._gradients.resident

    def forget(self) -> None:
        """Begin layers of another kind."""
        self._most = {}

    def through(
        self, parts: tuple[Segment, ...], around: Form, name: str = "", number: int = -1, own: str = ""
    ) -> Iterator[Instant]:
        """Yield the moments of a part with what is there besides.

        Args:
            around: What lies around it.
            name: Instant that they are of; empty for those that they name, or the loss's.
            number: Of the layer that it is; none for another part.
            own: Name of the module that it is.
        """
        if number < 0:
            self.forget()
        resident = self.walk(parts, number, own)
        if own and self._is_fuller(parts, resident):  # somewhere, so that its instant is told by all of its moments
            self.forget()
        yield from self.moments(parts, resident, around, name)

    def walk(self, parts: tuple[Segment, ...], number: int, own: str = "") -> list[tuple[EngineBytes, EngineBytes]]:
        """Return what is there besides, before each mark of a part and at it."""
        resident = []
        for _, _, mark in parts:
            before = self._gradients.resident
            at = before if mark is None else self._gradients.arrive(numbered(mark.name or own, number), mark.kind)
            resident.append((before, at))
            if mark is not None and mark.kind == "left backward" and not mark.name:
                self.leaving = before
        return resident

    def moments(
        self, parts: tuple[Segment, ...], resident: list[tuple[EngineBytes, EngineBytes]], around: Form, name: str
    ) -> Iterator[Instant]:
        """Yield the moments of a part that was walked through; see :meth:`through`."""
        for place, ((moments, marked, _), (before, at)) in enumerate(zip(parts, resident, strict=True)):
            marks = () if marked is None else (marked,)
            for number, alike, beside in ((2 * place, moments, before), (2 * place + 1, marks, at)):
                if alike and self._is_more(number, beside):
                    near = around + resident_form(beside)
                    for moment in alike:
                        form = near + moment.form
                        own = name or moment.name or "loss backward"
                        yield Instant(own, moment.operation, form, beside.communication, moment.reduces)

    def _is_fuller(self, parts: tuple[Segment, ...], resident: list[tuple[EngineBytes, EngineBytes]]) -> bool:
        return any(
            (moments and before.bytes > self._most.get(2 * place, -1))
            or (marked is not None and at.bytes > self._most.get(2 * place + 1, -1))
            for place, ((moments, marked, _), (before, at)) in enumerate(zip(parts, resident, strict=True))
        )

    def _is_more(self, place: int, resident: EngineBytes) -> bool:
        if resident.bytes <= self._most.get(place, -1):
            return False
        self._most[place] = resident.bytes
        return True

    def with_resident(self, moment: Instant) -> Instant:
        """Return a moment with the buckets and gradients that are there."""
        return besides(moment, self._gradients.resident)

    def arrive(self, name: str, moment: Instant) -> Instant:
        """Return the moment at which a gradient is taken in."""
        return besides(moment, self._gradients.arrive(name))


def besides(moment: Instant, resident: EngineBytes) -> Instant:
    """Return a moment with what is there besides."""
    form = moment.form + resident_form(resident)
    return Instant(moment.name, moment.operation, form, resident.communication, moment.reduces)


def resident_form(resident: EngineBytes) -> Form:
    """Return what is there besides, whatever batch and length are."""
    return constant_form(Part.TEMPORARIES, resident.communication) + constant_form(Part.GRADIENTS, resident.gradients)


def compile_engine_step(inputs: StepInputs, taped: ModelOnTape) -> StepForms:
    """Return the closed forms of a training step under ZeRO 1 or 2.

    Raises:
        CannotAnswerError: A loss whose gradients leave otherwise.
    """
    groups = flat_groups(inputs.setup, stepped_tensors(inputs.setup, inputs.states))
    shares = rank_shares(inputs.setup, groups)
    update = max(share.step_bytes for share in shares) - inputs.gradient_bytes
    inputs = replace(inputs, optimizer=Temporaries(update, FORMULA), clipping_bytes=0)
    candidates = tuple(dominant([*EngineStep(inputs, taped, groups, shares).instants()]))
    return StepForms(candidates, buffers(inputs), saved_by_layers(taped), FORMULA)
