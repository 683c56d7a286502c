"""A whole training step as closed forms: what is alive at each instant, and where the peak is.

Compiling plays the tapes of the model's parts once, beside what layers below have saved and those above have left: a few candidate
instants, linear forms in the quantities of :mod:`memplan.step.tapes.linear_forms`. Evaluating a batch and a length is arithmetic.
"""

from collections.abc import Callable, Iterator
from functools import partial

from memplan.documents.frozen_values import dataclass
from memplan.model.model import Model
from memplan.step.alive_around_layers import (
    called_again,
    embedded_leaf,
    escaped_form,
    forgotten_keys,
    handed_back,
    handed_instants,
    leaf_apart,
    left_stretch,
    let_go,
    lingering_input,
    logits_of_loop,
    named_cache,
    named_embeddings,
    named_input,
    named_output,
    other_features,
    outlives,
    passed_on,
    retained_graph,
    returned_before,
    stashed_in_loss,
    stashed_inputs,
    stream_form,
)
from memplan.step.blocks.block_settings import Regime
from memplan.step.head_instants import (
    after_backward,
    copied_outputs,
    gradients_left,
    head_backward,
    head_forward,
    root_form,
    tied_sum,
    waiting_form,
    widened_outputs,
)
from memplan.step.kernels.image_rows import is_embedded_ahead
from memplan.step.kernels.layer_arguments import layer_arguments, mask_scratch
from memplan.step.kernels.refused_code import refuse_unread_code
from memplan.step.losses.token_chunk_loss import IN_PIECES
from memplan.step.model_on_tape import ModelOnTape, PlayedModel, is_direct, model_on_tape
from memplan.step.no_grad_instants import forward_only_instants, places_beside
from memplan.step.offloaded_inputs import Waiting, waiting_inputs
from memplan.step.playing.peak_layers import Place, ends, last_places
from memplan.step.playing.section import SavedTensor
from memplan.step.regimes import setup_in
from memplan.step.states.model_states import ModelStates
from memplan.step.states.optimizer_scratch import clipping_bytes, emptied_names, step_temporaries
from memplan.step.step_inputs import StepInputs, buffers, retained_arguments, rows_to_come, tables_of_graph
from memplan.step.tapes.linear_forms import (
    ZERO,
    Form,
    Part,
    constant_form,
)
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Mode
from memplan.step.tower.tower_on_tape import returned_features
from memplan.step.units.collated_rows import joined_ids
from memplan.training.resolved import TrainingSetup

SavedByLayers = tuple[tuple[str, tuple[SavedTensor, ...]], ...]
"""For each run of layers, what one of them saves for backward."""

OnePass = Callable[[Form, Mode], Iterator[Instant]]
"""Yields the instants of one forward and backward, given what is there throughout and what becomes of gradients."""


@dataclass(frozen=True, slots=True)
class StepForms:
    """A training step in closed form."""

    candidates: tuple[Instant, ...]  # Instants of which one is the peak; forms without what is always there
    buffers: Form  # Rotary tables, token ids and targets
    layer_saved: SavedByLayers  # What one layer of each run saves for backward, tensor by tensor
    optimizer_formula: str  # How the optimizer's temporaries come about
    # Buffers of collectives that stay with a stream of their own and that, at the peak, the rest of the step may not be
    # able to use.
    stream_bytes: int = 0
    # Sizes of the tensors that hold a rank's gradients, where they are held unit by unit.
    unit_gradients: tuple[int, ...] = ()
    waiting: tuple[Waiting, ...] = ()  # Activations in host memory when forward has run
    left: Form = ZERO  # What names and the graph of a step hold while the loop evaluates


def step_on_tape(
    model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime
) -> tuple[StepInputs, ModelOnTape]:
    """Return what a training step depends on, and the model on tape.

    Raises:
        CannotAnswerError: A part of the model whose activations are not modelled.
    """
    refuse_unread_code(model, setup)
    setup = setup_in(setup, padded=regime.padded)
    optimizer = step_temporaries(setup, states.tensors)
    clipping = clipping_bytes(states.tensors)
    inputs = StepInputs(model.spec, setup, states, regime, states.gradient_bytes, optimizer, clipping)
    return inputs, model_on_tape(inputs)


