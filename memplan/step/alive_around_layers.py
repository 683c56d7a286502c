"""What a loop, its graph, its model's names and a tower keep alive around the layers of a step."""

from collections.abc import Iterator, Mapping

from memplan.step.kernels.family_code import family_code
from memplan.step.kernels.image_rows import named_features
from memplan.step.kernels.layer_arguments import other_mask, other_tables, placed_mask, position_quantity
from memplan.step.losses.token_chunk_loss import left_by_stretch
from memplan.step.model_on_tape import ModelOnTape, PlayedModel, is_direct
from memplan.step.offloaded_inputs import STASH, behind_first, gone_in_loss, inputs_left, norm_nodes
from memplan.step.step_inputs import StepInputs, retained_arguments, tables_of_graph
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tower.tower_on_tape import TowerOnTape, returned_features
from memplan.training.resolved import TrainingSetup


def logits_of_loop(setup: TrainingSetup, taped: ModelOnTape) -> Form:
    """Return what a loop's own names keep alive from one forward on, as long as they last: logits, where it says so."""
    logits = taped.head.logits
    if "logits" not in setup.stack.loop.holds or logits is None:
        return ZERO
    own = single_form(Part.LOGITS, logits.quantity, logits.coefficient)
    return own + returned_features(setup, taped.tower, graph=True)


def outlives(setup: TrainingSetup, *, step: bool) -> bool:
    """Tell whether names of a forward's outputs are there behind its backward: within the ``step``, or in the next one's forward."""
    until = setup.stack.loop.until
    return until == "next" or (step and until == "step")


def embedded_leaf(inputs: StepInputs, taped: ModelOnTape) -> Form:
    """Return what the first layer is given that a gradient comes to where what is below is frozen, or nothing: a leaf, which its gradient stays with.

    Source:
        ``enable_input_require_grads`` in transformers/modeling_utils.py (5.23.0).
    """
    if taped.leaf is None:
        return ZERO
    return embedded_form(inputs)


FIRST_RESULT = 1
"""Storage of an embedding's rows on its tape, behind the numbers of tokens."""


def embedded_form(inputs: StepInputs) -> Form:
    """Return embedded tokens."""
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, inputs.spec.hidden_size * inputs.setup.embedded_bytes)


def stream_form(inputs: StepInputs) -> Form:
    """Return the residual stream between two layers."""
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, inputs.spec.hidden_size * inputs.setup.residual_bytes)


def stashed_inputs(inputs: StepInputs, taped: ModelOnTape, before: int) -> Form:
    """Return inputs of layers that hooks still keep on the device, which they have copied into host memory.

    Args:
        before: Layers that have run before the one that runs; all of them where the head runs.
    """
    if not _is_hooked(inputs, taped):
        return ZERO
    widths = taped.staged_widths
    count = inputs_left(inputs, taped.head, before) if before == len(widths) else STASH - 1
    named = (
        taped.leaf is not None or named_embeddings(inputs, taped) is not ZERO
    )  # the first one, which is there anyway
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, sum(widths[max(int(named), before - count) : before]))


def stashed_in_loss(inputs: StepInputs, taped: ModelOnTape) -> tuple[Form, set[str]]:
    """Return what hooks keep on the device as the loss runs backward, less what they do not, and the norm's nodes that run behind that."""
    if not _is_hooked(inputs, taped):
        return ZERO, set()
    if inputs.setup.stack.checkpointing.offloads == "hooks":
        return stashed_inputs(inputs, taped, len(taped.staged_widths)), behind_first(taped.head)
    norm = {node.name for node in norm_nodes(taped.head)}
    return ZERO - gone_in_loss(inputs, taped.head), {*behind_first(taped.head), *norm}


def _is_hooked(inputs: StepInputs, taped: ModelOnTape) -> bool:
    """Tell whether hooks copy inputs of layers into host memory."""
    return any(taped.staged) and inputs.setup.stack.checkpointing.hooked


def lingering_input(inputs: StepInputs, taped: ModelOnTape) -> Form:
    """Return the first layer's input where hooks that have copied it back keep it to the end of backward."""
    first = taped.layer_of(0)
    hooked = first.tape.lingers is not None and first.entry.storage not in first.tape.saved_storages()
    return stream_form(inputs) if hooked else ZERO


