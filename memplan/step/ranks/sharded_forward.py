"""Forward of one rank that holds shards: what is gathered lies around the same moments of whole weights."""

from collections.abc import Iterator

from memplan.step.alive_around_layers import (
    all_stored_keys,
    embedded_leaf,
    enters_directly,
    named_embeddings,
    returned_before,
    saves_leaf,
    stored_keys,
)
from memplan.step.chunks_at_once import chunked_logits_forward, logits_of_model
from memplan.step.collectives.gathered_units import Unit
from memplan.step.divided.shared_ends_and_rows import FORWARD_BYTES
from memplan.step.head_instants import head_forward, named_rows
from memplan.step.losses.cross_entropy import COMPILED
from memplan.step.ranks.forwards_alone import (
    arguments_of,
    entry_of,
    instant_with,
    passed_to_backward,
    referred,
    with_gathered,
)
from memplan.step.ranks.lone_head import saved_by_lone_norm
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.states.parallel_shards import casts_shards
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import BEHIND_REGION, Instant


def rows_of_head(step: ShardedStep) -> Form:
    """Return what the final norm is given and gives."""
    values = (step.taped.head.section.entry, step.taped.head.normed)
    return sum((single_form(Part.ACTIVATIONS, value.quantity, value.coefficient) for value in values), ZERO)


def saved_below_logits(step: ShardedStep) -> Form:
    """Return what final norm and head have saved, which is there when the gradient of the logits is, and the loss has let go of its own."""
    tape = step.taped.head.section.tape
    last = max(place for place, node in enumerate(tape.nodes) if node.name == "head")
    saved = dict.fromkeys(storage for node in tape.nodes[: last + 1] for storage in node.retained)
    return sum((single_form(*tape.storages[storage]) for storage in saved), ZERO)


def named_labels(step: ShardedStep) -> Form:
    """Return the labels of a micro-batch that a loop over ranks has a name for until the next one's: torchtune's recipe.

    Source:
        ``train`` in recipes/full_finetune_distributed.py (torchtune 0.6.1), whose loss is no function of its own.
    """
    named = step.inputs.setup.stack.sharded_units == "root-again"
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, 8) if named else ZERO


def leaf_of(step: ShardedStep) -> Form:
    """Return the output of a frozen embedding that is a tensor apart, or nothing."""
    return ZERO if saves_leaf(step.inputs, step.taped) else embedded_leaf(step.inputs, step.taped)


def leaf_output(step: ShardedStep) -> Form:
    """Return the output of a frozen embedding that layers have saved, when they have let go of it: a leaf stays."""
    return embedded_leaf(step.inputs, step.taped) - leaf_of(step)


def forward(step: ShardedStep, base: Form, *, begins: bool = True) -> Iterator[Instant]:
    """Yield the layers' forward, the copies of the first and of the last layer out of their buffers, and the loss.

    A unit's buffer lives until the next unit has been copied out of its own; the last one until
    forward ends. The model's own logits stay until the loss is known.

    Args:
        begins: Whether a step begins with it, which an evaluation may have come before.
    """
    if step.prefetches:
        yield from _prefetched_forward(step, base)
        return
    if not step.called_before:
        yield from _below_head(step, base)
        yield from _head(step, base)
    if step.called_before or (step.leaves_tail and begins):
        yield from _beside_tail(step, _below_head(step, base))
        yield from _head(step, base, step.last)


def _beside_tail(step: ShardedStep, instants: Iterator[Instant]) -> Iterator[Instant]:
    """Yield instants with norm and head around them, gathered since a forward without gradients: no backward has let go of them.

    Source:
        ``fsdp2_prepare_model`` in accelerate/utils/fsdp_utils.py (1.15.0), which does not reshard them after forward.
    """
    for instant in instants:
        if instant.operation not in ("copy of norm and head", "copy of the ends"):
            yield instant_with(instant, step.tail.gathered_bytes)


