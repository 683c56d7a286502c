"""A whole model on tape: embedding, every kind of layer once, and head."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from itertools import groupby

from memplan.catalog.training_config import ALL_TRAIN
from memplan.documents.frozen_values import dataclass
from memplan.model.spec import Layer, LayerRun, MixtureOfExperts, ModelSpec
from memplan.step.blocks.block_settings import BlockSettings, Regime, block_settings
from memplan.step.compiled_layers.compiled_layer import CompiledLayer, layer_shape
from memplan.step.ends.embedding_on_tape import embedding_section
from memplan.step.ends.end_settings import EndSettings, end_settings
from memplan.step.ends.head_on_tape import Head, Named, evaluated_head, head_on_tape
from memplan.step.kernels.image_rows import has_images, masks_every_layer
from memplan.step.layers.decoder_layer import Staged, layer_section
from memplan.step.layers.handed_down import Handed, HandedDown
from memplan.step.layers.handing import Handing, alone
from memplan.step.offloaded_inputs import left_behind
from memplan.step.playing.peak_layers import layer_counts
from memplan.step.playing.recomputation import NOTHING_AGAIN, Recomputation
from memplan.step.playing.section import Section
from memplan.step.states.model_states import CastBias
from memplan.step.step_inputs import Parameter, StepInputs, taped_weights
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.step.tapes.moments import Played
from memplan.step.tapes.taped_operations import Mode, Sizes, Value, Weight
from memplan.step.tower.tower_on_tape import PlayedTower, TowerOnTape, tower_on_tape
from memplan.step.tower.tower_settings import is_of_tower, tower_settings
from memplan.training.adapters import REFERENCE
from memplan.training.resolved import TrainingSetup

Stream = tuple[bool, int, bool]
"""Of the residual stream that a part is given: whether it needs a gradient, the bytes of an element, and whether layers read a leaf
of autograd's graph without a norm before."""


@dataclass(frozen=True, slots=True)
class PlayedModel:
    """What the parts of a model have alive in forward and backward."""

    embedding: Played
    layers: tuple[Played, ...]  # One layer of each kind
    head: Played
    saved: Form  # What embedding, tower and layers leave for backward
    tower: PlayedTower | None = None  # The tower that images pass through

    @property
    def embedded(self) -> Form:
        """What the embedding, and a tower, have saved for backward."""
        return self.embedding.saved if self.tower is None else self.embedding.saved + self.tower.saved

    @property
    def carried(self) -> Form:
        """What both have cast until the whole forward ends."""
        return self.embedding.carried if self.tower is None else self.embedding.carried + self.tower.carried