def compile_step(inputs: StepInputs, taped: ModelOnTape, one_pass: OnePass | None = None) -> StepForms:
    """Return the closed forms of a training step, whose forwards and backward are as ``one_pass`` has them, if it is given."""
    names = logits_of_loop(inputs.setup, taped)
    left = names + retained_graph(inputs, taped)
    one_pass = one_pass or partial(_named_pass, inputs, taped, names)
    candidates = tuple(step_instants(inputs, taped, one_pass, left))
    return StepForms(
        candidates,
        buffers(inputs),
        saved_by_layers(taped),
        inputs.optimizer.formula,
        waiting=_waiting(inputs, taped),
        left=left if outlives(inputs.setup, step=False) else ZERO,
    )


def _waiting(inputs: StepInputs, taped: ModelOnTape) -> tuple[Waiting, ...]:
    """Return the activations that are in host memory when forward has run."""
    setup = inputs.setup
    if setup.config.offload.activations != "cpu":
        return ()
    sizes: dict[int, int] = {}
    for size in taped.staged_widths:
        sizes[size] = sizes.get(size, 0) + 1
    return waiting_inputs(inputs, taped.head, sizes, gathers=bool(taped.embedding.tape.nodes))


# -------------------------------------------------------------------- what lies around


def _enters_alone(inputs: StepInputs, taped: ModelOnTape) -> bool:
    """Tell whether no layer is like the first, which is given the embedding's output itself."""
    direct = is_direct(taped.embedding) and not inputs.spec.learned_positions
    direct = direct or inputs.spec.encoder is not None  # whose model names what its first layer is given
    return direct and taped.counts()[taped.kinds[0]] == 1


def saved_by_layers(taped: ModelOnTape) -> SavedByLayers:
    """Return, for each run of layers, the tensors that one of its layers saves."""
    if taped.compiled is not None:
        return tuple((f"{run.count} x layer {run.first + 1}", taped.compiled.saved_tensors) for run in taped.runs)
    return tuple(
        (f"{run.count} x layer {run.first + 1}", taped.layer_of(index).saved_tensors)
        for index, run in enumerate(taped.runs)
    )


# -------------------------------------------------------------------- instants
def step_instants(inputs: StepInputs, taped: ModelOnTape, one_pass: OnePass, left: Form = ZERO) -> Iterator[Instant]:
    """Yield the candidates for the peak.

    Args:
        one_pass: Yields those of one forward and backward.
        left: What names and the graph of the last forward hold from backward on, as long as they last.
    """
    config, mode = inputs.setup.config, _first_mode(inputs)
    filled_bytes = _filled_bytes(inputs) if inputs.setup.leaves_gradients else 0
    yield from one_pass(constant_form(Part.GRADIENTS, filled_bytes) - rows_to_come(inputs.setup), mode)
    if config.gradient_accumulation_steps > 1:
        for instant in one_pass(constant_form(Part.GRADIENTS, inputs.gradient_bytes), "again"):
            yield instant.around(ZERO, "second backward", f"{instant.operation} ({instant.name})")
    validated = logits_of_loop(inputs.setup, taped) if inputs.setup.profile.loss in IN_PIECES else ZERO
    for instant in after_backward(inputs, taped, filled_bytes, validated):
        named = outlives(inputs.setup, step=instant.name in ("gradient clipping", "optimizer step"))
        yield instant.around(left if named else ZERO)


def _first_mode(inputs: StepInputs) -> Mode:
    """Return what becomes of weight gradients in the first micro-step."""
    filled: Mode = "filled" if inputs.setup.leaves_gradients else "first"
    return "layer" if inputs.setup.config.gradients.lifetime == "layer" else filled


def loss_moments(inputs: StepInputs, taped: ModelOnTape) -> list[Instant]:
    """Return the moments of the loss's backward, which what layers save is beside; none where it runs over chunks, or inputs wait in host memory."""
    return [] if taped.head.chunk or any(taped.staged) else taped.head.section.played(_first_mode(inputs)).backward


def _filled_bytes(inputs: StepInputs) -> int:
    """Return the gradients that a step leaves, filled with zeros."""
    tensors = inputs.states.tensors
    emptied = emptied_names(inputs.setup, tensors)
    stored = (entry.gradient_bytes * entry.tensor.count for entry in tensors if entry.tensor.name in emptied)
    return inputs.gradient_bytes - sum(stored)