def _below_head(step: ShardedStep, base: Form) -> Iterator[Instant]:
    """Yield the forward of embedding and layers."""
    played, runs = step.played, step.taped.runs
    resident, x = step.root_weight_bytes, entry_of(step)
    around = base + arguments_of(step)
    first = resident + step.first.buffer_bytes + step.units[0].copied_bytes
    entered = leaf_of(step) + named_embeddings(step.inputs, step.taped)
    given = entered if enters_directly(step.inputs, step.taped) else ZERO
    form = around + x + played.embedding.saved + entered - given
    yield with_gathered("forward", "copy of the first layer", form, first)
    if step.flat:
        yield with_gathered("forward", "gather of the root", base, step.first.copied_bytes)
    if step.rest:  # whose buffer is there until the embedding, or both ends, have been copied out of theirs
        yield with_gathered("forward", "copy of the ends", base, step.rest.buffer_bytes + step.first.copied_bytes)
    if (
        not step.flat
    ):  # what layers are called with is made behind the embedding, whose buffer waits for the first of them
        yield with_gathered("forward", "copy of the embedding", base, step.first.copied_bytes)
        for moment in played.embedding.forward:
            yield with_gathered("forward", moment.operation, base + moment.form, step.first.copied_bytes)
    around += entered
    behind = around + played.saved + all_stored_keys(step.taped)
    if step.apart and not step.head_by_hand:
        ends = step.tail.copied_bytes + step.last.buffer_bytes + step.below_head
        yield with_gathered("forward", "copy of norm and head", behind + x + saved_by_lone_norm(step), ends)
    yield from _layers(step, around + played.embedding.saved, given)
    under = step.neighbour(len(runs) - 1, runs[-1].count, -1)
    if under:
        form = behind - played.layers[step.taped.kinds[-1]].saved - stored_keys(step.taped, step.taped.kinds[-1]) + x
        gathered = resident + step.last.copied_bytes + under.buffer_bytes + step.staying(len(runs) - 1, runs[-1].count)
        yield with_gathered("forward", "copy of the last layer", form, gathered)


def _head(step: ShardedStep, base: Form, waiting: Unit | None = None) -> Iterator[Instant]:
    """Yield the forward of norm, head and loss.

    Args:
        waiting: The unit whose buffer is there, where it is not that of norm and head.
    """
    saved = step.played.saved + step.taped.handed.kept_keys()
    if step.loss_on_both_sides:
        yield from _loss_on_both_sides(step, base + leaf_of(step) + saved)
    elif step.loss_inside or step.chunked:
        yield from _head_inside(step, base + leaf_of(step) + saved, waiting)
    else:
        yield from _loss_outside(step, base + saved)


def _prefetched_forward(step: ShardedStep, base: Form) -> Iterator[Instant]:
    """Yield the same where each unit has the next one gathered before it runs, group by group of it.

    The buffer of a unit's last group, if that is of several ranks, lives until the first group of the next has been copied out.
    """
    played, (entry, kinds) = step.played, (entry_of(step), step.taped.kinds)
    around = base + arguments_of(step)
    gathered = step.first.copied_bytes
    ahead = _ahead(step.units[0])
    yield with_gathered("forward", "gather of the first layer", around, gathered + max(ahead))
    for moment in played.embedding.forward:
        yield with_gathered("forward", moment.operation, around + moment.form, gathered + ahead[-1])
    entered = leaf_of(step) + named_embeddings(step.inputs, step.taped)
    around += entered
    before = step.first
    saved = played.embedding.saved
    for index, (run, own) in enumerate(zip(step.taped.runs, step.units, strict=True)):
        part = played.layers[kinds[index]]
        for position in dict.fromkeys((0, min(1, run.count - 1), max(0, run.count - 2), run.count - 1)):
            above = own if position else before
            next_one = step.neighbour(index, position + 1, 1) or step.tail
            ahead = _ahead(next_one)
            resident = step.staying(index, position + 1) + step.first.gathered_bytes * step.stays
            there = around + saved + part.saved * position + entry
            for size in _copies(own, _kept_buffer(above)):
                yield with_gathered("forward", "copy of a layer", there, resident + size)
            resident += own.gathered_bytes + _kept_buffer(own)
            yield with_gathered("forward", "gather of the next layer", there, resident + max(ahead))
            below = around + saved + part.saved * position
            below -= entered if index == position == 0 else ZERO
            for moment in part.forward:
                yield with_gathered("forward", moment.operation, below + moment.form, resident + ahead[-1])
        saved += part.saved * run.count
        before = own
    ends = step.tail.copied_bytes + _kept_buffer(step.last) + step.below_head
    yield with_gathered("forward", "copy of norm and head", around + played.saved + entry, ends)
    if step.chunked:
        yield from _head_inside(step, base + leaf_of(step) + played.saved)
    else:
        yield from _loss_outside(step, base + played.saved)


def _groups(unit: Unit) -> tuple[Unit, ...]:
    return unit.groups or (unit,)


def _kept_buffer(unit: Unit) -> int:
    """Return the buffer that lives until the next unit's first group has been copied out of its own."""
    return _groups(unit)[-1].buffer_bytes


def _ahead(unit: Unit) -> tuple[int, ...]:
    """Return what is there of a unit while it is gathered, and at the end when it has been."""
    done, sizes = 0, []
    for group in _groups(unit):
        done += group.buffer_bytes
        sizes.append(done + group.cast_bytes)
    return (*sizes, done)


