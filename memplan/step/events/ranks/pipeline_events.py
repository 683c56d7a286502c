"""The events of one rank of a pipeline: its stages run micro-batch by micro-batch, in the order of their schedule.

What stages receive from each other lies in buffers that stay from the first step on.

Source:
    ``forward_one_chunk``, ``backward_one_chunk``, ``_forward_metadata_inference``, ``_backward_metadata_inference`` and
    ``_setup_forward_recv_info`` in torch/distributed/pipelining/stage.py, ``_step_microbatches`` of each schedule in
    schedules.py (v2.13.0).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memplan.step.events.chunk_events import ChunksAtOnce, loss_over_chunks
from memplan.step.events.event_stream import PlayedSection, SectionPlayer
from memplan.step.events.head_events import ChunkedLoss, LogitsOfChunks
from memplan.step.events.model_passes import WrittenModel
from memplan.step.events.ranks.staged_units import StagedUnits
from memplan.step.pipelines.pipeline_schedules import ONE_STAGE, Action, actions_of
from memplan.step.pipelines.rank_memory import VALID_TOKENS_BYTES, RankMemory
from memplan.step.playing.recomputation import NOTHING_AGAIN
from memplan.step.playing.section_events import SectionEvents, section_events
from memplan.step.tapes.event_recorder import NO_STORAGE
from memplan.step.tapes.taped_operations import Mode

Parts = list[tuple[str, PlayedSection]]
Chunks = ChunkedLoss | LogitsOfChunks | ChunksAtOnce


class StagePasses:
    """Plays what one rank of a pipeline does in a step.

    Args:
        units: The units of its stages.

    Attributes:
        gradients: None stay: units reduce all of them.
    """

    def __init__(self, model: WrittenModel, rank: RankMemory, units: StagedUnits) -> None:
        self.stream, self.inputs, self.taped, self.values = model.stream, model.inputs, model.taped, model.values
        self.rank, self.units, self.parallel = rank, units, model.inputs.setup.config.parallel
        self.gradients = dict[str, int]()
        self._sections, self._libraries = SectionPlayer(model.stream, model.values), model.libraries
        self._known: dict[tuple[int, Mode], list[tuple[str, SectionEvents]]] = {}
        self._inferred = False
        # What there is of micro-batches by stage and number: parts that have run forward, losses over chunks, and what
        # stages have handed on.
        self._played: dict[tuple[int, int], Parts] = {}
        self._chunks: dict[tuple[int, int], Chunks] = {}
        self._outputs: dict[tuple[int, int], list[int]] = {}
        self._losses: list[int] = []
        self._newest = 0, 0  # The micro-batch whose output a schedule names
        self._done: list[int] = []  # That output, where its backward is done
        self._sent: list[int] = []  # The gradient that was sent last

    def verify(self) -> None:
        """Write nothing: evaluation is not told over shards."""

    evaluate = end_step = verify

    def play(self, mode: Mode) -> list[tuple[int, int]]:
        """Play all that a rank's schedule does in a step; no micro-batch repeats another's events."""
        del mode
        parallel = self.parallel
        if not self._inferred:
            self._infer()
        does = {"forward": self._forward, "backward": self._backward}
        for action in actions_of(parallel.stage or 0, parallel):
            if action.kind in does:
                does[action.kind](action)
            elif action.kind == "gather":
                self.stream.begin("forward")
                self.units.gather_stage(action.stage)
            elif action.kind == "release":
                self.units.release(action.stage)
            else:
                self.stream.begin("gradient reduction")
                self.units.reduce(action.stage)
        self.stream.free_all([*self._done, *self._sent, *self._losses])
        self._done, self._sent, self._losses = [], [], []
        return []

    # ---------------------------------------------------------------- one micro-batch
    def _events(self, stage: int, mode: Mode) -> list[tuple[str, SectionEvents]]:
        """Return the parts of a stage, with the number that names of their weights carry."""
        known = self._known.get((stage, mode))
        if known is None:
            known = self._known[stage, mode] = [*self._parts_of(stage, mode)]
        return known

    def _parts_of(self, stage: int, mode: Mode) -> Iterator[tuple[str, SectionEvents]]:
        taped, layer, numbers = self.taped, self.taped.layer_of(0), self.units.layers[stage]
        way = self.inputs.recomputation if taped.again[taped.kinds[0]] else NOTHING_AGAIN
        if stage == 0:
            yield "", section_events(taped.embedding, mode)
        for number in numbers:
            if number == numbers[-1] and stage < self.rank.last:  # its gradient stays in the buffer that it came in
                yield str(number), _handing_on(section_events(layer, mode, way, received=True))
            else:
                yield str(number), section_events(layer, mode, way)
        if stage == self.rank.last:
            head, logits = section_events(taped.head.section, mode), taped.head.logits
            yield "", head if logits is None else head.holding(logits.storage)

    def _forward(self, action: Action) -> None:
        mode: Mode = "again" if action.micro_batch and not self.rank.converts else "first"
        stage, key = action.stage, (action.stage, action.micro_batch)
        self.stream.begin("forward")
        parts = self._played[key] = self._run_stage(stage, self._events(stage, mode))
        self._outputs[key] = self._output_of(stage, parts)
        if stage == self.rank.last:
            if (chunks := self._loss_of()) is not None:
                self._chunks[key] = chunks
            self._losses.append(self.stream.allocate(self.taped.settings.loss_bytes))
        if self.parallel.order in ONE_STAGE:
            self.stream.free_all(self._done)
            self._done, self._newest = [], key

    def _run_stage(self, stage: int, sections: Iterable[tuple[str, SectionEvents]]) -> Parts:
        """Write the forward of a stage, which is given a buffer that stays."""
        parts: Parts = []
        handed, owned = NO_STORAGE, True
        self.units.wait_for(stage)
        self.stream.of("activations")
        for place, (number, events) in enumerate(sections):
            self.units.enter_stage(stage, place)
            part = self._sections.section(events, handed, owned)
            part.forward(self._libraries["forward"])
            parts.append((number, part))
            handed, owned = part.output, part.output_owned
        for _, part in parts:
            part.region_end()
        self.units.leave_stage(stage)
        return parts

    def _loss_of(self) -> Chunks | None:
        """Write forward and backward of a loss over chunks, if there is one, and return it: each reduces the head's gradients."""
        if self.taped.head.chunk is None:
            return None
        mode: Mode = "first"
        given = self.stream, self.taped.head, self.values, mode
        chunks = loss_over_chunks(given, self.inputs, self.taped, self._libraries, self.units.sums)
        chunks.forward(NO_STORAGE, [])
        return chunks

    def _output_of(self, stage: int, parts: Parts) -> list[int]:
        """Return what a stage hands on: its last layer's output, or logits."""
        _, part = parts[-1]
        if stage == self.rank.last:
            if self.taped.head.chunk is not None:  # what the head is given
                return [] if part.output_owned else [part.output]
            logits = self.taped.head.logits
            return [] if logits is None else [part.own_name(logits.storage)]
        return [] if part.output_owned else [part.output]

    def _backward(self, action: Action) -> None:
        stream, stage, key = self.stream, action.stage, (action.stage, action.micro_batch)
        order, named = self.parallel.order, self.parallel.order in ONE_STAGE
        stream.begin("backward")
        if order == "gpipe":
            stream.free_all(self._sent)
            self._sent = []
        gradient = self._run_back(
            stage, self._played.pop(key), self._libraries["backward"], self._chunks.pop(key, None)
        )
        outputs, sent = self._outputs.pop(key), [] if gradient == NO_STORAGE else [gradient]
        if named and key == self._newest:
            self._done = outputs
        else:
            stream.free_all(outputs)
        stream.free_all(self._sent if named else sent)
        self._sent = sent if named else []

    def _run_back(
        self, stage: int, parts: Parts, libraries: dict[str, int], chunks: Chunks | None, *, keeps: bool = True
    ) -> int:
        """Write the backward of a stage; return the gradient of what it was given, or ``NO_STORAGE``.

        Args:
            chunks: Its loss over chunks, if it has one.
            keeps: Whether gradients of weights are formed, and weights stay.
        """
        stream, gradient = self.stream, NO_STORAGE
        self.units.wait_for(stage)
        stream.of("temporaries")
        if stage == self.rank.last:
            gradient = stream.allocate(self.taped.settings.loss_bytes)
        if chunks is not None:
            stream.free(gradient)
            gradient, _ = chunks.backward(libraries, _never)
        for place, (number, part) in reversed([*enumerate(parts)]):
            self.units.enter_back(stage, place)
            part.backward(gradient, libraries, _never)
            gradient = part.leaving
            if keeps:
                self.units.add(stage, place, self._gradients_of(part, number))
            elif stage:
                self.units.release(stage, place)
        return gradient

    def _gradients_of(self, part: PlayedSection, number: str) -> dict[str, int]:
        return {name.replace("{}", number): storage for name, storage in part.gradient_storages.items()}

    # ---------------------------------------------------------------- before the first step
    def _infer(self) -> None:
        """Write how shapes are found out before the first step, by a micro-batch whose weights need no gradients, and the buffers."""
        stream, rank = self.stream, self.rank
        stream.begin("forward")
        value, runs = self.taped.embedding.output, {}
        size, together = value.coefficient * self.values[value.quantity], self.parallel.together
        stream.of("logits")
        stream.allocate(VALID_TOKENS_BYTES)
        for stage in rank.own:
            stream.of("activations")
            given = [stream.allocate(size)] if stage else []
            alone = _without_weights if stage else _graph_alone
            events = [(number, alone(one)) for number, one in self._events(stage, "first")]
            runs[stage] = given, self._run_stage(stage, events)
            stream.of("activations")
            stream.allocate_all([size] * (together if stage else 0))
        for stage in reversed(rank.own):
            given, parts = runs[stage]
            stream.of("temporaries")
            ones = [stream.allocate(size)] if stage < rank.last else []
            chunks = self._loss_of() if stage == rank.last else None
            libraries = self._libraries["backward"] if stage else {}
            gradient = self._run_back(stage, parts, libraries, chunks, keeps=False)
            stream.free_all([*ones, *given, *self._output_of(stage, parts)])
            stream.free_all([] if gradient == NO_STORAGE else [gradient])
            self.units.forget()
            stream.of("activations")
            stream.allocate_all([size] * (together if stage < rank.last else 0))
        if 0 in rank.own:
            self.units.release(0)
        self._inferred = True


