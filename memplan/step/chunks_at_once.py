"""Losses over chunks of tokens that are not computed again: run backward at once, or cast to fp32 chunk by chunk.

At once: each chunk runs backward as far as the head's input before the next is formed. The gradient of that input is
gathered in fp32 for all tokens, then cast; the rest of the model runs backward from it. Chunk by chunk: logits of all
chunks are there, and so are the fp32 results of all.

Source:
    ``ChunkedLossWrapper`` and ``GradAccumulator`` in torchtitan/components/loss.py (0.3.0);
    ``CEWithChunkedOutputLoss`` in torchtune/modules/loss/ce_chunked_output_loss.py (0.6.1).
"""

from collections.abc import Iterator

from memplan.step.ends.head_on_tape import Head
from memplan.step.playing.section import Section
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import Instant
from memplan.step.tapes.taped_operations import Mode

LABEL_BYTES = 16
"""A token's label and its position, which the loss is given beside the hidden states."""


def chunks_at_once(
    inputs: StepInputs, head: Head, chunk: Section, around: Form, mode: Mode, summed: int | None = None
) -> Iterator[Instant]:
    """Yield the moments of a loss over chunks, from the first chunk's logits to the gradient of the head's input.

    Args:
        summed: Bytes of a sum that is not what is kept, to which those of each chunk are added; None for none.
    """
    around += throughout(inputs, head)
    logits = logits_of_chunk(chunk)
    several = inputs.setup.profile.loss_chunks > 1
    stored = chunk.left(mode) if summed is None else summed
    later = around + constant_form(Part.GRADIENTS, stored if several else 0)
    later_mode = mode if summed is not None else ("layer" if mode == "layer" else "again")
    for moment in chunk.played(mode).forward:
        yield moment.around(later, "forward", f"{moment.operation} of a chunk")
    yield Instant("forward", "head of a chunk", later + logits * (2 if several else 1))
    for base, own_mode in ((around, mode), (later, later_mode)) if several else ((around, mode),):
        for moment in chunk.played(own_mode).backward:
            name = moment.name or "loss backward"
            yield moment.around(base + logits, name, f"{moment.operation} of a chunk")
    width = head.section.output.width
    if head.section.output.element_bytes < 4:
        formed = single_form(Part.TEMPORARIES, Quantity.CHUNK, chunk.entry.coefficient + 4 * width)
        after = (later if several or summed is not None else around + constant_form(Part.GRADIENTS, stored)) + logits
        yield Instant("head backward", "gradient of a chunk's rows", after + formed)
        yield Instant("head backward", "gradient of the head's input", after + _rows(head, Part.TEMPORARIES))


def throughout(inputs: StepInputs, head: Head) -> Form:
    """Return the head's input, copies of it and of the labels chunk by chunk, and the sum of its gradients in fp32."""
    output = head.section.output
    sums = single_form(Part.TEMPORARIES, output.quantity, 4 * output.width)
    copies = ZERO
    if not inputs.regime.one_sequence and inputs.setup.profile.loss_chunks > 1:
        labels = single_form(Part.ACTIVATIONS, Quantity.TOKENS, LABEL_BYTES)
        copies = _rows(head, Part.ACTIVATIONS) + labels
    return _rows(head, Part.ACTIVATIONS) + copies + sums


def _rows(head: Head, part: Part) -> Form:
    """Return the head's input, or another tensor of its size."""
    return single_form(part, head.section.output.quantity, head.section.output.coefficient)


def logits_of_chunk(chunk: Section) -> Form:
    """Return the logits of a chunk, which have a name until the next ones have it."""
    first = next(op for op in chunk.tape.operations if op.name == "head")
    return single_form(*chunk.tape.storages[first.makes[0]])


# -------------------------------------------------------------------- logits of all chunks
def chunked_logits_forward(inputs: StepInputs, head: Head, around: Form, chunk: Section) -> Iterator[Instant]:
    """Yield the moments at which a chunk has been cast and its result in fp32 is there: the last, and the one before."""
    part, elements, width = all_logits(chunk)
    wide = {quantity: single_form(part, quantity, 4 * elements) for quantity in _CHUNKS}
    around += saved_rows(head) + single_form(part, Quantity.TOKENS, elements * width) + _labels(inputs)
    around += _labels(inputs) if _copies_labels(inputs) else ZERO
    for done, size in _last_two(inputs):
        results = wide[Quantity.TOKENS] - (wide[done] if done else ZERO)
        yield Instant("forward", "log_softmax of a chunk", around + results + (wide[size] if width < 4 else ZERO))


