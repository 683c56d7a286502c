"""The instants around a model's head and loss, of a tied table's gradient, and those behind backward."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memplan.model.spec import Attention
from memplan.step.blocks.block_settings import Regime
from memplan.step.chunks_at_once import chunked_logits_backward, chunked_logits_forward, chunks_at_once
from memplan.step.ends.end_settings import EndSettings
from memplan.step.ends.head_on_tape import FUSED_LOSSES, Head
from memplan.step.losses.fused_linear_loss import PLACE_BYTES
from memplan.step.losses.token_chunk_loss import TOKEN_CHUNKS
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import evaluation, generation
from memplan.step.playing.recomputation import Recomputation
from memplan.step.playing.section import Section
from memplan.step.states.optimizer_scratch import average_bytes
from memplan.step.states.parallel_shards import looks_for_unused_parameters
from memplan.step.step_inputs import LOSS_SCALE_BYTES, StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import BEHIND_REGION, POOLED, Instant, Played
from memplan.step.tapes.taped_operations import Mode, Value, Weight
from memplan.step.tower.tower_on_tape import returned_features


def after_backward(
    inputs: StepInputs, taped: ModelOnTape, filled_bytes: int, validated: Form = ZERO
) -> Iterator[Instant]:
    """Yield the instants from the end of backward to the next forward.

    Args:
        filled_bytes: Gradients that the step leaves, filled with zeros.
        validated: Logits that a loop of evaluation still has a name for.
    """
    config, tensors = inputs.setup.config, inputs.states.tensors
    gradients = constant_form(Part.GRADIENTS, 0 if config.gradients.lifetime == "layer" else inputs.gradient_bytes)
    if config.gradients.lifetime == "step":
        scaling = LOSS_SCALE_BYTES if inputs.setup.scales_loss else 0
        gone = inputs.optimizer.used_up if inputs.optimizer.bytes > scaling else 0
        update = constant_form(Part.TEMPORARIES, max(inputs.optimizer.bytes, scaling) + gone)
        yield Instant("optimizer step", "update", gradients + update - constant_form(Part.GRADIENTS, gone))
    if config.clip_gradients:
        scratch = constant_form(Part.TEMPORARIES, inputs.clipping_bytes)
        yield Instant("gradient clipping", "norms", gradients + scratch)
    filled = constant_form(Part.GRADIENTS, filled_bytes)
    if config.weight_average != "none" and config.gradients.lifetime == "step":
        scratch = constant_form(Part.TEMPORARIES, average_bytes(inputs.setup, tensors))
        yield Instant("optimizer step", "moving average", filled + scratch)
    if inputs.setup.answer_length:
        yield from generation(inputs, taped, filled)
    if config.evaluation:
        yield from evaluation(inputs, taped, filled + validated)
    if config.save_checkpoint:
        yield Instant("checkpoint saving", "state_dict", filled)


TIED_SUM = "sum of the tied gradients"
"""Operation that adds up the gradients of a tied embedding and head where neither is written over."""

AGAIN = Recomputation("full")
"""How a chunk of a loss over chunks runs: again in backward."""


def root_form(inputs: StepInputs, settings: EndSettings) -> Form:
    """Return the loss and the gradients that backward starts from, and what the loss's graph keeps as long as there is one.

    Scaling forms an fp32 loss besides; the node of cut cross-entropy has the places of labels among its attributes.
    """
    setup, loss = inputs.setup, settings.loss_bytes
    several = setup.config.gradient_accumulation_steps > 1
    size = loss + 8 + (4 if several else 0) if setup.scales_loss else loss * (3 if several else 2)
    places = PLACE_BYTES if settings.loss == "cut-cross-entropy" else 0
    retained = single_form(Part.TEMPORARIES, Quantity.PREDICTED_TOKENS, places)
    return constant_form(Part.ACTIVATIONS, loss) + constant_form(Part.TEMPORARIES, size - loss) + retained


def gradients_left(head: Head, mode: Mode) -> int:
    """Return the gradients that head and final norm leave."""
    return head.section.left(mode) + chunked_weights_left(head, mode)


def chunked_weights_left(head: Head, mode: Mode) -> int:
    """Return the gradients that a head leaves whose loss is over chunks, those of its adapter with them."""
    if head.chunk is None:
        return 0
    named = {weight.name: replace(weight, summed=False) for node in head.chunk.tape.nodes for weight in node.weights}
    named |= {weight.name: weight for weight in head.weights}
    weights = [weight for weight in named.values() if weight.trainable and weight.own_mode(mode) == "first"]
    return sum(weight.gradient_bytes for weight in weights)


def tied_sum(inputs: StepInputs, taped: ModelOnTape, around: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the moments at which the gradients of a tied embedding and head are added up and used.

    The head's stands by until the embedding's is there, and their sum is a third tensor, unless
    the head's has been formed by a cast or a sum and nobody else refers to it. The sum is then
    stored like any gradient.
    """
    weight = taped.weight(inputs.spec.names.embedding)
    assert weight is not None
    if not taped.settings.ties_gradients or not weight.trainable or weight.coded:
        return
    beside = (w for node in taped.embedding.tape.nodes for w in node.weights if w.trainable and w.name != weight.name)
    others = sum(w.gradient_bytes for w in beside if w.own_mode(mode) == "first")
    mode = weight.own_mode(mode) if mode == "filled" else mode
    summed, retained = weight.formed_bytes, weight.stays(mode)
    around += constant_form(Part.GRADIENTS, others)
    if not joined_in_place(inputs.regime, taped.head, taped.settings):
        both = constant_form(Part.TEMPORARIES, summed) + constant_form(
            Part.GRADIENTS if retained else Part.TEMPORARIES, summed
        )
        yield Instant("end of backward", TIED_SUM, around + both)
    if weight.storing_bytes(mode):
        around -= waiting_form(inputs, taped, mode) if retained else ZERO
        yield Instant("end of backward", f"{weight.name} gradient", around + weight.storing_form(mode))


