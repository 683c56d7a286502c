"""Forwards without gradients of one rank that holds shards: of an evaluation, of a reference model."""

from collections.abc import Iterator

from memplan.step.alive_around_layers import passed_on
from memplan.step.kernels.layer_arguments import layer_arguments
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import (
    EMBEDDING,
    EVALUATION,
    HEAD,
    beside_reference,
    evaluated_model,
    forward_only_instants,
    parts_alone,
    reference_model,
)
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.step_inputs import tables_of_graph
from memplan.step.tapes.linear_forms import ZERO, Form, Part, constant_form, single_form
from memplan.step.tapes.moments import Instant


def with_gathered(name: str, operation: str, form: Form, communication: int) -> Instant:
    """Return an instant of so many bytes of gathered weights and reduced gradients besides what is there."""
    return Instant(name, operation, form + constant_form(Part.TEMPORARIES, communication), communication)


def instant_with(instant: Instant, communication: int) -> Instant:
    """Return an instant with gathered weights and reduced gradients around it."""
    form = instant.form + constant_form(Part.TEMPORARIES, communication)
    return Instant(instant.name, instant.operation, form, instant.communication + communication, instant.reduces)


def arguments_of(step: ShardedStep) -> Form:
    """Return what a forward has made for its layers, tables included."""
    inputs = step.inputs
    return layer_arguments(inputs.spec, inputs.setup, masked=inputs.regime.masked) + tables_of_graph(inputs)


def passed_to_backward(step: ShardedStep) -> Form:
    """Return what layers have been called with that the graph of the loss has, if it has any of it."""
    return ZERO if step.taped.lowest_turned is None else passed_on(step.inputs)


def entry_of(step: ShardedStep) -> Form:
    """Return what a layer is given."""
    stream = step.taped.embedding.output
    return single_form(Part.ACTIVATIONS, stream.quantity, stream.coefficient)


def evaluated(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield the instants of forwards that evaluate: gathered as in training, and nothing is saved; those after one find norm and head there."""
    taped = evaluated_model(step.inputs, step.taped)
    for finds_tail in (False, True) if step.leaves_tail else (False,):
        yield from _through_units(step, taped, around, EVALUATION, finds_tail=finds_tail)


def referred(step: ShardedStep, around: Form) -> Iterator[Instant]:
    """Yield what lies between a forward and its backward: a reference model's forward, and metrics.

    One of its own is a single unit, whose buffer is there until its forward ends; the model without adapters is gathered once more,
    unit by unit, and so is one of its own under FSDP1.

    Source:
        ``prepare_fsdp`` in trl/models/utils.py (1.16.0), which wraps no part of it but under FSDP1; ``_post_forward`` in
        torch/distributed/fsdp/_fully_shard/_fsdp_state.py (v2.13.0).
    """
    inputs, reference = step.inputs, step.reference
    by_unit = step.flat or inputs.setup.config.method.reference_model == "adapter-off"
    if by_unit and (bare := reference_model(inputs, step.taped)):
        yield from _through_units(step, bare, around + beside_reference(inputs), "forward", finds_tail=True)
        return
    gathered = step.tail.gathered_bytes + step.below_head + (reference.copied_bytes if reference else 0)
    for moment in forward_only_instants(inputs, step.taped, around):
        yield with_gathered("forward", moment.operation, moment.form, gathered)


def root_of_reference_bytes(step: ShardedStep) -> int:
    """Return whole weights of a reference model's root under FSDP1, which each forward leaves for the next: no backward lets go of them.

    Source:
        ``_post_forward_reshard`` in torch/distributed/fsdp/_runtime_utils.py (v2.13.0).
    """
    resident = step.inputs.setup.config.method.reference_model == "resident"
    return step.first.gathered_bytes if step.flat and resident else 0


def gathers_tail_again(step: ShardedStep) -> bool:
    """Tell whether each backward, which goes back in an order that forwards without one add to, ends with a gather of norm and head."""
    bare = step.inputs.setup.config.method.reference_model == "adapter-off"
    return step.called_before or (bare and step.apart and not step.head_by_hand)


def _through_units(
    step: ShardedStep, taped: ModelOnTape, around: Form, name: str, *, finds_tail: bool
) -> Iterator[Instant]:
    """Yield the instants of a forward without gradients, unit by unit.

    What layers are called with, such as a mask and rotary tables, is gone when the head runs.

    Args:
        taped: The model as it runs.
        finds_tail: Whether norm and head are there already, where they are a unit of their own.
    """
    beside = step.tail.gathered_bytes if finds_tail and step.apart else 0
    resident, form = step.root_weight_bytes, around + arguments_of(step) + entry_of(step)
    entered = step.first.buffer_bytes if step.apart or not finds_tail else 0
    first, last = entered + step.units[0].copied_bytes, step.last.buffer_bytes
    yield with_gathered(name, "copy of the first layer", form, resident + first + beside)
    if step.apart and not step.head_by_hand and not beside:
        yield with_gathered(name, "copy of norm and head", form, step.tail.copied_bytes + last)
    if under := step.neighbour(len(step.units) - 1, step.taped.runs[-1].count, -1):
        gathered = resident + step.last.copied_bytes + under.buffer_bytes + beside
        yield with_gathered(name, "copy of the last layer", form, gathered)
    waits = last if beside or step.head_by_hand or not step.apart else step.tail.buffer_bytes
    own = {kind: resident + size + beside for kind, size in _sizes(step, taped)}
    own[EMBEDDING] = beside + (step.first.copied_bytes if step.apart else resident)
    called = arguments_of(step)
    for kind, moment in parts_alone(step.inputs, taped, around, name, called, loss_inside=step.loss_inside):
        moment = moment.around(called * -1) if kind == EMBEDDING else moment  # they are made behind it
        outside = not step.loss_inside and ("softmax" in moment.operation or "loss" in moment.operation)
        behind = step.tail.gathered_bytes * (1 + (finds_tail and step.head_by_hand)) + (0 if outside else waits)
        yield instant_with(moment, behind if kind == HEAD else own[kind])


def _sizes(step: ShardedStep, taped: ModelOnTape) -> Iterator[tuple[int, int]]:
    """Yield what is gathered while a layer of each kind runs."""
    for kind, run in zip(taped.kinds, taped.runs, strict=True):
        index = max(place for place, other in enumerate(step.taped.runs) if other.first <= run.first)
        own = step.units[index]
        yield kind, own.gathered_bytes if step.flat else own.copied_bytes