def saves_leaf(inputs: StepInputs, taped: ModelOnTape) -> bool:
    """Tell whether the layer that is given a leaf saves it, and that is the embedding's output, or a layer's, itself."""
    first = taped.layer_of(taped.leaf or 0)
    saved = any(first.entry.storage in node.retained for node in first.tape.nodes)
    if inputs.spec.embedding_norm is not None and FIRST_RESULT in taped.embedding.tape.saved_storages():
        return True
    direct = is_direct(taped.embedding) and not taped.scattered
    if taped.staged[taped.kinds[taped.leaf or 0]]:
        return False
    return direct and (inputs.setup.checkpointing != "none" or saved)


def named_embeddings(inputs: StepInputs, taped: ModelOnTape) -> Form:
    """Return what a model has names for until its layers have run: embeddings, where nothing else keeps them."""
    spec, setup = inputs.spec, inputs.setup
    first = taped.layer_of(0)
    saved = any(first.entry.storage in node.retained for node in first.tape.nodes)
    if spec.encoder is not None:  # ``embedding_output`` of ``BertModel``, ``mask_kwargs`` of ``ModernBertModel``
        return ZERO if saved or (taped.again[taped.kinds[0]] and first.tape.nodes) else stream_form(inputs)
    if not family_code(setup.stack, spec.architecture).forms_tables:
        return ZERO
    if (setup.has_value_head or setup.names_hidden) and not spec.learned_positions:
        return ZERO  # named with all that layers are given
    own = taped.embedding.tape.saved_storages()
    if (spec.embedding_norm is not None and FIRST_RESULT in own) or taped.embedding.output.storage in own:
        return ZERO
    apart = _is_apart(inputs, taped)
    staged = taped.staged[taped.kinds[0]]
    if taped.again[taped.kinds[0]] and first.tape.nodes and not apart and not staged:
        return ZERO
    row = spec.hidden_size * setup.embedded_bytes
    leaf = taped.leaf == 0 and not taped.scattered  # counted already
    tokens = ZERO if leaf else single_form(Part.ACTIVATIONS, Quantity.TOKENS, row)
    if spec.learned_positions:
        code = family_code(setup.stack, spec.architecture)
        return tokens + single_form(Part.ACTIVATIONS, position_quantity(code), row)
    if apart:
        return tokens
    return ZERO if saved and not staged else tokens


def enters_directly(inputs: StepInputs, taped: ModelOnTape) -> bool:
    """Tell whether the first layer is given the embedding's output itself, to which nothing is done before."""
    looked_up = all(node.name == "embedding" for node in taped.embedding.tape.nodes)
    return looked_up and not inputs.spec.learned_positions


def names_given(inputs: StepInputs, taped: ModelOnTape) -> bool:
    """Tell whether what the first layer is given is what a model has a name for until its layers have run, and nothing else keeps."""
    return not _is_apart(inputs, taped) and named_embeddings(inputs, taped) is not ZERO


def _is_apart(inputs: StepInputs, taped: ModelOnTape) -> bool:
    """Tell whether the first layer is given something else than the embeddings that the model has a name for.

    Source:
        ``GemmaModel.forward`` in transformers/models/gemma/modeling_gemma.py (4.44.2), line 856: a product with another name;
        ``GraniteModel.forward`` in models/granite/modeling_granite.py (5.24.0), line 388, below ``LlavaNextModel.forward``.
    """
    spec, stack = inputs.spec, inputs.setup.stack
    below = spec.tower is not None and spec.embedding_scale and family_code(stack, spec.architecture).scales_embedded
    scaled = bool(below) or spec.architecture in stack.models.scales_embedded
    return bool(spec.embedding_norm or spec.learned_positions or taped.settings.embedding_dropout) or scaled


def named_input(inputs: StepInputs, taped: ModelOnTape, kind: int) -> Form:
    """Return what a layer of a kind is given, where its loop asks for all hidden states, which stay until forward ends, and nothing saves it.

    Source:
        ``output_capturing_hook`` in transformers/utils/output_capturing.py (5.23.0); ``forward`` in
        trl/models/modeling_value_head.py (0.24.0).
    """
    layer = taped.layers[kind]
    returned = inputs.setup.has_value_head or (inputs.setup.names_hidden and not layer.tape.cache_stays)
    if not returned or (taped.again[kind] and layer.tape.nodes):
        return ZERO
    saved = any(layer.entry.storage in node.retained for node in layer.tape.nodes)
    return ZERO if saved else stream_form(inputs)


def named_cache(taped: ModelOnTape, kind: int) -> Form:
    """Return keys and values of a layer of a kind that the model returns, and nothing else keeps until its loss is formed."""
    tape = taped.layers[kind].tape
    unsaved = set() if tape.cache_stays else tape.cached - tape.saved_storages().keys()
    return sum((single_form(*tape.storages[storage]) for storage in unsaved), stored_keys(taped, kind))


