"""Tensors and operations as a tape records them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_weight import Weight

Sizes = Sequence[tuple[Quantity, int]]
"""Bytes for each unit of some quantities."""


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of a tape; views share a storage."""

    storage: int
    quantity: Quantity
    coefficient: int
    element_bytes: int
    needs_gradient: bool = True
    # Whether it is in the 16-bit dtype that products are not computed in: as wide, and yet to be cast.
    foreign: bool = False
    # Bytes of its gradient for each unit of the quantity, where they are more than its own.
    gradient_coefficient: int = 0
    # Whether a head's numbers lie between those of others, so that a product of matrices may copy them first.
    apart: bool = False
    # Whether it has one dimension of rows, so that a product of it is none of a view (``_flatten_nd_linear`` in Linear.cpp).
    flat: bool = False
    # Whether autograd has it for a parameter: autocast casts it once in a region, where it is in fp32.
    leaf: bool = False

    @property
    def width(self) -> int:
        """Elements for each unit of the quantity."""
        return self.coefficient // self.element_bytes


class Pass(IntEnum):
    """How an operation's backward makes the gradient of an input."""

    NEW = 0  # a new tensor of the input's size
    SAME = 1  # the gradient of the output itself, as for sums and views
    VIEW = 2  # a new tensor, handed on as a view of itself; autograd never adds into views in place
    OVER = 3  # written over a tensor that the operation has saved: the input, or what its traits say


NEW, SAME, VIEW, OVER = Pass.NEW, Pass.SAME, Pass.VIEW, Pass.OVER


class Reduction(NamedTuple):
    """A sum over the rows of a matrix, for which CUDA's blocks keep partial sums (``reduction_workspaces``)."""

    quantity: Quantity  # What rows are proportional to
    times: int  # Rows for each unit of it
    columns: int  # Length of the result


class Traits(NamedTuple):
    """What an operation does besides reading its inputs and forming its outputs."""

    # Whether backward saves anything, be it a table or a number; by default, what is saved and parameters that are no
    # codes.
    packs: bool | None = None
    scratch: Sizes = ()  # Scratch memory of its forward
    # Temporaries of forming its result by operators of torch, as a weight's ``decoding_parts``.
    decoding: tuple[int, ...] = ()
    workspace: Sizes = ()  # Scratch memory of its backward
    # Gradients that are cast from wider ones in the workspace, when the operation's own backward is done.
    casts: Sizes = ()
    reduces: Reduction | None = None  # The sum over rows that forms a weight's gradient
    product: bool = False  # Whether selective checkpointing saves its results
    custom: bool = False  # Whether it is a function written in Python, which saves its tensors when it is done
    matrices: bool = False  # Whether it is the product of two matrices and nothing else (``aten.mm``)
    adds_bias: bool = False  # Whether the kernel of its product adds a bias that is not among its weights
    # Whether gradients of its weights, the last one's first, are stored before that of its input is added to others, as
    # those of a product with a bias are that no copies stand for: of the nodes that are ready, autograd runs those first
    # that store, and then the one recorded last, where the weight is transposed after the input has been flattened; it is
    # before that without a bias (``_flatten_nd_linear`` in aten/src/ATen/native/Linear.cpp, ``CompareNodeTaskTime`` in
    # torch/csrc/autograd/engine.h, v2.13.0).
    stores_weights_first: bool = False
    batched: bool = False  # Whether it is products of stacked matrices (``aten.bmm``)
    forms_last: bool = False  # Whether its backward forms gradients when all else that it takes is there
    # Gradients that its forward has made and saved: those of inputs passed ``OVER``, then those of weights.
    made: tuple[Value, ...] = ()
    own_workspace: bool = False  # Whether its product is bitsandbytes', which has a workspace of its own
    attributes: tuple[Value, ...] = ()  # What its node has as attributes, which hooks of checkpointing do not see


PLAIN = Traits()
SAVES_NOTHING = Traits(packs=False)


@dataclass(slots=True, eq=False)
class Node:
    """The backward of one operation."""

    name: str
    inputs: tuple[tuple[Value, Pass], ...]  # Inputs that need a gradient, with the way it is made
    outputs: tuple[Value, ...]
    saved: tuple[int, ...]  # Storages that stay until it has run
    weights: tuple[Weight, ...]
    traits: Traits
    instant: str
    # Whether it saves any tensor, weights and tables included: under checkpointing, the first such node that backward
    # reaches has the part computed again.
    packs: bool
    attributes: tuple[int, ...] = ()  # Storages that its node has as attributes, until the graph goes

    @property
    def retained(self) -> tuple[int, ...]:
        """Storages that stay behind forward, however it holds them."""
        return (*self.saved, *self.attributes)

    @property
    def weight_first(self) -> bool:
        """Whether backward forms the gradient of the weight before that of the input, as a product without bias does.

        Source:
            derivatives.yaml (v2.13.0): a formula's results are formed in the order of their names, ``mat2`` before
            ``self``, and with a bias ``mat1``, ``mat2``, ``self``.
        """
        alone = len(self.weights) == 1 and not self.traits.custom
        return alone and self.weights[0].is_matrix and not self.weights[0].coded


@dataclass(slots=True, eq=False)
class Operation:
    """One operation of forward."""

    name: str
    makes: tuple[int, ...]  # Storages that it allocates
    weights: tuple[Weight, ...]  # Parameters that it reads, decoded first where they are codes
    traits: Traits  # What else it does
    node: Node | None  # Its backward, or None
    # Whether its node packs its tensors when the results are there, and not before: results that it saves, and
    # functions written in Python.
    saves_last: bool