def _copies(unit: Unit, waiting: int) -> Iterator[int]:
    """Yield what is there as each group of a unit is copied out of its buffer.

    Args:
        waiting: The buffer of the group before.
    """
    left, done = unit.buffer_bytes, 0
    for group in _groups(unit):
        left -= group.buffer_bytes
        done += group.gathered_bytes
        yield waiting + left + done + group.copying_bytes
        waiting = group.buffer_bytes


def _layers(step: ShardedStep, around: Form, given: Form) -> Iterator[Instant]:
    """Yield the forward of the first and of the last layer of each run, whose buffer is still there.

    Args:
        around: What lies around the first.
        given: What of that the first layer is given.
    """
    for index, (run, kind, own) in enumerate(zip(step.taped.runs, step.taped.kinds, step.units, strict=True)):
        part = step.played.layers[kind]
        gathered = step.root_weight_bytes + (own.gathered_bytes if step.flat else own.copied_bytes)
        for position in dict.fromkeys((0, run.count - 1)):
            lowest = run is step.taped.runs[0] and position == 0
            below = around + part.saved * position + (given * -1 if lowest else returned_before(step.taped, kind))
            if step.flat:
                before = step.root_weight_bytes + step.staying(index, position + 1)
                yield with_gathered("forward", "gather of a layer", below + entry_of(step), before + own.copied_bytes)
            for moment in part.forward:
                resident = gathered + step.staying(index, position + 1)
                yield with_gathered("forward", moment.operation, below + moment.form, resident)
        around += (part.saved + stored_keys(step.taped, kind)) * run.count


def _head_inside(step: ShardedStep, around: Form, waiting: Unit | None = None) -> Iterator[Instant]:
    """Yield norm, head and loss where the model itself forms it, so that the last buffer is there until it is known."""
    around += passed_to_backward(step)
    buffer = waiting or (step.tail if step.apart and not step.head_by_hand else step.last)
    gathered = step.tail.gathered_bytes + buffer.buffer_bytes + step.below_head
    for moment in head_forward(step.inputs, step.taped.head, step.played.head, around, ZERO):
        yield with_gathered("forward", moment.operation, moment.form, gathered)
    logits, setup = step.taped.head.logits, step.inputs.setup
    if logits and step.taped.settings.block.code.wide_logits and setup.compute_bytes < 4 and casts_shards(setup):
        # ``FSDPState._post_forward`` in torch/distributed/fsdp/_fully_shard/_fsdp_state.py (v2.13.0), by ``output_dtype``
        both = single_form(Part.LOGITS, logits.quantity, (4 + setup.compute_bytes) * logits.width)
        yield with_gathered("forward", "logits, cast", around + step.played.head.saved + both, gathered)
    yield from referred(step, around + step.played.head.saved)


def _loss_on_both_sides(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield norm, head and the model's own loss inside the root, which has let go of all buffers before the trainer forms another."""
    around += passed_to_backward(step)
    gathered = step.tail.gathered_bytes + step.last.buffer_bytes
    for moment in step.played.head.forward:
        inside = moment.name != BEHIND_REGION
        yield with_gathered("forward", moment.operation, around + moment.form, gathered * inside)


def _loss_outside(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the head's product, which is the model's last, and the loss outside it."""
    tail, head, settings = step.tail.gathered_bytes + step.below_head, step.taped.head, step.taped.settings
    buffer = step.tail.buffer_bytes if step.apart else step.last.buffer_bytes
    outside = step.below_head if step.root_again else tail  # the root is let go of before
    if head.chunk is not None:
        form = around + head.section.tape.saved_form() + named_rows(head) + logits_of_model(head)
        yield with_gathered("forward", "head", form, tail + buffer)
        saved = around - named_labels(step) + step.played.head.saved + step.played.head.carried
        for instant in chunked_logits_forward(step.inputs, head, saved, head.chunk):
            yield instant_with(instant, outside)
        return
    node = next(n for n in head.section.tape.nodes if n.name in ("log_softmax", COMPILED))
    inputs = node.inputs[0][0]
    logits = single_form(Part.LOGITS, inputs.quantity, inputs.width * settings.block.compute_bytes)
    read = single_form(Part.LOGITS, inputs.quantity, inputs.coefficient if node.name != COMPILED else 0)
    form = around + head.section.tape.saved_form() + read + constant_form(Part.LOGITS, settings.loss_bytes)
    form = form + logits if head.logits is not None and inputs.storage != head.logits.storage else form
    if settings.block.divided:
        form += single_form(Part.LOGITS, inputs.quantity, inputs.coefficient + FORWARD_BYTES)
    yield with_gathered("forward", "log_softmax", form, outside)
    yield with_gathered("forward", "head", around + rows_of_head(step) + logits, tail + buffer)
    if step.widens_logits:  # which are as wide as the log-probabilities that the loss saves later
        form = around + head.section.tape.saved_form() + named_rows(head) + logits
        yield with_gathered("forward", "cast of the logits", form, tail + buffer)