def stored_keys(taped: ModelOnTape, kind: int) -> Form:
    """Return keys and values of a layer of a kind that stay for later ones, and that its own attention has not saved."""
    tape = taped.layers[kind].tape
    saved = () if taped.handed.keeps else tape.saved_storages()
    unsaved = [x for x in tape.stored if x.storage not in saved]
    return sum((single_form(Part.ACTIVATIONS, x.quantity, x.coefficient) for x in unsaved), ZERO)


def all_stored_keys(taped: ModelOnTape) -> Form:
    """Return those of all layers."""
    return sum((stored_keys(taped, kind) * count for kind, count in taped.counts().items()), ZERO)


def forgotten_keys(taped: ModelOnTape) -> Form:
    """Return those of all layers where nothing has them when these have run."""
    return ZERO if taped.handed.keeps else all_stored_keys(taped)


def returned_before(taped: ModelOnTape, kind: int, *, graph: bool = True) -> Form:
    """Return what the layer before one of a kind has returned besides its output, which the loop over layers still has a name for.

    Args:
        graph: Whether backward will run, for which a layer that is not checkpointed saves it, or a narrower copy.

    Source:
        ``outputs = block(...)`` in ``FalconModel.forward`` (transformers 5.23.0).
    """
    tape = taped.layers[kind].tape
    if tape.returned is None or sum(taped.counts().values()) == 1:
        return ZERO
    if graph and not taped.again[kind] and tape.returned.storage in tape.saved_storages():
        return ZERO
    return single_form(Part.TEMPORARIES, tape.returned.quantity, tape.returned.coefficient)


def retained_graph(inputs: StepInputs, taped: ModelOnTape) -> Form:
    """Return what the graph of a loss has that a loop still holds after backward: a leaf with its gradient, and arguments."""
    if inputs.setup.stack.loop.holds:
        return graph_of_loss(inputs, taped)
    return (
        embedded_leaf(inputs, taped) * 2 if _is_hooked(inputs, taped) else ZERO
    )  # of the node that asked for a tensor last


def graph_of_loss(inputs: StepInputs, taped: ModelOnTape) -> Form:
    """Return what the graph of a loss has after backward: a leaf with its gradient, and arguments."""
    leaves, setup, tower = embedded_leaf(inputs, taped) * 2, inputs.setup, taped.tower
    if tower is not None:
        leaves += tower.leaf * 2 + (tower.tables if tower.again and _is_reentrant(setup) else ZERO)
    if setup.stack.loop.holds:  # what a graph had of the tower is the outputs' alone then
        leaves += returned_features(setup, tower, graph=False) - returned_features(setup, tower, graph=True)
    leaves += called_again(inputs) + taped.handed.left + (taped.handed.left_behind if taped.leaf is None else ZERO)
    return leaves + escaped_form(taped, taped.played("first", inputs.recomputation)) + left_stretch(inputs, taped)


def left_stretch(inputs: StepInputs, taped: ModelOnTape) -> Form:
    """Return what the graph of a stretch without labels has saved, to which backward never comes."""
    if not inputs.regime.empty_stretch:
        return ZERO
    tape = taped.head.section.tape
    return sum((single_form(*tape.storages[storage]) for storage in left_by_stretch(tape)), ZERO)


def escaped_form(taped: ModelOnTape, played: PlayedModel) -> Form:
    """Return what the nodes of all layers and of the head hold until the graph goes."""
    return sum((played.layers[kind].escaped * count for kind, count in taped.counts().items()), played.head.escaped)


def called_again(inputs: StepInputs) -> Form:
    """Return what nodes of reentrant checkpointing keep as long as there is a graph."""
    if not _is_reentrant(inputs.setup) or (inputs.spec.encoder is not None and inputs.spec.learned_positions):
        return ZERO  # layers of the latter are given a mask alone, by its place
    # Tensors among a layer's own arguments go with its node; what is bound to the function, or in a tuple, does not
    # (``CheckpointFunction`` in torch/utils/checkpoint.py, v2.13.0).
    if inputs.setup.stack.checkpointing.calls_units:
        return tables_of_graph(inputs, behind=True)
    return passed_on(inputs) - placed_mask(inputs.spec, inputs.setup)


def _is_reentrant(setup: TrainingSetup) -> bool:
    return setup.stack.checkpointing.reentrant and setup.checkpointing != "none"


