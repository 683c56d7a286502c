"""A loss over chunks of tokens, each of which runs backward as far as the head's input before the next is formed.

The gradient of that input is gathered in fp32 for all tokens, then cast; the rest of the model runs backward from it.

Source:
    ``ChunkedLossWrapper`` and ``GradAccumulator`` in torchtitan/components/loss.py (0.3.0).
"""

from __future__ import annotations

from collections.abc import Iterator

from memplan.step.ends_on_tape import Head
from memplan.step.step_inputs import StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.played import Instant
from memplan.step.tapes.section import Section
from memplan.step.tapes.taped_weight import Mode

LABEL_BYTES = 16
"""A token's label and its position, which the loss is given beside the hidden states."""


def chunks_at_once(inputs: StepInputs, head: Head, chunk: Section, around: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the moments of a loss over chunks, from the first chunk's logits to the gradient of the head's input.

    Args:
        inputs: What is compiled.
        head: Norm, head and loss.
        chunk: Head and loss of one chunk.
        around: What lies around, with what the norm has saved.
        mode: What becomes of weight gradients.
    """
    around += _throughout(inputs, head)
    logits = _logits(chunk)
    several = inputs.setup.profile.loss_chunks > 1
    later = around + constant_form(Part.GRADIENTS, _stored(chunk, mode) if several else 0)
    for moment in chunk.played(mode).forward:
        yield moment.around(later, "forward", f"{moment.operation} of a chunk")
    yield Instant("forward", "head of a chunk", later + logits * (2 if several else 1))
    for base, own_mode in ((around, mode), (later, _later_mode(mode))) if several else ((around, mode),):
        for moment in chunk.played(own_mode).backward:
            name = moment.name or "loss backward"
            yield moment.around(base + logits, name, f"{moment.operation} of a chunk")
    width = head.section.output.width
    if head.section.output.element_bytes < 4:
        formed = single_form(Part.TEMPORARIES, Quantity.CHUNK, chunk.entry.coefficient + 4 * width)
        yield Instant("head backward", "gradient of a chunk's rows", later + logits + formed)
        yield Instant("head backward", "gradient of the head's input", later + logits + _rows(head, Part.TEMPORARIES))


def _throughout(inputs: StepInputs, head: Head) -> Form:
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


def _logits(chunk: Section) -> Form:
    """Return the logits of a chunk, which have a name until the next ones have it."""
    first = next(op for op in chunk.tape.operations if op.name == "head")
    return single_form(*chunk.tape.storages[first.makes[0]])


def _stored(chunk: Section, mode: Mode) -> int:
    """Return the gradients that the first chunk leaves."""
    return chunk.left(mode)


def _later_mode(mode: Mode) -> Mode:
    """Return how gradients of the chunks after the first fare: they are added to those that are there."""
    return "layer" if mode == "layer" else "again"