def waiting_form(inputs: StepInputs, taped: ModelOnTape, mode: Mode) -> Form:
    """Return what makes the gradient of a tied head a temporary while it waits, where it is not the one that is stored."""
    if not (waiting := taped.head.delayed_bytes):
        return ZERO
    weight, joined = taped.head.weights[0], joined_in_place(inputs.regime, taped.head, taped.settings)
    if joined and weight.stays_summed(weight.own_mode(mode)):
        return ZERO
    return constant_form(Part.TEMPORARIES, waiting) - constant_form(Part.GRADIENTS, waiting)


def joined_in_place(regime: Regime, head: Head, settings: EndSettings) -> bool:
    """Tell whether a tied head's gradient is a tensor of its own, to which the embedding's is added where it is."""
    weight, loss = head.weights[0], settings.loss
    if loss in TOKEN_CHUNKS and regime.one_chunk:  # that of a head that is not copied first is its transpose's, turned
        return weight.element_bytes != (4 if loss == "token-chunks-fp32" else head.normed.element_bytes)
    chunked = head.chunk is not None and not regime.one_chunk
    return weight.converted or chunked or loss in FUSED_LOSSES


def head_forward(
    inputs: StepInputs, head: Head, played: Played, around: Form, cast: Form, named: Form = ZERO
) -> Iterator[Instant]:
    """Yield the moments of forward from the final norm on.

    Args:
        around: What the layers have left.
        cast: What of it autocast has.
        named: What of it a model without a head has names for until that norm is done.
    """
    for moment in played.forward:
        if moment.name == POOLED:
            yield moment.around(around - named, "forward")
            continue
        yield moment.around(around - cast if moment.name == BEHIND_REGION else around, "forward")
    if head.chunk is None or inputs.setup.profile.loss == "chunked-backward":
        return
    if inputs.setup.profile.loss == "chunked-logits":
        yield from chunked_logits_forward(inputs, head, around + played.saved + played.carried, head.chunk)
        return
    losses = constant_form(Part.LOGITS, 4 * (inputs.setup.profile.loss_chunks - 1))
    around += named_rows(head) + played.saved + played.carried + losses
    for moment in head.chunk.played("first", AGAIN).forward:
        yield moment.around(around, "forward", f"{moment.operation} of a chunk")


def named_rows(head: Head) -> Form:
    """Return what the final norm is given and gives, where the norm saves neither: both have a name while the head runs."""
    named = {value.storage: value for value in (head.section.entry, head.normed)}
    saved = {storage for node in head.section.tape.nodes for storage in node.saved}
    return sum((_size(Part.ACTIVATIONS, value) for storage, value in named.items() if storage not in saved), ZERO)