@dataclass(frozen=True, slots=True)
class ModelOnTape:
    """The parts of a model on tape."""

    settings: EndSettings  # What its ends depend on
    weights: Named  # The parameters that no layer has, by name
    embedding: Section
    runs: tuple[LayerRun, ...]  # Runs of equal layers; a first layer whose input needs no gradient may be one alone
    kinds: tuple[int, ...]  # For each run, which of ``layers`` its layers are
    layers: tuple[Section, ...]  # One section for each kind of layer
    again: tuple[bool, ...]  # Whether checkpointing is of that kind
    staged: tuple[bool, ...]  # Whether inputs of that kind wait in host memory
    head: Head
    # The run whose first layer is given a leaf of autograd's graph that needs a gradient; None for none.
    leaf: int | None = None
    tower: TowerOnTape | None = None  # The tower that images pass through; None for rows of text
    compiled: CompiledLayer | None = None  # What each layer runs in the place of its tape, where torch compiles it
    # What a layer of each kind hands a loss of unbalanced experts, which has a gradient as large; nothing for none.
    balanced: Mapping[int, Form] = field(default_factory=dict)
    handed: HandedDown = HandedDown()  # What parts hand on to several others

    @property
    def part_before_leaf(self) -> int | None:
        """The place of the part whose result is a leaf that its gradient stays with: 0 is the embedding; None for none."""
        if self.leaf is None or not is_direct(self.embedding):
            return None
        return sum(run.count for run in self.runs[: self.leaf])

    @property
    def scattered(self) -> bool:
        """Whether the layers are given a tensor apart, of embedded tokens and images, where the embedded tokens are a leaf."""
        return self.tower is not None and self.tower.settings.reads_tokens

    def weight(self, name: str) -> Weight | None:
        """Return the parameter of this name that no layer has, or None."""
        return dict(self.weights).get(f"{name}.weight")

    def layer_of(self, run: int) -> Section:
        """Return one layer of the run with this index."""
        return self.layers[self.kinds[run]]

    @property
    def lowest_turned(self) -> int | None:
        """The lowest layer whose backward needs the tables that query and key are turned by, or None."""
        parts = zip(self.layers, self.again, strict=True)
        kinds = [(again and bool(part.tape.nodes)) or part.turns for part, again in parts]
        return next((run.first for kind, run in zip(self.kinds, self.runs, strict=True) if kinds[kind]), None)

    def counts(self) -> dict[int, int]:
        """Return how many layers there are of each kind."""
        return layer_counts(zip(self.kinds, self.runs, strict=True))

    @property
    def staged_widths(self) -> tuple[int, ...]:
        """Of each layer whose input waits in host memory, in order, the bytes of that for a token."""
        counts = ((kind, run.count) for kind, run in zip(self.kinds, self.runs, strict=True) if self.staged[kind])
        return tuple([self.layers[kind].entry.coefficient for kind, count in counts for _ in range(count)])

    @property
    def saved_twice(self) -> Form:
        """What the first layer is given, where the embedding saves it besides."""
        output, first = self.embedding.output, self.layer_of(0)
        saves = self.again[self.kinds[0]] or first.entry.storage in first.tape.saved_storages()
        if not saves or output.storage not in self.embedding.tape.saved_storages():
            return ZERO
        return single_form(Part.ACTIVATIONS, output.quantity, output.coefficient)

    def head_alone(self, *, loss_inside: bool = True) -> Section:
        """Return final norm, head and loss of a forward without gradients, given what the last layer returns."""
        width = self.head.section.entry.element_bytes
        return evaluated_head(self.settings, self.weights, width, loss_inside=loss_inside)

    def cast_biases(self) -> Iterator[CastBias]:
        """Yield the biases that what stands behind layers, and these, cast for good, run by run."""
        yield from [(name, 0, 1, width) for name, width in self.head.section.tape.cast_biases.items()]
        for index, run in enumerate(self.runs):
            for name, width in self.layer_of(index).tape.cast_biases.items():
                yield name, run.first, run.count, width

    def played(self, mode: Mode, recomputation: Recomputation) -> PlayedModel:
        """Return what is alive while all parts run forward and backward."""
        embedding, head = self.embedding.played(mode), self.head.section.played(mode)
        ways = [recomputation if again else NOTHING_AGAIN for again in self.again]
        if self.compiled is None:
            layers = tuple([section.played(mode, way) for section, way in zip(self.layers, ways, strict=True)])
        else:
            layers = (self.compiled.played(mode),) * len(self.layers)
        layers = tuple([_with_logits(part, self.balanced.get(kind, ZERO)) for kind, part in enumerate(layers)])
        tower = None if self.tower is None else self.tower.played(mode, recomputation)
        before = embedding.saved if tower is None else embedding.saved + tower.saved
        saved = sum((layers[kind].saved * count for kind, count in self.counts().items()), before - self.saved_twice)
        return PlayedModel(embedding, layers, head, saved, tower)


def is_direct(embedding: Section) -> bool:
    """Tell whether no operation with a backward makes what the first layer is given, though some may read that."""
    return all(embedding.output is not output for node in embedding.tape.nodes for output in node.outputs)


