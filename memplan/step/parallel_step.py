"""A training step under torch's ``fully_shard``: what is gathered and reduced lies around the same tapes.

Each layer is a unit, and the root is one with embedding, final norm and head. A unit's weights are
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
from dataclasses import dataclass, replace
from functools import partial

from memplan.model.model import Model
from memplan.model.spec import LayerRun
from memplan.step.blocks.block_settings import Regime
from memplan.step.ends_on_tape import evaluated_head
from memplan.step.head_instants import head_backward, root_bytes, tied_sum
from memplan.step.instants import StepForms, saved_by_layers, step_instants
from memplan.step.model_on_tape import ModelOnTape, PlayedModel, inventory_first, model_on_tape
from memplan.step.states.model_states import ModelStates, model_states
from memplan.step.states.optimizer_scratch import sharded_clipping_bytes, step_temporaries
from memplan.step.states.parallel_shards import Unit, gathered_setup, unit
from memplan.step.step_inputs import StepInputs, buffers, tables_of_graph
from memplan.step.tapes.linear_forms import Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.played import Instant, Played
from memplan.step.tapes.taped_weight import Mode
from memplan.training.resolved import TrainingSetup

TOKENS = Quantity.TOKENS


@dataclass(frozen=True, slots=True)
class ShardedStep:
    """One rank's step: tapes of gathered weights, and the units that weights are gathered in.

    Attributes:
        inputs: What is compiled; its states are those of whole weights.
        taped: The model on tape.
        played: Its parts played; whole gradients are always new ones.
        root: The unit of embedding, final norm and head.
        units: For each run of layers, the unit that one of them is.
    """

    inputs: StepInputs
    taped: ModelOnTape
    played: PlayedModel
    root: Unit
    units: tuple[Unit, ...]

    @property
    def last(self) -> Unit:
        """The unit of the last layer."""
        return self.units[-1]

    @property
    def stream_bytes(self) -> int:
        """Buffers that weights are gathered into, which come from the memory of a stream of their own.

        Two are alive at a time: the root's and the first layer's, or those of two layers.
        """
        first, *layers = [self.root.gathered_bytes, *(unit.gathered_bytes for unit in self.units)]
        return max(first + layers[0], 2 * max(layers))

    @property
    def unit_gradients(self) -> tuple[int, ...]:
        """The rank's gradients of each unit, which are one tensor: what a reduction puts out."""
        layers = zip(self.units, self.taped.runs, strict=True)
        return (self.root.kept_bytes, *(unit.kept_bytes for unit, run in layers for _ in range(run.count)))

    def neighbour(self, index: int, position: int, step: int) -> Unit | None:
        """Return the unit of the layer that comes after (1) or before (-1) one of a run, or None."""
        if 1 <= position + step <= self.taped.runs[index].count:
            return self.units[index]
        other = index + step
        return self.units[other] if 0 <= other < len(self.units) else None


