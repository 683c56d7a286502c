"""Head and final norm where the head alone is a unit, and the norm is in the root's own: accelerate has found no norm."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

from memplan.step.engines.cut_sections import segments
from memplan.step.ranks.sharded_units import ShardedStep
from memplan.step.ranks.stored_head import finds_norm
from memplan.step.tapes.linear_forms import ZERO, Form, single_form
from memplan.step.tapes.moments import Instant, Played


def is_alone(step: ShardedStep) -> bool:
    """Tell whether the final norm is in the root's own unit, and the head in one of its own."""
    setup = step.inputs.setup
    in_unit = setup.stack.sharded_units != "accelerate" or finds_norm(step.inputs.spec, setup)
    return step.apart and not in_unit


def goes_before_norm(step: ShardedStep) -> bool:
    """Tell whether a frozen head that is a unit alone is let go of before the norm's backward.

    Source:
        ``RegisterPostBackwardFunction`` and ``post_backward`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
        (v2.13.0), which run when the gradient of what the head was given is there.
    """
    return is_alone(step) and not step.tail.reduced_bytes and step.taped.head.chunk is None and not step.flat


def saved_by_lone_norm(step: ShardedStep) -> Form:
    """Return what a final norm has saved that is in the root's own unit: it runs before the head is gathered, and backward behind its reduction."""
    if not is_alone(step):
        return ZERO
    head = step.taped.head
    own = {weight.name for weight in head.weights}
    below = takewhile(lambda node: own.isdisjoint(weight.name for weight in node.weights), head.section.tape.nodes)
    saved = dict.fromkeys(storage for node in below for storage in node.retained)
    return sum((single_form(*head.section.tape.storages[storage]) for storage in saved), ZERO)


def head_then_norm(step: ShardedStep, played: Played) -> Iterator[tuple[Played, int]]:
    """Yield the backward of head and norm, and what is gathered of them meanwhile: apart, where the head has gone before.

    Args:
        played: Both as they are played.
    """
    gathered = step.tail.gathered_bytes
    if not goes_before_norm(step):
        yield played, gathered
        return
    moments = list[Instant](), list[Instant]()
    behind = False
    for before, marked, mark in segments(step.taped.head.section, visits=True).backward:
        moments[behind].extend(before)
        behind = behind or (
            mark is not None and (mark.kind, mark.name) == ("backward", step.inputs.spec.names.final_norm)
        )
        moments[behind].extend([] if marked is None else [marked])
    for own, size in zip(moments, (gathered, 0), strict=True):
        yield replace(played, backward=own), size
