"""The events of forward and backward through a whole model, micro-batch by micro-batch, and of forwards without gradients.

Layers that are alike play the same events under other names, so that a step of a large model takes a few milliseconds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from memplan.documents.frozen_values import dataclass
from memplan.step.alive_around_layers import names_given
from memplan.step.events.argument_events import ModelArguments
from memplan.step.events.around_step import Around
from memplan.step.events.chunk_events import loss_over_chunks
from memplan.step.events.event_stream import EventStream, Libraries, PlayedSection, SectionPlayer, UseUp, leave_region
from memplan.step.events.head_events import measure_answers, measure_logits
from memplan.step.head_instants import joined_in_place
from memplan.step.losses.token_chunk_loss import IN_PIECES, left_by_stretch
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import evaluated_model, names_embedded, reference_model
from memplan.step.playing.recomputation import NOTHING_AGAIN
from memplan.step.playing.section_events import SectionEvents, forward_events, section_events
from memplan.step.states.parallel_shards import numbered
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.event_recorder import NO_STORAGE
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import Mode, Weight
from memplan.step.units.collated_rows import evaluated_rows, token_types
from memplan.training.rules.method_rules import REFERRED

VERIFIED, EVALUATED = 2, 3
"""Batches that LitGPT's loops evaluate before the first step (``max_iters=2`` in litgpt/finetune/lora.py and full.py, 0.5.13), and
behind one, where more are like the last."""


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """A model, and what its passes are written to."""

    stream: EventStream
    inputs: StepInputs  # What the tapes were made of: gathered weights, where a rank gathers its model
    taped: ModelOnTape
    values: Sequence[int]  # Values of the quantities that sizes are made of: of the step
    evaluated: tuple[StepInputs, ModelOnTape, Sequence[int]]  # All three of a forward that evaluates
    libraries: Mapping[str, Libraries]  # Libraries that have made no workspace yet, of ``forward`` and of ``backward``


class ModelPasses:
    """Plays forwards and backwards of a model.

    Args:
        around: What is written around its parts.
        use_up: Writes what becomes of gradients that are handed over as they are formed.

    Attributes:
        gradients: Storage of each gradient that stays, by the name of its weight.
    """

    def __init__(self, model: WrittenModel, around: Around, use_up: UseUp) -> None:
        self.stream, self.inputs, self.taped, self.values = model.stream, model.inputs, model.taped, model.values
        self.around, self._take, self.gradients = around, use_up, dict[str, int]()
        self._sections, self._evaluated = SectionPlayer(model.stream, model.values), model.evaluated
        self._libraries, setup, taped = model.libraries, model.inputs.setup, model.taped
        copied = setup.copies_logits or around.copy_returned is not None
        # Whether answers are compared by log-probabilities of whole logits, which the loss's function has names for.
        self._compares = setup.profile.loss == "log-probabilities" and setup.config.method.stage in REFERRED
        named = "logits" in setup.stack.loop.holds or (copied and not self._compares)
        returned = taped.head.returned if named and taped.head.logits is not None else ()
        self._own_logits = [value.storage for value in returned]
        self._in_time = setup.profile.loss in IN_PIECES  # logits get a new name before the loss is formed
        # Names of the last step, what its graph has, and what a head is given, where the model names it until logits are there.
        self._last_logits, self._graph, self._named = list[int](), list[int](), list[int]()
        self._left = left_by_stretch(taped.head.section.tape) if model.inputs.regime.empty_stretch else ()
        self._leaf, self._names_given = taped.part_before_leaf, names_given(self.inputs, taped)
        self._reference = reference_model(model.inputs, taped)
        self._called_again = setup.stack.checkpointing.reentrant and setup.checkpointing != "none"

    def play(self, mode: Mode) -> list[tuple[int, int]]:
        """Play all micro-steps; return where each but the first begins, and where the last ends.

        Args:
            mode: What becomes of weight gradients in the first.
        """
        ends = []
        for micro_step in self.around.micro_steps(self.inputs.setup.config.gradient_accumulation_steps):
            self._pass(self.around.mode(mode, micro_step), micro_step)
            ends.append((len(self.stream.codes), len(self.stream.sizes)))
        return ends

    def verify(self) -> None:
        """Write what a loop evaluates before the first step, if it does."""
        if self._in_time:
            self._evaluate(VERIFIED)

    def evaluate(self) -> None:
        """Write what a loop evaluates behind a step."""
        self._evaluate(EVALUATED if self._in_time else 1)

    def _pass(self, mode: Mode, micro_step: int) -> None:
        """Play one forward and backward."""
        taped, loss_bytes = self.taped, self.taped.settings.loss_bytes
        self.stream.begin("forward")
        self.around.begin(micro_step)
        self.stream.of("activations")
        self._mismatch(taped)
        arguments = ModelArguments(self.stream, self.inputs, taped, self.values)
        parts = self._runs(self._chain(mode), leaf=self._leaf, renames=self._in_time, arguments=arguments)
        chunks = None
        if taped.head.chunk is not None:
            given, normed = (self.stream, taped.head, self.values, mode), parts[-1][1]
            chunks = loss_over_chunks(given, self.inputs, taped, self._libraries, self.around.sums)
            chunks.forward(NO_STORAGE if normed.output_owned else normed.output, self._named)
            chunks.region_end()
        lowest = self._leave_forward([part for _, part in parts], arguments)
        self._compare([storage for _, storage in parts[-1][1].named] if self._compares else [])
        if self._reference is not None:
            self.around.turn()
        self.stream.begin("loss backward")
        self.stream.of("temporaries")
        several = self.inputs.setup.config.gradient_accumulation_steps > 1 or self.inputs.setup.scales_loss
        roots = self.stream.allocate_all([loss_bytes] * (3 if several else 2))
        gradient, waiting = self.stream.allocate(loss_bytes), dict[str, int]()
        if chunks is not None:
            of_loss = gradient
            gradient, sums = chunks.backward(self._libraries["backward"], self._take)
            self.stream.free(of_loss)
            self._keep(sums, "", waiting, mode)
        for place, (number, part) in enumerate(reversed(parts)):
            if place == 1:
                self.stream.begin("layers backward")
            arguments.stand_by(number, first=place == 0)
            self.around.enter_backward(len(parts) - place - 1)
            reached = self.around.reach_head if place == 0 else None
            part.backward(gradient, self._libraries["backward"], partial(self._use_up, number), reached)
            self._keep(part.gradient_storages, number, waiting, mode)
            self.around.leave_backward(len(parts) - place - 1, self.gradients)
            gradient = part.leaving if part.leaving != NO_STORAGE else gradient
            if len(parts) - place - 2 == lowest and not self._called_again:
                self.stream.free_all(arguments.staying)
        escaped = [storage for _, part in reversed(parts) for storage in part.escaped]
        leaf = parts[0][1].leaf if self._leaf is None else [gradient, parts[self._leaf][1].output]
        left = [parts[-1][1].own_name(storage) for storage in self._left]
        self._graph = [*dict.fromkeys([*left, *escaped, *arguments.left(called_again=self._called_again), *leaf])]
        loop = self.inputs.setup.stack.loop
        if not loop.holds or loop.until == "backward":
            self._end_names()
        self.stream.free_all(roots)

    def end_step(self) -> None:
        """Let go of what a step has names for that is a function."""
        if self.inputs.setup.stack.loop.until == "step":
            self._end_names()

    def _end_names(self) -> None:
        """Let go of logits that the loop has a name for, and of what the graph of the loss has."""
        self._let_go()
        self.stream.free_all(self._last_logits)
        self._last_logits = []

    def _compare(self, named: list[int]) -> None:
        """Write what is between a forward, of which a loss's function names this, and its loss: a reference's forward, and metrics."""
        setup, whole = self.inputs.setup, 4 * self.taped.settings.vocab_size * self.values[Quantity.TOKENS]
        mismatched = setup.config.method.stage == "kto" and setup.stack.loop.metrics == "softmax"
        for taped in filter(None, (self.taped, self._reference) if mismatched and self._compares else ()):
            if taped is not self.taped:
                named += self._without_gradients(taped)
            self.stream.free_all(self._without_gradients(taped))  # on answers to other prompts
            self.stream.of("logits")
            copies = [self.stream.allocate(whole)]  # of desirable and undesirable answers
            self.stream.free(named.pop())
            named += copies
        if self._reference is not None and not mismatched:
            self._mismatch(self._reference)
            take, reference = named.extend if setup.copies_logits else self.stream.free_all, self._reference
            self.around.refer(lambda: take(self._without_gradients(reference)))
        if self._compares and setup.copies_logits:
            measure_answers(self.stream, self.inputs, self.taped.settings.vocab_size, self.values)
        self.stream.free_all(named)

    def _mismatch(self, taped: ModelOnTape) -> None:
        """Write the forward on answers to other prompts before a model's own (``_compute_kl_logps`` in trl/trainer/kto_trainer.py, 1.16.0)."""
        if self.inputs.setup.config.method.stage == "kto" and self.inputs.setup.stack.loop.metrics != "softmax":
            self.stream.free_all(self._without_gradients(taped))

    def _leave_forward(self, parts: Sequence[PlayedSection], arguments: ModelArguments) -> int | None:
        """Let go of what forward alone needs; return the layer after whose backward none needs rotary tables, or None."""
        leave_region(parts)
        self._keep_logits(parts[-1])
        if self._reference is None:
            self.around.turn()
        if self.inputs.setup.copies_logits and not self._compares:
            measure_logits(self.stream, self.inputs, self.taped.settings.vocab_size, self.values, self._last_logits)
            self._last_logits = []
        elif self.around.copy_returned is not None:
            self.around.copy_returned(self._last_logits)
            self._last_logits = []
        self.stream.free_all([*[storage for part in parts for storage in part.cached], *arguments.copied])
        if (lowest := self.taped.lowest_turned) is None and not self._called_again:
            self.stream.free_all(arguments.staying)
        return lowest

    def _chain(self, mode: Mode) -> Iterator[tuple[str, SectionEvents]]:
        """Yield embedding, layers, and norm and head, with the number that names of their weights carry."""
        taped, visits = self.taped, self.around.visit is not None
        events = partial(section_events, mode=mode, visits=visits)
        yield "", events(taped.embedding)
        for index, run in enumerate(taped.runs):
            way = self.inputs.recomputation if taped.again[taped.kinds[index]] else NOTHING_AGAIN
            layer = events(taped.layer_of(index), recomputation=way, visits=visits and self.around.visits_layers)
            for number in range(run.first, run.first + run.count):
                yield str(number), layer
        head = events(taped.head.section)
        for storage in (*self._left, *(self._own_logits if not self._in_time else ())):
            head = head.holding(storage)
        yield "", head

    def _keep_logits(self, head: PlayedSection) -> None:
        """Keep the logits that a loop's own name keeps alive, and let go of those of the last forward."""
        self._let_go()
        self.stream.free_all([] if self._in_time else self._last_logits)
        self._last_logits = [head.own_name(storage) for storage in self._own_logits]

    def _let_go(self) -> None:
        """Free what the graph of a loss has: attributes of nodes, the embedded tokens and their gradient."""
        self.stream.free_all(self._graph)
        self._graph = []

    def _runs(
        self,
        parts: Iterable[tuple[str, SectionEvents]],
        *,
        leaf: int | None = None,
        renames: bool = False,
        arguments: ModelArguments | None = None,
        head: bool = True,
    ) -> list[tuple[str, PlayedSection]]:
        """Write the forward of parts, each given what the one before hands on, and what layers are called with."""
        played: list[tuple[str, PlayedSection]] = []
        # What layers were given, where the loop asks for it; what the first one was given, where the model's name alone keeps it.
        hidden, first = list[int](), list[int]()
        handed, owned, returned = NO_STORAGE, False, NO_STORAGE
        chunked, self._named = self.inputs.setup.profile.loss == "chunked-logits", []
        for number, events in parts:
            named = bool(number) if self.inputs.setup.has_value_head else chunked and bool(played) and not number
            named = named and not owned and 2 * events.entry + 1 in events.forward
            stays = len(played) == 1 and arguments is not None and head and self._names_given and not owned
            if not number:  # the model's name goes when its layers have run
                self.stream.free_all(first)
            first = [handed] if stays else first if number else []
            part = self._sections.section(events, handed, owned or named or stays)
            (self._named if chunked else hidden).extend([handed] if named else [])
            if renames and not number and played:
                before = self._last_logits or [NO_STORAGE] * len(self._own_logits)
                for storage, other in zip(self._own_logits, before, strict=True):
                    part.frees_instead(storage, other)
            if arguments is not None and head and not number and played:
                arguments.named_by(part)
            part.visited = None if self.around.visit is None else partial(self._visit, self.around.visit, number)
            self.around.enter(len(played))
            behind = self.around.leave_head if played and not number else None
            region = partial(leave_region, [one for _, one in played])
            returned = part.returns(self._libraries["forward"], returned, behind, region)
            self.around.leave(len(played))
            if arguments is not None:
                arguments.follow(number, part, len(played))
            played.append((number, part))
            handed, owned = part.output, part.output_owned or len(played) - 1 == leaf
        self.stream.free_all([*hidden, *([] if returned == NO_STORAGE else [returned])])
        return played

    def _visit(self, visit: Callable[[str, str], None], number: str, kind: str, name: str) -> None:
        own = self.inputs.spec.names.layer if number else ""
        visit(kind, numbered(name or own, number))

    def _use_up(self, number: str, name: str, gradient: int) -> None:
        self._take(numbered(name, number), gradient)

    def _keep(self, retained: Mapping[str, int], number: str, waiting: dict[str, int], mode: Mode) -> None:
        """Note the gradients that a part has left; that of a tied head waits for the embedding's."""
        tied = self._tied
        for name, storage in retained.items():
            if tied is None or name != tied.name:
                self.gradients[numbered(name, number)] = storage
            elif name not in waiting:
                waiting[name] = storage
            else:
                self._add_tied(tied, waiting.pop(name), storage, mode)

    def _add_tied(self, weight: Weight, first: int, second: int, mode: Mode) -> None:
        """Add up the gradients of a tied embedding and head, and store the sum."""
        total = first
        self.stream.of("gradients")
        in_place = joined_in_place(self.inputs.regime, self.taped.head, self.taped.settings)
        if not (in_place or self.around.adds_tied):
            total = self.stream.allocate(weight.formed_bytes)
            self.stream.free(first)
        self.stream.free(second)
        if mode == "layer":
            self._take(weight.name, total)
            return
        stored = weight.gradient_bytes if weight.own_mode(mode) == "first" else 0
        if stored and (weight.converted or stored != weight.formed_bytes):
            self.gradients[weight.name] = self.stream.allocate(weight.gradient_codes_bytes)
        elif stored:
            self.gradients[weight.name] = total
            return
        self.stream.free(total)

    @property
    def _tied(self) -> Weight | None:
        """The tensor that embedding and head share, where their gradients are added up."""
        settings, weight = self.taped.settings, self.taped.weight(self.inputs.spec.names.embedding)
        assert weight is not None
        return weight if settings.tied and not settings.value_head and weight.trainable and not weight.coded else None

    def _evaluate(self, batches: int) -> None:
        """Write forwards that evaluate, whose loss is over all logits at once."""
        self.stream.begin("evaluation")
        own = self._sections, self.inputs, self.taped
        self.inputs, self.taped, values = self._evaluated
        evaluated, types = evaluated_model(self.inputs, self.taped), token_types(self.inputs.spec, self.inputs.setup)
        size = evaluated_rows(self.inputs.setup, types).total_bytes(values)
        rows = self.stream.allocate_all([size] if size else [])
        self._sections = SectionPlayer(self.stream, values)
        if self._compares:
            self._compare(self._without_gradients(evaluated))
        else:
            self._without_gradients(evaluated, self.around.evaluated(batches))
        self._sections, self.inputs, self.taped = own
        self.stream.free_all(rows)

    def _without_gradients(self, taped: ModelOnTape, batches: Iterable[int] = (0,)) -> list[int]:
        """Write forwards that save nothing; return the whole logits of answers that a loss's function has names for."""
        layers = [forward_events(taped.layer_of(n)) for n, run in enumerate(taped.runs) for _ in range(run.count)]
        head, named = forward_events(taped.head_alone()), NO_STORAGE
        own, logits = 0 if names_embedded(self.inputs) else None, list[int]()
        for _ in batches:
            arguments = ModelArguments(self.stream, self.inputs, taped, self._sections.values)
            given = [("", forward_events(taped.embedding)), *[("", layer) for layer in layers]]
            parts = self._runs(given, leaf=own, arguments=arguments, head=False)
            self.around.enter(len(parts))
            own_parts = [played for _, played in parts]
            part = self._sections.section(head, own_parts[-1].output, own_parts[-1].output_owned)
            arguments.all_named_by(part, [] if own is None else [own_parts[0].output])
            named = part.returns(self._libraries["forward"], named, None, partial(leave_region, own_parts))
            leave_region([*own_parts, part])
            self.stream.free_all(storage for _, played in parts for storage in played.cached)
            logits = [storage for _, storage in part.named]
        self.stream.free_all([] if named == NO_STORAGE else [named])
        return logits