def model_on_tape(inputs: StepInputs) -> ModelOnTape:
    """Return a model on tape; parts that it has in common with others are shared."""
    spec = inputs.spec
    block = block_settings(spec, inputs.setup, inputs.regime)
    weights = taped_weights(inputs.setup, inputs.states, spec.names.pooler if spec.encoder is not None else "")
    prefix, known = f"{spec.names.layer}.", {key[:2] for key in weights}
    settings = end_settings(spec, block, inputs.setup, frozen=(f"{spec.names.embedding}.weight", False) in known)
    visual = {name: weight for (name, *_), weight in weights.items() if spec.tower is not None and is_of_tower(name)}
    root = tuple(
        (name, weight)
        for (name, *_), weight in weights.items()
        if not name.startswith((prefix, REFERENCE)) and name not in visual
    )
    embedding = embedding_section(settings, root)
    reads = embedding.output.needs_gradient
    tower = tower_on_tape(
        tower_settings(spec, inputs.setup, block, inputs.states, reads_tokens=reads),
        {name.removeprefix("model."): weight for name, weight in visual.items()},
        again=inputs.setup.checkpointing != "none",
    )
    needs = reads if tower is None else tower.closing.output.needs_gradient
    leaf = needs and is_direct(embedding) and tower is None and spec.runs[0].layer.placement == "post"
    stream = (needs, block.residual_bytes, leaf)
    kinds = _Kinds(inputs, block, weights, prefix, _left_behind(inputs, settings, root), embedding.tape.layer_inputs)
    runs: list[tuple[LayerRun, int]] = []
    given = settings.input_gradients and (f"{spec.names.embedding}.weight", False) in known
    if not settings.table_gradients and (f"{spec.names.embedding}.lora_embedding_A.weight", True) in known:
        given = False
    leaves = [0] if given else []
    for run in _runs(spec, inputs.setup, inputs.regime):
        if kinds.trained_alone and kinds.trains(run) and not stream[0] and inputs.setup.computes_again(run.first):
            leaves.append(len(runs))
            stream = (True, stream[1], run.layer.placement == "post")
        first = kinds.of(run, stream)
        if kinds.after(first) == stream or run.count == 1:
            runs.append((run, first))
        else:
            alone, rest = LayerRun(run.layer, 1, run.first), LayerRun(run.layer, run.count - 1, run.first + 1)
            runs += [(alone, first), (rest, kinds.of(run, kinds.after(first)))]
        stream = kinds.after(runs[-1][1])
    head = head_on_tape(settings, root, *stream[:2])
    layers, numbers = zip(*runs, strict=True)
    sections, again, staged = tuple(kinds.sections), tuple(kinds.again), tuple(kinds.staged)
    lowest, compiled, regime = leaves[0] if leaves else None, None, inputs.regime
    if regime.orders is not None:
        compiled = CompiledLayer(layer_shape(spec, inputs.setup, regime.sums, alone=regime.one_sequence), regime.orders)
    balanced = _router_logits(inputs, block, zip(numbers, layers, strict=True))
    ends = (head, lowest, tower, compiled, balanced, kinds.handing.down(sections[0]))
    return ModelOnTape(settings, root, embedding, layers, numbers, sections, again, staged, *ends)


def _left_behind(inputs: StepInputs, settings: EndSettings, root: Named) -> Sizes:
    """Return what hooks that copy inputs of layers keep of the final norm until the last layer is computed again."""
    hooked = inputs.regime.staged and inputs.setup.stack.checkpointing.hooked
    return left_behind(head_on_tape(settings, root, True, inputs.setup.residual_bytes)) if hooked else ()


def _router_logits(inputs: StepInputs, block: BlockSettings, runs: Iterable[tuple[int, LayerRun]]) -> dict[int, Form]:
    """Return the logits of routers that a loss of unbalanced experts reads of each kind of layers behind the last one.

    They stay until it is formed, and its backward, which runs first of all, leaves a gradient of each until that of its layer.

    Source:
        ``load_balancing_loss_func`` in transformers/models/mixtral/modeling_mixtral.py (5.23.0); ``OutputRecorder`` in
        transformers/utils/output_capturing.py.
    """
    if not inputs.setup.balances or not block.code.balances:
        return {}
    routed = ((kind, run.layer.feed_forward) for kind, run in runs)
    return {
        kind: single_form(Part.ACTIVATIONS, Quantity.TOKENS, part.num_experts * block.compute_bytes)
        for kind, part in routed
        if isinstance(part, MixtureOfExperts)
    }


def _with_logits(played: Played, logits: Form) -> Played:
    """Return a layer whose router's logits, and then their gradient, stay beside what it saves."""
    if logits is ZERO:
        return played
    forward, backward = ([moment.around(logits) for moment in moments] for moments in (played.forward, played.backward))
    return replace(played, forward=forward, saved=played.saved + logits, backward=backward)