def _without_weights(events: SectionEvents) -> SectionEvents:
    """Return events of a backward that forms no gradients of weights."""
    formed = {storage for _, storage in events.gradient_storages}
    backward = tuple([code for code in events.backward if code >> 1 not in formed])
    first = min((place for _, place in events.products[1]), default=0)
    dropped = sum(code >> 1 in formed for code in events.backward[:first])
    places = tuple([(library, max(0, place - dropped)) for library, place in events.products[1]])
    return replace(events, backward=backward, gradient_storages=(), products=(events.products[0], places))


def _graph_alone(events: SectionEvents) -> SectionEvents:
    """Return events of a part whose graph goes without a backward, as what it was given needs no gradient."""
    there = {events.entry}
    for code in (*events.forward, *events.region_end):
        (there.discard if code & 1 else there.add)(code >> 1)
    there.difference_update([] if events.keeps_output else [events.output])  # the next part lets go of it
    backward = []
    for code in events.backward:
        if code & 1 and code >> 1 in there:
            there.remove(code >> 1)
            backward.append(code)
    own = replace(events, backward=tuple(backward), gradient_storages=(), products=(events.products[0], ()))
    return replace(own, arriving=NO_STORAGE, leaving=NO_STORAGE)


def _handing_on(events: SectionEvents) -> SectionEvents:
    """Return events of a part whose output stays until its backward is done, so that what is computed again is another tensor."""
    start, other = 2 * events.output, len(events.storages)
    if start not in events.backward:
        return events
    place = events.backward.index(start)
    again = [2 * other + (code & 1) if code >> 1 == events.output else code for code in events.backward[place:]]
    storages = (*events.storages, events.storages[events.output])
    return replace(events, storages=storages, backward=(*events.backward[:place], *again))


def _never(name: str, gradient: int) -> None:
    """Stand for updates inside backward, which no pipeline is run with."""
    raise AssertionError(name, gradient)
