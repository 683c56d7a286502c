"""Backward of one rank under FullyShardedDataParallel (FSDP1): flat tensors are gathered in place, and gradients put together in one.

A unit is gathered when its backward begins, and let go of when its gradients have been put together, which are reduced
thereupon; the root is gathered from forward to the end, and its piece copied from host memory once more as backward begins
(``pre_unshard`` in torch/distributed/fsdp/_flat_param.py asks where its weights are, not whether it is whole). The next unit is gathered when the backward of one begins (``pre``),
when it is done (``post``), or when its own begins. Where units stay gathered (SHARD_GRAD_OP), nothing is gathered in backward, and
micro-steps before the last let go of none (``_should_free_in_backward``).

Source:
    ``_pre_backward_hook``, ``_post_backward_hook``, ``_reduce_grad`` and ``_prefetch_handle`` in
    torch/distributed/fsdp/_runtime_utils.py (v2.13.0).
"""

from collections.abc import Iterator

from memplan.step.alive_around_layers import called_again, let_go
from memplan.step.collectives.gathered_units import Unit
from memplan.step.head_instants import head_backward, tied_sum
from memplan.step.model_on_tape import PlayedModel
from memplan.step.ranks.forwards_alone import instant_with, with_gathered
from memplan.step.ranks.reduced_pass import Pass
from memplan.step.ranks.sharded_forward import leaf_output, saved_below_logits
from memplan.step.ranks.sharded_units import ShardedStep, positions
from memplan.step.step_inputs import tables_of_graph
from memplan.step.tapes.linear_forms import Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import Instant, Played

_END, LOG_BYTES = "end of backward", 4


def flat_backward(step: ShardedStep, bare: Form, base: Form, played: PlayedModel, of: Pass) -> Iterator[Instant]:
    """Yield the instants of one backward.

    Args:
        bare: What is there throughout it.
        base: The same with what layers were given besides their input.
    """
    head, root = step.taped.head, step.first.gathered_bytes
    ahead = step.last.gathered_bytes if _prefetches(step, "pre") else 0
    if moved := step.first.moved_bytes:  # its forward left the root whole, and what stands for it in host memory
        yield with_gathered("loss backward", "copy of the root", base + played.saved + played.head.saved, root + moved)
    if ahead and step.begins_behind_loss:
        yield from _behind_loss(step, base + played.saved, played.head.saved)
    elif ahead:
        first = base + played.saved + played.head.saved
        yield with_gathered("loss backward", "gather of the last layer", first, root + step.last.copied_bytes)
    for instant in head_backward(step.inputs, head, played.head, base + played.saved, "first"):
        begun = not step.begins_behind_loss or instant.name != "loss backward"
        yield instant_with(instant, root + ahead * begun + step.below_head)
    above = waiting = head.section.gradients or head.delayed_bytes
    saved = played.saved
    for index in reversed(range(len(step.units))):
        part, run = played.layers[step.taped.kinds[index]], step.taped.runs[index]
        left, rest = _left(step.units[index], of), saved - part.saved * run.count
        for position in positions(run):
            gradients = constant_form(Part.GRADIENTS, above + left * (run.count - position))
            around = base + rest + part.saved * (position - 1) + gradients
            layer = run.first + position
            around += step.taped.handed.waiting(layer) - let_go(step.inputs, step.taped, layer)
            yield from _layer(step, (index, position), around, part, of)
        above += left * run.count
        saved = rest
    around = bare + constant_form(Part.GRADIENTS, above) + called_again(step.inputs) + step.taped.handed.left
    root += 0 if of.reduces else step.below_head
    for instant in tied_sum(step.inputs, step.taped, around, "first"):
        yield with_gathered(instant.name, instant.operation, instant.form, root)
    for instant in played.embedding.backward:
        yield instant_with(instant.around(around, _END), root)
    around += leaf_output(step) - constant_form(Part.GRADIENTS, waiting)
    yield from _put_together(step.first, (_END, around, step.whole_of_first), root, 0, of)


