"""What checkpointing saves of a part of the step, and what is marked while the part is played."""

from typing import Literal, NamedTuple

from memplan.step.tapes.taped_operations import Node, Operation

Checkpointing = Literal["none", "selective", "full"]


class Recomputation(NamedTuple):
    """What forward saves of a part, and how the rest is computed again."""

    # ``none`` saves what backward needs, ``full`` the part's input, ``selective`` results of products besides.
    kind: Checkpointing
    # Whether ``selective`` leaves out every second product of two matrices, and those of stacked matrices.
    alternate: bool = False
    # Whether the part is computed again to its end, and not only as far as backward needs it (``early_stop=False`` of
    # torch/utils/checkpoint.py).
    whole: bool = False
    # Whether it is computed again, whole, before a backward of its own (``CheckpointFunction`` in
    # torch/utils/checkpoint.py), which has names for the part's input, its output and the gradient of that.
    reentrant: bool = False


NOTHING_AGAIN = Recomputation("none")


class Mark(NamedTuple):
    """Something that happens beside the operations of a part, for whom others have to follow it."""

    place: int  # The moment, among those that are noted
    # A weight's gradient leaves; a module begins, or has ended, in forward, in what is computed again, in backward;
    # what is computed again has saved a module's weights, or its backward has let go of them.
    kind: Literal[
        "gradient", "forward", "again", "backward", "saved", "unsaved", "left forward", "left again", "left backward"
    ]
    name: str  # The weight, or the module


Way = Literal["forward", "again", "backward"]
"""How a module runs."""

WITHOUT_MOMENT = ("saved", "unsaved", "left forward", "left again", "left backward")
"""Kinds of marks that stand between two moments."""

ACTIVATION = "activation"
"""Name of an operation that is a module without weights, as a norm may be."""


def module_of(operation: Operation | Node) -> str:
    """Return the module that an operation stands for: its weights', one without weights, or none."""
    if operation.weights:
        return operation.weights[0].name.rpartition(".")[0]
    return ACTIVATION if operation.name == ACTIVATION or operation.name.startswith("norm ") else ""
