"""A training step under torch's ``fully_shard``: what is gathered and reduced lies around the same tapes.

Each layer is a unit, and the root is one with embedding, final norm and head; or, as a stack says, the embedding is one
and norm and head are another, whose weights stay from forward to their gradients' reduction. A unit's weights are
gathered into one buffer, then copied out of it into whole tensors; its gradients are formed whole,
copied into one buffer, reduced and scattered. The root stays gathered from the beginning of forward
to the end of backward, and its gradients stay whole as long. In backward the next unit is gathered
while one runs, and the buffer that its gradients were reduced from lives until the next reduction. Where units are not
resharded after forward, each of them stays until its own gradients are reduced, and nothing is gathered in backward.

Source:
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (``wait_for_unshard``, ``post_backward``,
    ``_backward_prefetch``), _fsdp_state.py (``_root_post_backward_final_callback``) and
    _fsdp_collectives.py (v2.13.0); the loss lies outside the root, as in torchtitan.
"""

from collections.abc import Iterator
from functools import partial

from memplan.model.model import Model
from memplan.step.alive_around_layers import (
    called_again,
    embedded_leaf,
    escaped_form,
    let_go,
    logits_of_loop,
)
from memplan.step.blocks.block_settings import Regime
from memplan.step.chunks_at_once import logits_of_model, saved_rows
from memplan.step.head_instants import chunked_weights_left, head_backward, root_form, tied_sum
from memplan.step.instants import StepForms, saved_by_layers, step_instants
from memplan.step.model_on_tape import PlayedModel
from memplan.step.ranks.chunked_head import behind_head, chunked_head
from memplan.step.ranks.flat_adapters import adapted_passes
from memplan.step.ranks.flat_step import flat_backward
from memplan.step.ranks.forwards_alone import (
    evaluated,
    gathers_tail_again,
    instant_with,
    passed_to_backward,
    root_of_reference_bytes,
    with_gathered,
)
from memplan.step.ranks.lone_head import head_then_norm, saved_by_lone_norm
from memplan.step.ranks.reduced_pass import Pass
from memplan.step.ranks.sharded_forward import forward, leaf_of, leaf_output, named_labels, saved_below_logits
from memplan.step.ranks.sharded_units import ShardedStep, positions, sharded_step
from memplan.step.regimes import setup_in
from memplan.step.states.model_states import ModelStates
from memplan.step.step_inputs import buffers, own_rows
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.moments import Instant, Played
from memplan.step.tapes.taped_operations import Mode
from memplan.step.units.collated_rows import evaluated_rows
from memplan.training.resolved import TrainingSetup

LOG_BYTES = 4
"""Of a number of a log-softmax."""