def _behind_loss(step: ShardedStep, around: Form, saved: Form) -> Iterator[Instant]:
    """Yield the moments at which the gradient of the root's logits is there, before what bounds them runs backward and as it does.

    Args:
        around: What is there besides the head's.
        saved: What the head has saved, log-probabilities of pieces with it.
    """
    logits, settings, last = step.taped.head.logits, step.taped.settings, step.last
    assert logits is not None
    gradient = single_form(Part.LOGITS, logits.quantity, settings.vocab_size * step.inputs.setup.compute_bytes)
    name, root = "gather of the last layer", step.first.gathered_bytes
    if not settings.bounded_logits:
        yield with_gathered(
            "head backward", name, around + saved_below_logits(step) + gradient, root + last.copied_bytes
        )
        return
    left = around + saved - single_form(Part.LOGITS, Quantity.PREDICTED_TOKENS, LOG_BYTES * settings.vocab_size)
    yield with_gathered("loss backward", name, left + gradient, root + last.copied_bytes)
    yield with_gathered("loss backward", "bounded logits", left + gradient * 2, root + last.gathered_bytes)


def _prefetches(step: ShardedStep, when: str) -> bool:
    return step.flat is not None and not step.stays and step.flat.backward_prefetch == when


def _left(unit: Unit, of: Pass) -> int:
    """Return what a unit leaves besides what was there before."""
    if not of.reduces:
        return 0 if of.beside else unit.reduced_bytes
    return unit.kept_bytes * (of.mode == "first" or of.beside) - unit.reduced_bytes * of.beside


def _layer(step: ShardedStep, place: tuple[int, int], around: Form, played: Played, of: Pass) -> Iterator[Instant]:
    """Yield the backward of one layer: gathered, run, its gradients put together and reduced."""
    index, position = place
    own, run = step.units[index], step.taped.runs[index]
    under, root, arrived = step.neighbour(index, position, -1), step.first.gathered_bytes, step.arrived
    root += step.staying(index, position) if of.reduces else max(step.below_head - own.gathered_bytes, 0)
    name = f"layer {run.first + position} backward"
    top = position == run.count and index == len(step.units) - 1
    before = step.head_instant if top else f"layer {run.first + position + 1} backward"
    begun = around + played.saved + arrived
    ahead = under.gathered_bytes if under and _prefetches(step, "pre") else 0
    if _prefetches(step, "none") or (top and _prefetches(step, "post")):
        yield with_gathered(before, "gather of a layer", begun, root + own.copied_bytes)
    elif ahead and under:
        gathered = root + own.gathered_bytes + under.copied_bytes
        yield with_gathered(before, "gather of the next layer", begun, gathered)
    for instant in played.backward:
        yield instant_with(instant.around(around, name), root + own.gathered_bytes + ahead)
    after = under if _prefetches(step, "post") else None
    around += arrived
    if step.reentrant:  # its function still holds what it was given and gave, the gradient of that, and the tables
        around += arrived + arrived + arrived
    elif run.first + position == 1 and step.taped.lowest_turned is not None:
        around -= tables_of_graph(step.inputs) - let_go(step.inputs, step.taped, 1)
    there = (name, around, step.whole_of(index))
    yield from _put_together(own, there, root + own.gathered_bytes + ahead, root + ahead, of, after)


def _put_together(
    own: Unit, at: tuple[str, Form, int], resident: int, retained: int, of: Pass, after: Unit | None = None
) -> Iterator[Instant]:
    """Yield a unit's gradients as they become one tensor, and its reduction.

    Args:
        at: The instant, what lies around, and the gradients as they were formed.
        resident: What is gathered meanwhile.
        retained: What stays gathered when the unit is let go of.
        after: The unit that is gathered before they are reduced.
    """
    name, around, formed = at
    together = constant_form(Part.GRADIENTS, formed + own.reduced_bytes)
    yield with_gathered(name, "gradients in one tensor", around + together, resident)
    alone = around + constant_form(Part.GRADIENTS, own.reduced_bytes)
    if after:
        yield with_gathered(name, "gather of the next layer", alone, retained + after.copied_bytes)
        retained += after.gathered_bytes
    if of.reduces:
        reduced = alone + constant_form(Part.GRADIENTS, own.narrow_bytes + own.kept_bytes)
        yield with_gathered(name, "reduction", reduced, retained)