def chunked_logits_backward(inputs: StepInputs, head: Head, around: Form, chunk: Section) -> Iterator[Instant]:
    """Yield the moments of backward from the loss to the head's input.

    All losses run backward first, the last chunk's to begin with, when all results are still there; then the products,
    whose gradients of the head are added up, the first two into a third.
    """
    part, elements, width = all_logits(chunk)
    rows = saved_rows(head)
    wide = {quantity: single_form(part, quantity, 4 * elements) for quantity in _CHUNKS}
    own = {quantity: single_form(part, quantity, width * elements) for quantity in _CHUNKS}
    parts = {quantity: single_form(Part.TEMPORARIES, quantity, chunk.entry.coefficient) for quantity in _CHUNKS}
    for done, size in _last_two(inputs):
        results = wide[Quantity.TOKENS] - (wide[done] - own[done] if done else ZERO) + _labels(inputs)
        results -= single_form(Part.ACTIVATIONS, done, 8) if done and _copies_labels(inputs) else ZERO
        yield Instant("loss backward", "log_softmax of a chunk", around + rows + results + wide[size] * 2)
    last, full = Quantity.LAST_ROW_CHUNK, Quantity.ROW_CHUNK
    formed = sum(w.formed_bytes for node in chunk.tape.nodes for w in node.weights if w.trainable and not w.coded)
    several = inputs.setup.profile.loss_chunks > 1
    for gone in ((), (last,), (last, full)) if several else ((),):
        form = around + rows + own[Quantity.TOKENS] + parts[last] + (parts[full] if gone else ZERO)
        copies = ZERO if inputs.regime.one_sequence else sum((parts[q] for q in gone), ZERO)
        form = sum((own[q] * -1 for q in gone), form - copies)
        if any(node.name == "scale" for node in chunk.tape.nodes):  # an adapter's part has a gradient of its own
            form += own[full if gone else last]
        yield Instant(
            "head backward", "head of a chunk", form + constant_form(Part.GRADIENTS, (1 + len(gone)) * formed)
        )
    joined = _rows(head, Part.ACTIVATIONS) * 2 + constant_form(Part.GRADIENTS, formed)
    yield Instant("head backward", "rows of all chunks", around + joined)


def _labels(inputs: StepInputs) -> Form:
    """Return labels shifted by a token, which the loss of each chunk saves its part of."""
    shifted = inputs.setup.stack.loop.labels == "shifted"
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, 8) if shifted else ZERO


def _copies_labels(inputs: StepInputs) -> bool:
    """Whether a chunk's labels are a copy: those of several sequences lie apart."""
    return not inputs.regime.one_sequence and inputs.setup.profile.loss_chunks > 1


def saved_rows(head: Head) -> Form:
    """Return the head's input, which a product saves whose weight is trained, and what an adapter's saves of all chunks besides."""
    chunk = head.chunk
    nodes = [node for node in chunk.tape.nodes if node.instant == "head backward"] if chunk is not None else []
    saved = {storage for node in nodes for storage in node.saved}
    if chunk is None or not any(weight.trainable for node in nodes for weight in node.weights):
        return ZERO
    storages = [chunk.tape.storages[storage] for storage in saved]
    size = sum(size for part, quantity, size in storages if (part, quantity) == (Part.ACTIVATIONS, Quantity.CHUNK))
    retained = single_form(Part.ACTIVATIONS, Quantity.TOKENS, size)
    return retained + (_rows(head, Part.ACTIVATIONS) if chunk.entry.storage in saved else ZERO)


_CHUNKS = (Quantity.TOKENS, Quantity.ROW_CHUNK, Quantity.LAST_ROW_CHUNK)


def _last_two(inputs: StepInputs) -> tuple[tuple[Quantity | None, Quantity], ...]:
    """Return, for the last chunk and the one before, which of the others' results are done or not there yet, and its size."""
    one_before = ((Quantity.LAST_ROW_CHUNK, Quantity.ROW_CHUNK),) if inputs.setup.profile.loss_chunks > 1 else ()
    return ((None, Quantity.LAST_ROW_CHUNK), *one_before)


def logits_of_model(head: Head) -> Form:
    """Return the logits that a model returns, of all chunks where these are several."""
    if head.logits is not None:
        return single_form(Part.LOGITS, head.logits.quantity, head.logits.coefficient)
    assert head.chunk is not None
    part, elements, width = all_logits(head.chunk)
    return single_form(part, Quantity.TOKENS, elements * width)


def all_logits(chunk: Section) -> tuple[Part, int, int]:
    """Return what logits count as, their elements for each token, and the bytes of one."""
    head = next(node for node in chunk.tape.nodes if node.name == "head")
    logits = head.outputs[0]
    return chunk.tape.storages[logits.storage][0], logits.width, logits.element_bytes