def leaf_apart(inputs: StepInputs, taped: ModelOnTape) -> Form:
    """Return the embedded tokens where they are a leaf, and no layer saves them."""
    return ZERO if saves_leaf(inputs, taped) else embedded_leaf(inputs, taped)


def passed_on(inputs: StepInputs) -> Form:
    """Return what layers have been called with that the graph of the loss has, as long as one of them needs it."""
    return retained_arguments(inputs) + tables_of_graph(inputs, behind=True)


def let_go(inputs: StepInputs, taped: ModelOnTape, layer: int) -> Form:
    """Return what of :func:`passed_on` is gone in the backward of a layer, as only others above were called with it.

    Reentrant checkpointing does not let go of what it has called again.
    """
    spec, setup = inputs.spec, inputs.setup
    if _is_reentrant(setup):
        return ZERO
    tables, masked = tables_of_graph(inputs, behind=True), inputs.regime.masked
    # which keys computed again have turned by
    stay = tables is ZERO or taped.lowest_turned is None or bool(taped.handed.graphs and taped.handed.keeps)
    gone = ZERO if stay else other_tables(spec, setup, layer, wide=inputs.regime.wide_tables)
    return gone if setup.checkpointing == "none" else gone + other_mask(spec, setup, layer, masked=masked)


def handed_back(tower: TowerOnTape | None, layer: int) -> Form:
    """Return the gradients of what blocks of a tower have handed on to this layer, by number from 1, and to those above it."""
    if tower is None or tower.deep is None or not tower.deep.output.needs_gradient:
        return ZERO
    return tower.handed * max(0, len(tower.deep_runs) - layer + 1)


def other_features(inputs: StepInputs, tower: TowerOnTape | None) -> Form:
    """Return by how much what a model has names for of images differs from what the dtypes of its weights tell: norms and adapters in
    fp32 widen a stream, and where the projector saves what the blocks return it is counted there.
    """
    if tower is None or tower.settings.ahead or tower.settings.shape.kind == "pooled":
        return ZERO
    tape, entry = tower.closing.tape, tower.closing.entry
    joined = next(tape.storages[own][2] for item in tape.operations if item.name == "cat" for own in item.makes)
    deep = 0 if tower.deep is None else 2 * len(tower.deep_runs) * tower.deep.output.coefficient
    features = joined + tower.settings.shape.output_size * inputs.setup.residual_bytes + deep
    last = 0 if entry.storage in tape.saved_storages() else entry.coefficient
    told = single_form(Part.ACTIVATIONS, Quantity.PATCHES, last)
    told += single_form(Part.ACTIVATIONS, Quantity.IMAGE_TOKENS, features)
    return told - named_features(inputs.spec, inputs.setup)


def named_output(inputs: StepInputs, taped: ModelOnTape, kind: int) -> Form:
    """Return what the layer before the last of a kind has returned, which keeps its name where images were added to a copy of it."""
    last = max(run.first + run.count - 1 for own, run in zip(taped.kinds, taped.runs, strict=True) if own == kind)
    copied = taped.tower is not None and _copies(inputs) and 0 < last <= len(taped.tower.deep_runs)
    return stream_form(inputs) if copied else ZERO


def _copies(inputs: StepInputs) -> bool:
    """Tell whether images are added to a copy: not so where ms-swift has put a function of its own there."""
    # Source: ``_patch_deepstack_process`` in swift/model/models/qwen.py (ms-swift 4.6.0).
    return inputs.setup.stack.images != "embedded"


def handed_instants(
    inputs: StepInputs, taped: ModelOnTape, left: Mapping[int, Form], around: Form
) -> Iterator[Instant]:
    """Yield the moment at which the last of what is handed on is added: to the rows that a mask chooses of a copy.

    Args:
        left: What a layer of each kind leaves.
        around: What is there before the first layer.
    """
    tower = taped.tower
    if tower is None or tower.deep is None:
        return
    reached = len(tower.deep_runs)
    for kind, run in zip(taped.kinds, taped.runs, strict=True):
        around += left[kind] * max(0, min(run.count, reached - run.first))
    width, own = inputs.spec.hidden_size * inputs.setup.residual_bytes, tower.deep.output.coefficient
    rows = 2 * width + (width if own != width else 0)  # those chosen, the sum, and what is handed on where it is cast
    chosen = single_form(Part.TEMPORARIES, Quantity.IMAGE_TOKENS, rows)
    yield Instant(
        "forward",
        "add what a block of the tower has handed on",
        around + stream_form(inputs) * (1 + _copies(inputs)) + chosen,
    )