def widened_outputs(inputs: StepInputs, taped: ModelOnTape, around: Form, cast: Form) -> Iterator[Instant]:
    """Yield the moment at which accelerate makes fp32 copies of what a model returns: of routers' logits, beside their shares, of a cache, or of images.

    Args:
        around: What is there then, with what all parts have saved.
        cast: Copies of weights that autocast has let go of by then.

    Source:
        ``ConvertOutputsToFp32`` in accelerate/utils/operations.py (1.15.0), which looks into tuples; ``softmax`` under autocast is in
        fp32, as wide as these.
    """
    logits, counts = taped.head.logits, taped.counts()
    # where the loss has formed no fp32 copy of them, which would be as large
    narrow = taped.settings.narrow_loss and inputs.setup.stack.autocast == "always"
    wide = [form * (8 // inputs.setup.compute_bytes * counts[kind]) for kind, form in taped.balanced.items()]
    caches = ((kind, _wide_cache(inputs, section)) for kind, section in enumerate(taped.layers))
    wide += [form * counts[kind] for kind, form in caches if form is not ZERO]
    features = returned_features(inputs.setup, taped.tower, graph=False, widened=True)
    wide += [features] if features is not ZERO and inputs.setup.stack.autocast == "always" else []
    if logits is None or not inputs.setup.autocast or not (wide or narrow):
        return
    copied = 0 if inputs.setup.stack.loop.logits == "fp32" and not narrow else 4 * logits.width
    both = single_form(Part.LOGITS, logits.quantity, logits.coefficient + copied) - (cast if narrow else ZERO)
    yield Instant("forward", "fp32 copies of what the model returns", sum(wide, around + both))


def _wide_cache(inputs: StepInputs, section: Section) -> Form:
    """Return fp32 copies of a layer's keys and values in 16 bits, where the model returns them in tuples."""
    spec, stack = inputs.spec, inputs.setup.stack
    part = spec.runs[0].layer.attention
    if (
        spec.architecture not in stack.models.tuple_caches
        or stack.autocast != "always"
        or not isinstance(part, Attention)
    ):
        return ZERO
    width = inputs.setup.compute_bytes
    narrow, fused = part.key_value_size * width, (part.query_size + 2 * part.key_value_size) * width
    returned = (section.tape.storages[storage] for storage in section.tape.cached)
    # A slice of one projection is copied alone.
    copied = (single_form(own, quantity, 2 * narrow) for own, quantity, size in returned if size in (narrow, fused))
    return sum(copied, ZERO)


def copied_outputs(inputs: StepInputs, head: Head, around: Form) -> Iterator[Instant]:
    """Yield the moment at which replicas that look for unused parameters copy what the model returns: loss and logits.

    Accelerate has cast logits to fp32 before, where the model ran under autocast.

    Args:
        around: What is there then, with what all parts have saved.

    Source:
        ``_DDPSink`` in torch/nn/parallel/distributed.py (v2.13.0); ``ConvertOutputsToFp32`` in
        accelerate/utils/operations.py (1.15.0).
    """
    setup, logits = inputs.setup, head.logits
    config = setup.config
    if config.parallel.data == 1 or not looks_for_unused_parameters(setup):
        return
    form = around + constant_form(Part.LOGITS, 0 if setup.compares_pairs else 8)
    if logits is not None:
        width = 4 if setup.autocast else logits.element_bytes
        form += single_form(Part.LOGITS, logits.quantity, 2 * width * logits.width)
    yield Instant("forward", "copy of the outputs", form)


def _size(part: Part, value: Value) -> Form:
    """Return the bytes of a tensor, as a part of the sum."""
    return single_form(part, value.quantity, value.coefficient)


def head_backward(inputs: StepInputs, head: Head, played: Played, around: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the moments of backward from the loss to the last layer's result."""
    if head.chunk is not None and inputs.setup.profile.loss == "chunked-backward":
        yield from chunks_at_once(inputs, head, head.chunk, around + played.saved, mode)
        left = constant_form(Part.GRADIENTS, chunked_weights_left(head, mode))
        for instant in played.backward:
            yield instant.around(around + left, "head backward")
        return
    if head.chunk is not None and inputs.setup.profile.loss == "chunked-logits":
        yield from chunked_logits_backward(inputs, head, around + played.saved, head.chunk)
        yield from _norm_backward(head, played, around + constant_form(Part.TEMPORARIES, 4), mode)
        return
    if head.chunk is not None:
        yield from _chunks_backward(inputs, head, head.chunk, around + played.saved, mode)
        yield from _norm_backward(head, played, around + constant_form(Part.TEMPORARIES, 4), mode)
        return
    for instant in played.backward:
        yield instant.around(around, instant.name or "loss backward")


def _chunks_backward(inputs: StepInputs, head: Head, chunk: Section, around: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the instants of a loss over chunks, each of which runs again in backward."""
    several = not inputs.regime.one_chunk
    output = head.section.output
    rows, parts = _size(Part.ACTIVATIONS, output), _size(Part.TEMPORARIES, output)
    rows_of_chunk = single_form(Part.TEMPORARIES, Quantity.CHUNK, chunk.entry.coefficient)
    # Where autocast casts the rows, their gradient is cast back when the head's is added, and stored.
    wide, width = chunk.entry.element_bytes, inputs.setup.compute_bytes if inputs.setup.autocast else 4
    uncast = single_form(Part.TEMPORARIES, Quantity.CHUNK, chunk.entry.width * max(0, wide - width))
    trained = [w for node in chunk.tape.nodes for w in node.weights if w.trainable]
    plain = sum(w.formed_bytes for w in trained if not w.coded)
    # Gradients of codes are added in their store, which a second micro-step finds filled.
    stored = sum(w.gradient_bytes for w in trained if w.coded and w.own_mode(mode) == "first")
    floats = [weight for weight in head.weights if weight.trainable and not weight.coded]
    # A copy's sum is cast when it is whole, whatever waits then.
    retained = all(not weight.converted and weight.stays_summed(weight.own_mode(mode)) for weight in floats)
    sums_in = Part.GRADIENTS if retained else Part.TEMPORARIES
    codes = constant_form(Part.GRADIENTS, stored)
    summed = constant_form(sums_in, plain) + codes
    # Of two chunks there is no sum before both are done.
    before = constant_form(Part.TEMPORARIES, plain) + codes if inputs.setup.profile.loss_chunks == 2 else summed
    # The gradient of the last chunk's rows is formed in its own backward, which has used up the gradient of the
    # sum of losses, one fp32 number.
    others = (before if several else ZERO) + parts - rows_of_chunk
    inside: Mode = "again" if several and mode != "layer" else mode
    frozen_codes = head.weights[0].coded and not head.weights[0].trainable
    for instant in chunk.played(inside, AGAIN).backward:
        name, operation = instant.name or "loss backward", f"{instant.operation} of a chunk"
        if name == "head backward" and (frozen_codes or instant.operation == "cast"):
            # The product saves nothing, or is done: the last chunk has let the rows go before.
            yield instant.around(around + others, name, operation)
            if several:
                yield instant.around(around + rows + others - rows_of_chunk, name, operation)
        else:
            yield instant.around(around + rows + others, name, operation)
    around += constant_form(Part.TEMPORARIES, 4)
    if several and plain:  # those of codes are part of the chunk's own instants
        both = constant_form(Part.TEMPORARIES, 2 * max(w.formed_bytes for w in trained if not w.coded))
        first = ZERO if inputs.setup.profile.loss_chunks == 2 else rows  # both chunks are done, and the rows are gone
        form = around + first + summed + both + rows_of_chunk * 2 - uncast
        yield Instant("head backward", "sum of two chunks' head gradients", form)
    yield from _sums_stored(floats, around + parts - uncast, summed, sums_in, mode)


def _sums_stored(weights: Sequence[Weight], around: Form, summed: Form, sums_in: Part, mode: Mode) -> Iterator[Instant]:
    """Yield the moments at which sums of the chunks' gradients are stored, each of which then goes from its part.

    A bias is done first: it is stored, or stepped and gone, as the matrix is stored.
    """
    for weight in reversed(weights):
        own: Mode = "first" if weight.delayed else mode
        if weight.storing_bytes(own):
            form = around + summed + weight.storing_form(own)
            yield Instant("head backward", f"{weight.name} gradient", form)
        left = weight.gradient_bytes if weight.own_mode(mode) == "first" else 0
        summed += constant_form(Part.GRADIENTS, left) - constant_form(sums_in, weight.formed_bytes)


def _norm_backward(head: Head, played: Played, around: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the backward of the final norm, behind a loss over chunks."""
    left = constant_form(Part.GRADIENTS, chunked_weights_left(head, mode) or head.delayed_bytes)
    parts = _size(Part.TEMPORARIES, head.section.output)
    for instant in played.backward:
        # The gradients of the chunks' rows are joined into one, and let go.
        joined = parts if instant.operation == "start" else ZERO
        yield instant.around(around + left + joined, "head backward")