class _Kinds:
    """Kinds of layers on tape as they are met, each once.

    Args:
        weights: Of all parameters.
        prefix: What names of layers' parameters begin with.
        behind: What hooks keep of the final norm until the last layer is computed again.

    Attributes:
        trained_alone: Whether the library asks for gradients of inputs, and checkpoints, where layers train.
        sections: A layer of each kind.
        again: Whether it is computed again.
        staged: Whether its input waits in host memory meanwhile.
        handing: What layers are given besides the residual stream.
    """

    def __init__(
        self,
        inputs: StepInputs,
        block: BlockSettings,
        weights: Mapping[Parameter, Weight],
        prefix: str,
        behind: Sizes,
        embedded: Value | None,
    ) -> None:
        regime = replace(inputs.regime, stretches=1, empty_stretch=False)  # of the head alone
        self._inputs, self._block, self._weights, self._prefix = inputs, replace(block, regime=regime), weights, prefix
        names: dict[int, list[Parameter]] = {}
        for entry in inputs.states.tensors:
            if entry.tensor.name.startswith(prefix):
                names.setdefault(entry.tensor.first, []).append(
                    (entry.tensor.name, entry.trainable, entry.tensor.shape)
                )
        self._names = {first: tuple(own) for first, own in names.items()}
        unmasked = replace(regime, masked=False, pads_mask=False)
        self._unmasked = block_settings(inputs.spec, inputs.setup, unmasked) if regime.masked else self._block
        self._known: dict[tuple[Layer, tuple[Parameter, ...], Stream, bool, bool, Staged | None, Handed], int] = {}
        self._behind = behind
        self.handing = Handing(inputs.spec, inputs.setup, embedded)
        setup = inputs.setup
        self._unmasked_layers = () if masks_every_layer(inputs.spec, setup) else inputs.spec.full_layers
        self.trained_alone = setup.stack.input_gradients == "trained-layers" and (
            setup.config.freeze != ALL_TRAIN or has_images(inputs.spec, setup)
        )
        self.sections: list[Section] = []
        self.again: list[bool] = []
        self.staged: list[bool] = []

    def trains(self, run: LayerRun) -> bool:
        """Tell whether parameters of a run's layers train."""
        return any(trainable for _, trainable, _ in self._own(run))

    def of(self, run: LayerRun, stream: Stream) -> int:
        """Return the kind of a run's layers, by number, where the first of them is given such a stream."""
        inputs, own = self._inputs, self._own(run)
        unmasked = inputs.regime.masked and run.first in self._unmasked_layers
        again = inputs.setup.computes_again(run.first) and (self.trains(run) or not self.trained_alone)
        staged = self._staged(run.first) if again and inputs.regime.staged else None
        handed = self.handing.to(run)
        key = (run.layer, own, stream, unmasked, again, staged, handed)
        if key not in self._known:
            self.again.append(again)
            self.staged.append(staged is not None)
            self._known[key] = len(self.sections)
            weights = tuple((name[0].removeprefix(self._prefix), self._weights[name]) for name in own)
            settings = self._unmasked if unmasked else self._block
            self.sections.append(layer_section(settings, run.layer, weights, *stream, staged=staged, handed=handed))
        self.handing.note(run, handed, self.sections[self._known[key]])
        return self._known[key]

    def _staged(self, number: int) -> Staged | None:
        """Return how the input of a layer, numbered from 0, waits in host memory."""
        way, is_last = self._inputs.setup.stack.checkpointing.offloads, self._inputs.is_last(number)
        if self._inputs.setup.stack.checkpointing.hooked:
            return Staged(is_view=False, hooked=True, behind=self._behind if is_last else None)
        return None if way == "buffers" and is_last else Staged(is_view=way == "buffers")

    def after(self, kind: int) -> Stream:
        """Return the stream behind a layer of a kind."""
        output, block = self.sections[kind].output, self._block
        return output.needs_gradient, output.element_bytes if block.code.promotes else block.residual_bytes, False

    def _own(self, run: LayerRun) -> tuple[Parameter, ...]:
        return self._names.get(inventory_first(self._inputs.spec, run), ())


def _runs(spec: ModelSpec, setup: TrainingSetup, regime: Regime) -> Iterator[LayerRun]:
    """Yield runs of layers that run alike: within a window where there is a mask for it or not, checkpointed or not, staged or not."""
    apart = alone(spec, setup)

    def way(number: int) -> tuple[bool, bool, bool, int]:
        retained = regime.staged and number == spec.num_hidden_layers - 1
        return (
            regime.masked and number in spec.full_layers,
            setup.computes_again(number),
            retained,
            number if number in apart else -1,
        )

    for run in spec.runs:
        groups = groupby(range(run.first, run.first + run.count), way)
        for part in [list(group) for _, group in groups]:
            yield LayerRun(run.layer, len(part), part[0])


def inventory_first(spec: ModelSpec, run: LayerRun) -> int:
    """Return the first layer of the inventory's run that ``run`` lies in."""
    return max(other.first for other in spec.runs if other.first <= run.first)