def compile_sharded_step(model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> StepForms:
    """Return the closed forms of one rank's training step.

    Args:
        model: The model.
        setup: The training setup, with ``zero_stage: 3``.
        states: What the rank stores.
        regime: Which operations run.
    """
    step = _sharded_step(model, setup, states, regime)
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


def _sharded_step(model: Model, setup: TrainingSetup, states: ModelStates, regime: Regime) -> ShardedStep:
    """Return the tapes of gathered weights, and their units."""
    whole = gathered_setup(setup)
    optimizer, clipping = step_temporaries(setup, states.tensors), sharded_clipping_bytes(states.tensors)
    whole_states = model_states(whole, model.inventory, ())
    inputs = StepInputs(model.spec, whole, whole_states, regime, states.gradient_bytes, optimizer, clipping)
    taped = model_on_tape(inputs)
    played = taped.played("first", inputs.recomputation)
    root = unit([tensor for tensor in model.inventory if "{}" not in tensor.name], setup)
    layers = [tensor for tensor in model.inventory if "{}" in tensor.name]
    units = (
        unit([tensor for tensor in layers if tensor.first == inventory_first(model.spec, run)], setup)
        for run in taped.runs
    )
    return ShardedStep(inputs, taped, played, root, tuple(units))


def _one_pass(step: ShardedStep, base: Form, mode: Mode) -> Iterator[Instant]:
    """Yield the instants of one forward and backward; whole gradients are always new ones."""
    saved, head = step.played.saved, step.taped.head
    yield from _forward(step, base)
    base += constant_form(Part.TEMPORARIES, root_bytes(step.inputs, step.taped.settings))
    yield from _head_unit(step, base + saved)
    whole = head.section.gradients or head.delayed_bytes
    yield from _layer_units(step, base, whole, mode)
    layers = sum(u.kept_bytes * run.count for u, run in zip(step.units, step.taped.runs, strict=True))
    yield from _root_unit(step, base + constant_form(Part.GRADIENTS, _stays(layers, mode)), whole)


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
    root, stream = step.root.gathered_bytes, step.taped.embedding.output
    x = single_form(Part.ACTIVATIONS, TOKENS, stream.coefficient)
    first = 2 * root + 2 * step.units[0].gathered_bytes
    yield _instant("forward", "copy of the first layer", base + x, first)
    yield from _layers_forward(step, base + played.embedding.saved)
    under = step.neighbour(len(runs) - 1, runs[-1].count, -1)
    if under:
        form = base + played.saved - played.layers[step.taped.kinds[-1]].saved + x
        gathered = root + 2 * step.last.gathered_bytes + under.gathered_bytes
        yield _instant("forward", "copy of the last layer", form, gathered)
    yield from _loss_forward(step, base + played.saved)


def _layers_forward(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the forward of the first and of the last layer of each run, whose buffer is still there."""
    for run, kind, own in zip(step.taped.runs, step.taped.kinds, step.units, strict=True):
        part = step.played.layers[kind]
        gathered = step.root.gathered_bytes + 2 * own.gathered_bytes
        for position in dict.fromkeys((0, run.count - 1)):
            below = around + part.saved * position
            for moment in part.forward:
                yield _instant("forward", moment.operation, below + moment.form, gathered)
        around += part.saved * run.count


def _loss_forward(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the head's product, which is the model's last, and the loss outside it."""
    root, head, settings = step.root.gathered_bytes, step.taped.head, step.taped.settings
    inputs = next(n.inputs[0][0] for n in head.section.tape.nodes if n.name == "log_softmax")
    logits = single_form(Part.LOGITS, inputs.quantity, inputs.width * settings.block.compute_bytes)
    read = single_form(Part.LOGITS, inputs.quantity, inputs.coefficient)
    form = around + head.section.tape.saved_form() + read + constant_form(Part.LOGITS, settings.loss_bytes)
    form = form if settings.loss == "bf16" else form + logits
    yield _instant("forward", "log_softmax", form, root)
    rows = (single_form(Part.ACTIVATIONS, v.quantity, v.coefficient) for v in (head.section.entry, head.normed))
    yield _instant("forward", "head", sum(rows, around + logits), root + step.last.gathered_bytes)


def _evaluated(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the instants of a forward without gradients: gathered as in training, and nothing is saved."""
    root, stream = step.root.gathered_bytes, step.taped.embedding.output
    x = single_form(Part.ACTIVATIONS, TOKENS, stream.coefficient)
    yield _instant("evaluation", "copy of the first layer", around + x, 2 * root + 2 * step.units[0].gathered_bytes)
    runs = step.taped.runs
    if under := step.neighbour(len(runs) - 1, runs[-1].count, -1):
        gathered = root + 2 * step.last.gathered_bytes + under.gathered_bytes
        yield _instant("evaluation", "copy of the last layer", around + x, gathered)
    own = dict(zip(step.taped.kinds, (2 * unit.gathered_bytes for unit in step.units), strict=True))
    for kind, section in enumerate(step.taped.layers):
        for moment in section.evaluated().forward:
            yield _instant("evaluation", moment.operation, around + moment.form, root + own[kind])
    for moment in evaluated_head(step.taped.settings, step.taped.weights).evaluated().forward:
        buffer = 0 if "softmax" in moment.operation or "loss" in moment.operation else step.last.gathered_bytes
        yield _instant("evaluation", moment.operation, around + moment.form, root + buffer)


# -------------------------------------------------------------------- backward
def _head_unit(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the backward of loss and head, from whose start on the last layer is gathered."""
    for instant in head_backward(step.inputs, step.taped.head, step.played.head, around, "first"):
        ahead = 0 if instant.name == "loss backward" else step.last.gathered_bytes
        yield _with(instant, step.root.gathered_bytes + ahead)


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
    before = f"layer {run.first + position + named} backward" if over else "head backward"
    root, waiting = step.root.gathered_bytes, over.reduced_bytes if over else 0
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


def _root_unit(step: ShardedStep, around: Form, whole: int) -> Iterator[Instant]:
    """Yield the embedding's backward, and the reduction of the root's gradients at the very end."""
    communication = step.root.gathered_bytes + step.units[0].reduced_bytes
    formed = around + constant_form(Part.GRADIENTS, whole)
    for instant in tied_sum(step.inputs, step.taped, formed, "first"):
        yield _instant(instant.name, instant.operation, instant.form, communication)
    for instant in step.played.embedding.backward:
        yield _with(instant.around(formed, "end of backward"), communication)
    for size in (_root_gradients(step.inputs.states), step.root.kept_bytes + step.root.last_bytes):
        form = around + constant_form(Part.GRADIENTS, size)
        yield _instant("end of backward", "reduction of the root", form, step.root.reduced_bytes)


def _root_gradients(states: ModelStates) -> int:
    """Return the whole gradients of embedding, final norm and head; a tied one counts once."""
    return sum(entry.formed_bytes for entry in states.tensors if "{}" not in entry.tensor.name)