def _named_pass(inputs: StepInputs, taped: ModelOnTape, names: Form, base: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the instants of one forward and backward, with what the loop has ``names`` for: in forward, of the one before."""
    still = outlives(inputs.setup, step=mode == "again")
    graph = retained_graph(inputs, taped) if still else ZERO
    for instant in _one_pass(inputs, taped, base, mode, graph):
        yield instant.around(names if still or instant.name != "forward" else ZERO)


def _one_pass(inputs: StepInputs, taped: ModelOnTape, base: Form, mode: Mode, graph: Form) -> Iterator[Instant]:
    """Yield the instants of one forward and backward; ``base`` is there throughout, the last ``graph`` in forward."""
    played = taped.played(mode, inputs.recomputation)
    yield from forward_instants(inputs, taped, played, base + graph)
    yield from backward_instants(inputs, taped, played, base, mode)


def backward_instants(
    inputs: StepInputs, taped: ModelOnTape, played: PlayedModel, base: Form, mode: Mode
) -> Iterator[Instant]:
    """Yield the moments of backward; ``base`` is there throughout."""
    base, bare_base = backward_base(inputs, taped, base)
    passed = base - bare_base
    compared = ZERO if inputs.setup.compares_pairs else played.head.saved  # its loss is formed of the copy
    yield from copied_outputs(inputs, taped.head, base + played.saved + compared)
    base += root_form(inputs, taped.settings)
    stashed, behind = stashed_in_loss(inputs, taped)
    for instant in head_backward(inputs, taped.head, played.head, base + played.saved, mode):
        yield instant.around(ZERO if instant.operation in behind else stashed)
    places, formed = _places(taped, gradients_left(taped.head, mode) or taped.head.delayed_bytes, mode)
    waiting = waiting_form(inputs, taped, mode)
    bare = base + played.embedded - taped.saved_twice + left_stretch(inputs, taped) + waiting
    escaped = escaped_form(taped, played)

    def around_of(place: Place) -> Form:
        below = (played.layers[kind].saved * count for kind, count in place.below.items())
        gone = sum((played.layers[kind].escaped * count for kind, count in place.below.items()), ZERO)
        above = escaped - gone - played.layers[place.kind[0]].escaped
        gone = let_go(inputs, taped, place.layer) if place.tables else passed
        above += handed_back(taped.tower, place.layer) + taped.handed.waiting(place.layer)
        return sum(below, bare + above - gone + constant_form(Part.GRADIENTS, place.formed))

    for place in ends(places, around_of):
        around, name = around_of(place), f"layer {place.layer} backward"
        for moment in played.layers[place.kind[0]].backward:
            yield moment.around(around, name)
    around = bare_base + escaped + constant_form(Part.GRADIENTS, formed) + waiting
    around += root_form(inputs, taped.settings) + lingering_input(inputs, taped)
    if taped.tower is not None and played.tower is not None:
        for moment in played.tower.backward(around + played.embedding.saved):
            yield moment.around(ZERO, "end of backward")
        around += constant_form(Part.GRADIENTS, taped.tower.left(mode)) + taped.tower.leaf * 2
    yield from tied_sum(inputs, taped, around, mode)
    for moment in played.embedding.backward:
        yield moment.around(around, moment.name or taped.embedding.tape.nodes[-1].instant)
    yield from leaf_instants(inputs, taped, around)


def leaf_instants(inputs: StepInputs, taped: ModelOnTape, around: Form) -> Iterator[Instant]:
    """Yield the end of backward where the embedded tokens are a leaf, which is there beside its gradient."""
    if (leaf := embedded_leaf(inputs, taped)) is not ZERO:
        last = around + leaf * 2 - leaf_apart(inputs, taped)
        yield Instant("end of backward", "gradient of the embedded tokens", last)


def backward_base(inputs: StepInputs, taped: ModelOnTape, base: Form) -> tuple[Form, Form]:
    """Return what lies around backward, given what is there throughout: while layers run, and at its end."""
    base += leaf_apart(inputs, taped) + joined_ids(inputs.setup, forward=False)
    bare = base + called_again(inputs) + taped.handed.left
    return bare if taped.lowest_turned is None else base + passed_on(inputs) + taped.handed.given, bare


def forward_instants(inputs: StepInputs, taped: ModelOnTape, played: PlayedModel, base: Form) -> Iterator[Instant]:
    """Yield the moments of forward; ``base`` is there throughout."""
    base += joined_ids(inputs.setup, forward=True)
    yield from _forward(inputs, taped, played, base, leaf_apart(inputs, taped))


def _forward(
    inputs: StepInputs, taped: ModelOnTape, played: PlayedModel, around: Form, apart: Form
) -> Iterator[Instant]:
    """Yield the moments of forward: of the embedding, the last layer of each kind, and the head; ``around`` is there throughout.

    Args:
        apart: The embedding's output where it is a tensor apart.
    """
    arguments = layer_arguments(inputs.spec, inputs.setup, masked=inputs.regime.masked)
    arguments, named = arguments + other_features(inputs, taped.tower), named_embeddings(inputs, taped)
    around += (ahead := arguments + tables_of_graph(inputs))
    for moment in played.embedding.forward:
        yield moment.around(around, "forward")
    if (scratch := mask_scratch(inputs.spec, masked=inputs.regime.masked)) is not ZERO:
        scratch += played.embedded + played.carried + played.embedding.saved + named - ahead
        yield Instant("forward", "mask of windows", around + scratch)
    if played.tower is not None:
        for moment in played.tower.forward(around - ahead + played.embedding.saved + played.embedding.carried):
            yield moment.around(ZERO, "forward")
    around += apart + named + taped.handed.embedded
    left = {
        k: part.saved + part.carried + named_input(inputs, taped, k) + named_cache(taped, k)
        for k, part in enumerate(played.layers)
    }
    runs = [(kind, run.count) for kind, run in zip(taped.kinds, taped.runs, strict=True)]
    around += played.embedded + played.carried - taped.saved_twice
    yield from handed_instants(inputs, taped, left, around)
    places, around = last_places(runs, left, around)
    own, given = _enters_alone(inputs, taped), (named if taped.tower is not None else apart + named)
    for kind, below in places:
        entered = given if own and kind == taped.kinds[0] else ZERO  # what the first layer is given
        if taped.staged[kind]:
            entered -= stream_form(inputs) if inputs.setup.stack.checkpointing.offloads == "buffers" else ZERO
            last = [run for own, run in zip(taped.kinds, taped.runs, strict=True) if own == kind][-1]
            entered -= stashed_inputs(inputs, taped, last.first + last.count - 1)
        entered -= named_output(inputs, taped, kind) + returned_before(taped, kind)
        for moment in played.layers[kind].forward:
            yield moment.around(below - entered, "forward")
    cast = sum((played.layers[kind].carried * count for kind, count in taped.counts().items()), played.carried)
    pools = taped.settings.pooling is not None  # a call's arguments are named as long as it runs
    called = pools or is_embedded_ahead(inputs.spec, inputs.setup)
    around += retained_arguments(inputs) - forgotten_keys(taped) - arguments - (ZERO if called else named)
    around -= passed_on(inputs) + taped.handed.embedded if taped.lowest_turned is None else ZERO
    around += stashed_inputs(inputs, taped, len(taped.staged_widths))
    around += returned_features(inputs.setup, taped.tower, graph=True)
    yield from head_forward(inputs, taped.head, played.head, around, cast, named if pools else ZERO)
    yield from widened_outputs(inputs, taped, around + played.head.saved, cast)
    around -= named if called else ZERO
    yield from places_beside(inputs, taped, around - cast)
    yield from forward_only_instants(inputs, taped, around + played.head.saved - cast)


def _places(taped: ModelOnTape, formed: int, mode: Mode) -> tuple[list[Place], int]:
    """Return the last and the first layer of each run, in the order of backward, and all gradients formed in the end.

    Args:
        formed: Gradients that the head has left.
        mode: What becomes of weight gradients.
    """
    places: list[Place] = []
    below, lowest = taped.counts(), taped.lowest_turned
    for kind, run in zip(reversed(taped.kinds), reversed(taped.runs), strict=True):
        left = taped.layers[kind].left(mode)
        below[kind] -= run.count
        for position in dict.fromkeys((run.count, 1)):
            counts = {**below, kind: below[kind] + position - 1}
            above = formed + left * (run.count - position)
            tables = lowest is not None and run.first + position > lowest
            places.append(Place((kind, run.count, position), run.first + position, counts, above, tables))
        formed += left * run.count
    return places, formed
