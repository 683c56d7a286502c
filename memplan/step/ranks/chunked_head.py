"""Head and loss of one rank that holds shards, where chunks of tokens run backward before the model does.

Gradients of the head are summed over chunks in whole, in the dtype that they are reduced in, and reduced after the last
chunk; norm and head are let go of then, and gathered again for the norm's backward.

Source:
    ``ChunkedLossWrapper.__call__`` in torchtitan/components/loss.py (0.3.0); ``to_accumulated_grad_if_needed`` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py (v2.13.0).
"""

from collections.abc import Iterator
from dataclasses import replace

from memplan.errors import CannotAnswerError
from memplan.step.chunks_at_once import chunks_at_once, logits_of_chunk, throughout
from memplan.step.collectives.gathered_units import Unit
from memplan.step.model_on_tape import PlayedModel
from memplan.step.ranks.forwards_alone import with_gathered
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.tapes.linear_forms import Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import Instant


def chunked_head(step: ShardedStep, around: Form, played: PlayedModel, *, keeps: bool) -> Iterator[Instant]:
    """Yield the chunks' forward and backward, the reduction of the head's gradients, and the norm's backward.

    Args:
        keeps: Whether what is reduced stays, and is not added to what is there.

    Raises:
        CannotAnswerError: The head is the embedding.
    """
    alone, ahead = step.head, 0 if step.stays else step.last.buffer_bytes
    yield from chunk_losses(step, around, played, alone, keeps=keeps)
    assert alone is not None
    retained = _retained(alone, keeps=keeps)
    around += played.head.saved + retained
    arrived = single_form(
        Part.TEMPORARIES, step.taped.head.section.output.quantity, step.taped.head.section.output.coefficient
    )
    copied = alone.reduced_bytes + step.tail.copied_bytes
    yield with_gathered("head backward", "copy of norm and head", around + arrived, copied)
    if not step.stays:
        gathered = step.tail.gathered_bytes + alone.reduced_bytes + step.last.buffer_bytes + step.last.cast_bytes
        yield with_gathered("head backward", "gather of the last layer", around + arrived, gathered)
    for instant in played.head.backward:
        communication = step.tail.gathered_bytes + ahead + alone.reduced_bytes
        form = around + instant.form - played.head.saved
        yield with_gathered("head backward", instant.operation, form, communication)


def chunk_losses(
    step: ShardedStep, around: Form, played: PlayedModel, reduced: Unit | None, *, pending: int = 0, keeps: bool = True
) -> Iterator[Instant]:
    """Yield the chunks' forward and backward, and the reduction of the head's gradients behind the last of them.

    Args:
        reduced: What is reduced: the head, or the norm besides, whose gradients of an earlier micro-batch wait for it.
        pending: The buffer of an earlier reduction, which is there until this one.
        keeps: Whether what comes out stays, and is not added to what is there.

    Raises:
        CannotAnswerError: The head is the embedding.
    """
    chunk, head, inputs = step.taped.head.chunk, step.taped.head, step.inputs
    if reduced is None or chunk is None:
        raise CannotAnswerError("kernels.loss: chunked-backward over shards of a tied head is not modelled; use fp32")
    tail = step.tail.gathered_bytes
    around += played.head.saved
    several = inputs.setup.profile.loss_chunks > 1
    formed = sum(weight.formed_bytes for weight in head.weights)
    summed = sum(w.rows * w.columns for w in head.weights) * step.reduced_width if several else formed
    retained = _retained(reduced, keeps=keeps)
    rows = single_form(Part.TEMPORARIES, Quantity.CHUNK, chunk.entry.coefficient)
    for instant in chunks_at_once(inputs, head, chunk, around, "first", summed):
        left = instant.form + retained - constant_form(Part.GRADIENTS, summed if several else 0)
        if instant.operation == "gradient of the head's input":  # all has been reduced, and the weights are gone
            yield with_gathered(instant.name, instant.operation, left, reduced.reduced_bytes)
            continue
        yield with_gathered(instant.name, instant.operation, instant.form, tail + pending)
        if instant.operation == "gradient of a chunk's rows":  # the last one's, behind the reduction
            yield with_gathered(instant.name, instant.operation, left, tail + reduced.reduced_bytes)
    form = around + throughout(inputs, head) + logits_of_chunk(chunk) + rows
    waiting = summed if reduced.buffer_bytes else 0  # by the variable of a loop, which one rank alone does without
    for size in (summed, reduced.kept_bytes + reduced.narrow_bytes + waiting):
        gradients = constant_form(Part.GRADIENTS, size)
        yield with_gathered("head backward", "reduction of the head", form + gradients, tail + reduced.reduced_bytes)


def _retained(reduced: Unit, *, keeps: bool) -> Form:
    """Return what a reduction leaves until the next one of its unit: the rank's share, or what groups reduce among them."""
    return constant_form(Part.GRADIENTS, reduced.kept_bytes if keeps else reduced.waiting_bytes(new=False))


def behind_head(step: ShardedStep) -> ShardedStep:
    """Return a step whose last reduction before the layers' is that of the norm alone."""
    assert step.head is not None
    norm, waited = (getattr(step.tail, n) - getattr(step.head, n) for n in ("reduced_bytes", "waited_bytes"))
    return replace(step, tail=replace(step.tail, reduced_bytes=norm, waited_bytes=waited))