def compile_sharded_step(model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> StepForms:
    """Return the closed forms of one rank's training step.

    Args:
        setup: The training setup, with ``zero_stage: 3``.
    """
    setup = setup_in(setup, padded=regime.padded)
    step = sharded_step(model, setup, states, regime)
    inputs = step.inputs
    resident = logits_of_loop(setup, step.taped)
    gone = own_rows(setup) * -1
    candidates = tuple(
        instant.around(resident + (gone if instant.name == "optimizer step" else ZERO) + labels_of(step, instant))
        for instant in step_instants(inputs, step.taped, partial(_passes, step))
    )
    if size := root_of_reference_bytes(step):
        candidates = tuple(instant_with(instant, size) for instant in candidates)
    if setup.config.evaluation:
        retained = states.gradient_bytes if setup.config.zero_gradients == "fill" else 0
        around = constant_form(Part.GRADIENTS, retained) + resident
        if step.flat:
            candidates += (with_gathered("evaluation", "gather of the root", around, step.first.copied_bytes),)
        around += resident + evaluated_rows(setup)  # a loop of evaluation names its last logits too
        candidates += tuple(instant_with(instant, of_rest(step)) for instant in evaluated(step, around))
    return StepForms(
        candidates,
        buffers(inputs),
        saved_by_layers(step.taped),
        inputs.optimizer.formula,
        step.stream_bytes,
        step.unit_gradients,
    )


def of_rest(step: ShardedStep) -> int:
    """Return whole weights of what is in no other unit, which are there from the first forward to the end of backward."""
    return step.rest.gathered_bytes if step.rest else 0


def labels_of(step: ShardedStep, instant: Instant) -> Form:
    """Return the labels that have a name while gradients are clipped and weights are stepped."""
    return named_labels(step) if instant.name in ("gradient clipping", "optimizer step") else ZERO


def _passes(step: ShardedStep, base: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the instants of the first, or of each later, forward and backward, beside what the root holds throughout."""
    for instant in _all_passes(step, base, mode):
        yield instant_with(instant, of_rest(step)) if step.rest else instant


def _all_passes(step: ShardedStep, base: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the same without what the root holds throughout."""
    if step.adapters:
        yield from adapted_passes(step, base, mode)
        return
    steps = step.inputs.setup.config.gradient_accumulation_steps
    if not step.reduces_last or steps == 1:
        yield from _one_pass(step, base, Pass(mode))
    elif mode != "again":
        yield from _one_pass(step, base, Pass("first", reduces=False))
    else:
        base = constant_form(Part.GRADIENTS, step.whole_gradients)
        for reduces in (False, True) if steps > 2 else (True,):
            yield from _one_pass(step, base, Pass("again", reduces, beside=True))


def _one_pass(step: ShardedStep, base: Form, of: Pass) -> Iterator[Instant]:
    """Yield the instants of one forward and backward."""
    played = step.played_as("again" if of.beside else "first")
    saved, head = played.saved, step.taped.head
    yield from forward(step, base + named_labels(step), begins=not of.beside)
    bare = base + leaf_of(step) + root_form(step.inputs, step.taped.settings)
    bare += named_labels(step)
    base = bare + passed_to_backward(step) + step.taped.handed.given
    if step.flat:
        yield from flat_backward(step, bare, base, played, of)
        return
    if step.chunked:
        for instant in chunked_head(step, base + saved, played, keeps=of.mode == "first" or of.beside):
            yield instant_with(instant, step.below_head)
        step = behind_head(step)
    else:
        yield from _head_unit(step, base + saved, played)
    whole = head.section.gradients + (0 if step.chunked else chunked_weights_left(head, "first")) or head.delayed_bytes
    above = waiting = head.delayed_bytes if of.beside else whole
    if step.head_by_hand:
        above = step.tail.left_bytes * (not of.beside)  # which its gradient is as soon as the loss has it
    elif step.apart:
        if of.reduces and not step.chunked:
            yield from _tail_unit(step, base + saved + saved_by_lone_norm(step), whole, of)
        above = of.left(step.tail, whole)
    yield from _layer_units(step, base, above, played, of)
    layers = sum(
        of.left(u, step.whole_of(i)) * run.count
        for i, (u, run) in enumerate(zip(step.units, step.taped.runs, strict=True))
    )
    above = layers + (above if step.apart else 0)
    bare += escaped_form(step.taped, played) + called_again(step.inputs) + step.taped.handed.left
    yield from _first_unit(step, bare + constant_form(Part.GRADIENTS, above), waiting, played, of)


# -------------------------------------------------------------------- backward
def _head_unit(step: ShardedStep, around: Form, played: PlayedModel) -> Iterator[Instant]:
    """Yield the backward of loss and head, from whose start on the last layer is gathered."""
    head, tail, settings = step.taped.head, step.tail.gathered_bytes, step.taped.settings
    scores = step.inputs.setup.scores  # whose head is no part of a unit that backward reaches with the loss
    at_once = (step.root_again and not step.root_behind_loss) or (head.logits is None and not scores)
    at_once = at_once or step.stays or step.last_stays
    if step.root_behind_loss:
        yield from _root_behind_loss(step, around, played)
        return
    if step.root_again:
        yield with_gathered("loss backward", "copy of the root", around + played.head.saved, step.tail.copied_bytes)
    if step.gathers_before_head and not at_once and not scores:
        assert head.logits is not None
        logits = single_form(Part.LOGITS, head.logits.quantity, head.logits.coefficient)
        communication = tail + step.last.buffer_bytes + step.last.cast_bytes
        form = around + saved_below_logits(step) + logits
        yield with_gathered("loss backward", "gather of the last layer", form, communication)
    elif step.gathers_before_head and not (step.stays or step.last_stays):
        communication = tail + step.last.buffer_bytes + step.last.cast_bytes
        name = "head backward" if scores else "loss backward"
        yield with_gathered(name, "gather of the last layer", around + played.head.saved, communication)
    elif not at_once and (settings.bounded_logits or settings.scaled_logits):
        assert head.logits is not None
        nodes = head.section.tape.nodes
        logs = next((node.outputs[0] for node in nodes if node.name == "log_softmax"), head.logits)
        logits, gone = (single_form(Part.LOGITS, one.quantity, one.coefficient) for one in (head.logits, logs))
        yield from _logits_behind_loss(step, around + played.head.saved - gone + logits, logits)
    for part, gathered in head_then_norm(step, played.head):
        for instant in head_backward(step.inputs, head, part, around, "first"):
            ahead = step.ahead_of_head if at_once or instant.name != "loss backward" else 0
            yield instant_with(instant, gathered + ahead)


def _logits_behind_loss(step: ShardedStep, around: Form, gradient: Form) -> Iterator[Instant]:
    """Yield the backward of what the model does to its logits, whose gradient has had the last layer gathered."""
    communication = step.tail.gathered_bytes + step.last.buffer_bytes
    yield with_gathered("loss backward", "gather of the last layer", around, communication + step.last.cast_bytes)
    yield with_gathered("loss backward", "scaled logits", around + gradient, communication)


def _root_behind_loss(step: ShardedStep, around: Form, played: PlayedModel) -> Iterator[Instant]:
    """Yield the backward of a loss outside the root, which is gathered again when the gradient of its logits is there, and of the head."""
    head, settings = step.taped.head, step.taped.settings
    logits, gathered = logits_of_model(head), step.tail.gathered_bytes + step.last.buffer_bytes
    gone = single_form(Part.LOGITS, Quantity.PREDICTED_TOKENS, LOG_BYTES * settings.vocab_size)
    setup = step.inputs.setup
    if step.widens_logits and head.logits is not None:
        # Inside the root, which is gathered before they are narrowed again.
        wide = around + played.head.saved
        yield with_gathered("loss backward", "copy of the root", wide, step.tail.copied_bytes)
        narrow = single_form(Part.LOGITS, head.logits.quantity, setup.compute_bytes * head.logits.width)
        yield with_gathered("loss backward", "gradient of the logits", wide + narrow, gathered)
    elif settings.bounded_logits or settings.scaled_logits:  # before what the model does to them runs backward
        form, size = around + played.head.saved - gone + logits, step.tail.copied_bytes
        yield with_gathered("loss backward", "copy of the root", form, size)
        yield from _logits_behind_loss(step, form, logits)
    if not step.widens_logits:
        rows = saved_below_logits(step) if head.chunk is None else played.head.saved + saved_rows(head)
        yield with_gathered("head backward", "copy of the root", around + rows + logits, step.tail.copied_bytes)
    for instant in head_backward(step.inputs, head, played.head, around, "first"):
        inside = instant.name != "loss backward"
        yield instant_with(instant, gathered * inside)


def _tail_unit(step: ShardedStep, around: Form, whole: int, of: Pass) -> Iterator[Instant]:
    """Yield the reduction of the gradients of norm and head, whose weights are let go of before.

    Args:
        whole: Their gradients as they are formed.
    """
    arrived = step.arrived
    communication = step.tail.reduced_bytes + step.ahead_of_head
    for size in (of.formed(whole), of.scattered(step.tail, whole)):
        form = around + arrived + constant_form(Part.GRADIENTS, size)
        yield with_gathered(step.head_instant, "reduction of norm and head", form, communication)


def _layer_units(step: ShardedStep, base: Form, above: int, model: PlayedModel, of: Pass) -> Iterator[Instant]:
    """Yield the backward of the layers: the last and the first of each run, and their neighbours.

    Args:
        above: Gradients that the head has left.
    """
    saved, escaped = model.saved, ZERO
    for index in reversed(range(len(step.units))):
        part, run = model.layers[step.taped.kinds[index]], step.taped.runs[index]
        each = of.left(step.units[index], step.whole_of(index))
        rest = saved - part.saved * run.count
        for position in positions(run):
            gradients = constant_form(Part.GRADIENTS, above + each * (run.count - position))
            over = escaped + part.escaped * (run.count - position)
            around = base + rest + over + part.saved * (position - 1) + gradients
            around += step.taped.handed.waiting(run.first + position) - let_go(
                step.inputs, step.taped, run.first + position
            )
            yield from _layer_unit(step, (index, position), around, part, of)
        above += each * run.count
        saved, escaped = rest, escaped + part.escaped * run.count


def _layer_unit(step: ShardedStep, place: tuple[int, int], around: Form, played: Played, of: Pass) -> Iterator[Instant]:
    """Yield the backward of one layer: gathered, run, its gradients reduced.

    Args:
        place: Its run, and its place in that.
    """
    index, position = place
    own, run = step.units[index], step.taped.runs[index]
    over, under = step.neighbour(index, position, 1), step.neighbour(index, position, -1)
    name = f"layer {run.first + position} backward"
    named = position + 1 in positions(run) or position == run.count
    top = position == run.count and index == len(step.units) - 1
    before = step.head_instant if top else f"layer {run.first + position + named} backward"
    before = name if step.reentrant else before
    if step.apart:
        over, under = over or (None if step.head_by_hand else step.tail), under or step.first
    root, waiting = step.root_weight_bytes, over.reduced_bytes if over and of.reduces else 0
    next_gathered = under.buffer_bytes if under else 0
    ahead = next_gathered + (under.cast_bytes if under else 0)
    arrived = step.arrived
    copying = 0 if top and step.last_stays else own.copying_bytes
    gathered = root + waiting + own.gathered_bytes + max(copying, ahead)
    if step.stays:
        next_gathered = step.staying(index, position)
    else:
        yield with_gathered(before, "copy out of the gathered buffer", around + played.saved + arrived, gathered)
    for instant in played.backward:
        yield instant_with(instant.around(around, name), root + waiting + own.gathered_bytes + next_gathered)
    around += played.escaped
    whole, last, handed = step.whole_of(index), run.first + position == 1, step.taped.handed
    gradients = constant_form(Part.GRADIENTS, of.formed(whole))
    if last and name != step.end_instant:
        gone = passed_to_backward(step) - called_again(step.inputs) - let_go(step.inputs, step.taped, 1)
        gone += handed.given + handed.waiting(1) - handed.left
        name, around = step.end_instant, around + leaf_output(step) - gone
        resident = root + waiting + own.gathered_bytes + next_gathered
        yield with_gathered(name, "gradients of the first layer", around + arrived + gradients, resident)
    if not of.reduces:
        return
    for operation, size, communication in of.reductions(own, whole):
        form = around + arrived + constant_form(Part.GRADIENTS, size)
        yield with_gathered(name, operation, form, root + communication + next_gathered)


def _first_unit(step: ShardedStep, around: Form, whole: int, played: PlayedModel, of: Pass) -> Iterator[Instant]:
    """Yield the embedding's backward, and the reduction of the root's gradients at the very end.

    Source:
        ``_backward_prefetch`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (v2.13.0), which goes back in an order
        that forwards without a backward add to; ``finalize_backward`` lets go of what nothing waited for.

    Args:
        whole: Gradients that the head has left, where they wait for those of the embedding.
    """
    communication = step.first.gathered_bytes + (step.units[0].reduced_bytes if of.reduces else 0)
    formed = around
    around += leaf_output(step)
    reached = step.taped.leaf is not None or step.first.reduced_bytes  # by backward, whose hook copies it
    if not step.stays and step.apart and reached:
        gathered = communication + step.first.copying_bytes
        yield with_gathered(step.end_instant, "copy of the embedding", around + step.arrived, gathered)
    behind = (
        0  # of the unit that the last forward without gradients ran last, gathered as if backward were to run it next
    )
    if reached and (gathers_tail_again(step) or (step.leaves_tail and not of.beside)) and not step.rest:
        behind = step.tail.buffer_bytes
        gathered = communication + behind + step.tail.cast_bytes
        yield with_gathered(step.end_instant, "gather of norm and head", around + step.arrived, gathered)
    communication += behind
    if not step.apart:
        formed += constant_form(Part.GRADIENTS, whole)
    for instant in tied_sum(step.inputs, step.taped, formed, "again" if of.beside else "first"):
        yield with_gathered(instant.name, instant.operation, instant.form, communication)
    for instant in played.embedding.backward:
        yield instant_with(instant.around(formed, "end of backward"), communication)
    if not of.reduces:
        return
    leaf = embedded_leaf(step.inputs, step.taped)
    if leaf is not ZERO:
        yield with_gathered("end of backward", "gradient of the embedded tokens", around + leaf, communication)
    # What the root has besides goes, and is reduced, before (``_root_post_backward_final_callback`` in _fsdp_state.py).
    reduced = step.rest.left_bytes if step.rest else 0
    behind += step.first.reduced_bytes - of_rest(step)
    for size in (of.formed(step.whole_of_first), of.scattered(step.first, step.whole_of_first)):
        form = around + constant_form(Part.GRADIENTS, size + reduced)
        yield with_gathered("end of backward", "reduction of the root", form, behind)
