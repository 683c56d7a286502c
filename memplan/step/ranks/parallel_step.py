"""A training step under torch's ``fully_shard``: what is gathered and reduced lies around the same tapes.

Each layer is a unit, and the root is one with embedding, final norm and head; or, as a stack says, the embedding is one
and norm and head are another, whose weights stay from forward to their gradients' reduction. A unit's weights are
gathered into one buffer, then copied out of it into whole tensors; its gradients are formed whole,
copied into one buffer, reduced and scattered. The root stays gathered from the beginning of forward
to the end of backward, and its gradients stay whole as long. In backward the next unit is gathered
while one runs, and the buffer that its gradients were reduced from lives until the next reduction.

Source:
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (``wait_for_unshard``, ``post_backward``,
    ``_backward_prefetch``), _fsdp_state.py (``_root_post_backward_final_callback``) and
    _fsdp_collectives.py (v2.13.0); the loss lies outside the root, as in torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from memplan.model.model import Model
from memplan.model.spec import LayerRun
from memplan.step.blocks.block_settings import Regime
from memplan.step.ends_on_tape import evaluated_head
from memplan.step.head_instants import head_backward, root_bytes, tied_sum
from memplan.step.instants import StepForms, saved_by_layers, step_instants
from memplan.step.ranks.sharded_units import ShardedStep, sharded_step
from memplan.step.states.model_states import ModelStates
from memplan.step.step_inputs import buffers, tables_of_graph
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.played import Instant, Played
from memplan.step.tapes.taped_weight import Mode
from memplan.training.resolved import TrainingSetup

TOKENS = Quantity.TOKENS


def compile_sharded_step(model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> StepForms:
    """Return the closed forms of one rank's training step.

    Args:
        model: The model.
        setup: The training setup, with ``zero_stage: 3``.
        states: What the rank stores.
        regime: Which operations run.
    """
    step = sharded_step(model, setup, states, regime)
    inputs = step.inputs
    candidates = tuple(step_instants(inputs, step.taped, partial(_one_pass, step)))
    if setup.config.evaluation:
        kept = states.gradient_bytes if setup.config.zero_gradients == "fill" else 0
        candidates += tuple(_evaluated(step, constant_form(Part.GRADIENTS, kept)))
    return StepForms(
        candidates,
        buffers(inputs) + tables_of_graph(inputs),
        saved_by_layers(step.taped),
        inputs.optimizer.formula,
        step.stream_bytes,
        step.unit_gradients,
    )


def _one_pass(step: ShardedStep, base: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the instants of one forward and backward; whole gradients are always new ones."""
    saved, head = step.played.saved, step.taped.head
    yield from _forward(step, base)
    base += constant_form(Part.TEMPORARIES, root_bytes(step.inputs, step.taped.settings))
    yield from _head_unit(step, base + saved)
    whole = head.section.gradients or head.delayed_bytes
    if step.apart:
        yield from _tail_unit(step, base + saved, whole)
        whole = _stays(step.tail.kept_bytes, mode)
    yield from _layer_units(step, base, whole, mode)
    layers = sum(u.kept_bytes * run.count for u, run in zip(step.units, step.taped.runs, strict=True))
    yield from _first_unit(step, base + constant_form(Part.GRADIENTS, _stays(layers, mode) + whole * step.apart), whole)


def _stays(size: int, mode: Mode) -> int:
    """Return the gradients that a pass leaves besides those that were there before."""
    return size if mode == "first" else 0


def _instant(name: str, operation: str, form: Form, communication: int) -> Instant:
    return Instant(name, operation, form + constant_form(Part.TEMPORARIES, communication), communication)


def _with(instant: Instant, communication: int) -> Instant:
    """Return an instant with gathered weights and reduced gradients around it."""
    around = instant.around(constant_form(Part.TEMPORARIES, communication))
    return replace(around, communication=communication)


# -------------------------------------------------------------------- forward
def _forward(step: ShardedStep, base: Form) -> Iterator[Instant]:
    """Yield the layers' forward, the copies of the first and of the last layer out of their buffers, and the loss.

    A unit's buffer lives until the next unit has been copied out of its own; the last one until
    forward ends. The model's own logits stay until the loss is known.
    """
    played, runs = step.played, step.taped.runs
    held, stream = step.held_bytes, step.taped.embedding.output
    x = single_form(Part.ACTIVATIONS, TOKENS, stream.coefficient)
    first = held + step.first.gathered_bytes + 2 * step.units[0].gathered_bytes
    yield _instant("forward", "copy of the first layer", base + x, first)
    if step.apart:
        yield _instant("forward", "copy of the embedding", base, 2 * step.first.gathered_bytes)
        for moment in played.embedding.forward:
            yield _instant("forward", moment.operation, base + moment.form, 2 * step.first.gathered_bytes)
        ends = 2 * step.tail.gathered_bytes + step.last.gathered_bytes
        yield _instant("forward", "copy of norm and head", base + played.saved + x, ends)
    yield from _layers_forward(step, base + played.embedding.saved)
    under = step.neighbour(len(runs) - 1, runs[-1].count, -1)
    if under:
        form = base + played.saved - played.layers[step.taped.kinds[-1]].saved + x
        gathered = held + 2 * step.last.gathered_bytes + under.gathered_bytes
        yield _instant("forward", "copy of the last layer", form, gathered)
    yield from _loss_forward(step, base + played.saved)


def _layers_forward(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the forward of the first and of the last layer of each run, whose buffer is still there."""
    for run, kind, own in zip(step.taped.runs, step.taped.kinds, step.units, strict=True):
        part = step.played.layers[kind]
        gathered = step.held_bytes + 2 * own.gathered_bytes
        for position in dict.fromkeys((0, run.count - 1)):
            below = around + part.saved * position
            for moment in part.forward:
                yield _instant("forward", moment.operation, below + moment.form, gathered)
        around += part.saved * run.count


def _loss_forward(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the head's product, which is the model's last, and the loss outside it."""
    tail, head, settings = step.tail.gathered_bytes, step.taped.head, step.taped.settings
    inputs = next(n.inputs[0][0] for n in head.section.tape.nodes if n.name == "log_softmax")
    logits = single_form(Part.LOGITS, inputs.quantity, inputs.width * settings.block.compute_bytes)
    read = single_form(Part.LOGITS, inputs.quantity, inputs.coefficient)
    form = around + head.section.tape.saved_form() + read + constant_form(Part.LOGITS, settings.loss_bytes)
    form = form if settings.loss == "bf16" else form + logits
    yield _instant("forward", "log_softmax", form, tail)
    rows = _rows_of_head(step)
    buffer = tail if step.apart else step.last.gathered_bytes
    yield _instant("forward", "head", around + rows + logits, tail + buffer)


def _rows_of_head(step: ShardedStep) -> Form:
    """Return what the final norm is given and gives."""
    values = (step.taped.head.section.entry, step.taped.head.normed)
    return sum((single_form(Part.ACTIVATIONS, value.quantity, value.coefficient) for value in values), ZERO)


def _evaluated(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the instants of a forward without gradients: gathered as in training, and nothing is saved."""
    held, tail, stream = step.held_bytes, step.tail.gathered_bytes, step.taped.embedding.output
    x = single_form(Part.ACTIVATIONS, TOKENS, stream.coefficient)
    first = held + step.first.gathered_bytes + 2 * step.units[0].gathered_bytes
    yield _instant("evaluation", "copy of the first layer", around + x, first)
    runs, last = step.taped.runs, step.last.gathered_bytes
    if step.apart:
        yield _instant("evaluation", "copy of norm and head", around + x, 2 * tail + last)
    if under := step.neighbour(len(runs) - 1, runs[-1].count, -1):
        gathered = held + 2 * last + under.gathered_bytes
        yield _instant("evaluation", "copy of the last layer", around + x, gathered)
    own = dict(zip(step.taped.kinds, (2 * unit.gathered_bytes for unit in step.units), strict=True))
    for kind, section in enumerate(step.taped.layers):
        for moment in section.evaluated().forward:
            yield _instant("evaluation", moment.operation, around + moment.form, held + own[kind])
    for moment in evaluated_head(step.taped.settings, step.taped.weights).evaluated().forward:
        outside = "softmax" in moment.operation or "loss" in moment.operation
        buffer = 0 if outside else tail if step.apart else last
        yield _instant("evaluation", moment.operation, around + moment.form, tail + buffer)


# -------------------------------------------------------------------- backward
def _head_unit(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the backward of loss and head, from whose start on the last layer is gathered."""
    if step.apart and step.taped.head.logits is not None:
        logits = single_form(Part.LOGITS, TOKENS, step.taped.head.logits.coefficient)
        communication = step.tail.gathered_bytes + step.last.gathered_bytes + step.last.cast_bytes
        yield _instant(
            "loss backward", "gather of the last layer", around + _rows_of_head(step) + logits, communication
        )
    for instant in head_backward(step.inputs, step.taped.head, step.played.head, around, "first"):
        ahead = 0 if instant.name == "loss backward" else step.last.gathered_bytes
        yield _with(instant, step.tail.gathered_bytes + ahead)


def _tail_unit(step: ShardedStep, around: Form, whole: int) -> Iterator[Instant]:
    """Yield the reduction of the gradients of norm and head, whose weights are let go of before.

    Args:
        step: The rank's step.
        around: What lies around it.
        whole: Their gradients as they are formed.
    """
    arrived = single_form(Part.TEMPORARIES, TOKENS, step.taped.head.section.entry.coefficient)
    communication = step.tail.reduced_bytes + step.last.gathered_bytes
    for size in (whole, step.tail.kept_bytes + step.tail.last_bytes):
        form = around + arrived + constant_form(Part.GRADIENTS, size)
        yield _instant("head backward", "reduction of norm and head", form, communication)


def _layer_units(step: ShardedStep, base: Form, whole: int, mode: Mode) -> Iterator[Instant]:
    """Yield the backward of the layers: the last and the first of each run, and their neighbours.

    Args:
        step: The rank's step.
        base: What is there throughout.
        whole: Gradients that the head has left, which stay whole.
        mode: What becomes of gradients.
    """
    reduced, saved = 0, step.played.saved
    for index in reversed(range(len(step.units))):
        part, run = step.played.layers[step.taped.kinds[index]], step.taped.runs[index]
        each = _stays(step.units[index].kept_bytes, mode)
        rest = saved - part.saved * run.count
        for position in _positions(run):
            above = constant_form(Part.GRADIENTS, whole + reduced + each * (run.count - position))
            around = base + rest + part.saved * (position - 1) + above
            yield from _layer_unit(step, index, position, around, part)
        reduced += each * run.count
        saved = rest


def _positions(run: LayerRun) -> tuple[int, ...]:
    """Return the layers of a run that are looked at: between them, everything is linear."""
    return tuple(dict.fromkeys((run.count, max(1, run.count - 1), min(2, run.count), 1)))


def _layer_unit(step: ShardedStep, index: int, position: int, around: Form, played: Played) -> Iterator[Instant]:
    """Yield the backward of one layer: gathered, run, its gradients reduced.

    Args:
        step: The rank's step.
        index: Its run.
        position: Its place in that.
        around: What lies around it.
        played: It, played.
    """
    own, run = step.units[index], step.taped.runs[index]
    over, under = step.neighbour(index, position, 1), step.neighbour(index, position, -1)
    name = f"layer {run.first + position} backward"
    named = position + 1 in _positions(run) or position == run.count
    top = position == run.count and index == len(step.units) - 1
    before = "head backward" if top else f"layer {run.first + position + named} backward"
    if step.apart:
        over, under = over or step.tail, under or step.first
    root, waiting = step.held_bytes, over.reduced_bytes if over else 0
    next_gathered = under.gathered_bytes if under else 0
    ahead = next_gathered + (under.cast_bytes if under else 0)
    arrived = single_form(Part.TEMPORARIES, TOKENS, step.taped.head.section.entry.coefficient)
    gathered = root + waiting + own.gathered_bytes + max(own.gathered_bytes, ahead)
    yield _instant(before, "copy out of the gathered buffer", around + played.saved + arrived, gathered)
    for instant in played.backward:
        yield _with(instant.around(around, name), root + waiting + own.gathered_bytes + next_gathered)
    communication = root + own.reduced_bytes + next_gathered
    gradients = constant_form(Part.GRADIENTS, step.taped.layer_of(index).gradients)
    yield _instant(name, "copy into the buffer of the reduction", around + arrived + gradients, communication)
    gradients = constant_form(Part.GRADIENTS, own.kept_bytes + own.last_bytes)
    yield _instant(name, "reduction", around + arrived + gradients, communication)


def _first_unit(step: ShardedStep, around: Form, whole: int) -> Iterator[Instant]:
    """Yield the embedding's backward, and the reduction of the root's gradients at the very end.

    Args:
        step: The rank's step.
        around: What lies around it.
        whole: Gradients that the head has left, where they wait for those of the embedding.
    """
    communication = step.first.gathered_bytes + step.units[0].reduced_bytes
    formed = around
    if step.apart:
        arrived = single_form(Part.TEMPORARIES, TOKENS, step.taped.embedding.output.coefficient)
        gathered = communication + step.first.gathered_bytes
        yield _instant("layer 1 backward", "copy of the embedding", around + arrived, gathered)
    else:
        formed += constant_form(Part.GRADIENTS, whole)
    for instant in tied_sum(step.inputs, step.taped, formed, "first"):
        yield _instant(instant.name, instant.operation, instant.form, communication)
    for instant in step.played.embedding.backward:
        yield _with(instant.around(formed, "end of backward"), communication)
    for size in (_first_gradients(step), step.first.kept_bytes + step.first.last_bytes):
        form = around + constant_form(Part.GRADIENTS, size)
        yield _instant("end of backward", "reduction of the root", form, step.first.reduced_bytes)


def _first_gradients(step: ShardedStep) -> int:
    """Return the whole gradients of the first unit: of the embedding, or of the root, where a tied one counts once."""
    ends = [entry for entry in step.inputs.states.tensors if "{}" not in entry.tensor.name]
    return sum(entry.formed_bytes for entry in ends if not step.apart or entry.tensor.role == "embedding")
