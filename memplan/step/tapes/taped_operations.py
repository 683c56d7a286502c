"""Tensors, parameters and operations as a tape records them: what products read, and how gradients fare."""

from collections.abc import Sequence
from dataclasses import dataclass as mutable
from dataclasses import replace
from enum import IntEnum
from typing import Literal, NamedTuple

from memplan.documents.frozen_values import dataclass
from memplan.step.tapes.linear_forms import Form, Part, Quantity, Storage, constant_form

Mode = Literal["first", "again", "filled", "layer", "joins", "joins-again"]
"""How weight gradients fare: stored from now on, added to ones already there, added to zeros where the last step left some,
or used at once; or joined to what another forward of the same loss has formed, be it stored or added to what is there."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter tensor as an operation of a tape sees it."""

    name: str  # Its name, for explanations
    trainable: bool = True  # Whether backward forms a gradient for it
    element_bytes: int = 2  # Bytes of an element as products and norms read it
    # A copy in the compute dtype made for the product: dequantised, and made again for backward; or cast by autocast,
    # and saved from forward to backward.
    copy_bytes: int = 0
    copy_saved: bool = False  # Whether that copy is saved (autocast) or made anew (dequantised)
    own_bytes: int = 0  # The weight in its own dtype
    formed_bytes: int = 0  # Its gradient as backward forms it, in the compute dtype
    gradient_bytes: int = 0  # Its gradient as it is stored; the formed one itself where ``converted`` is false
    gradient_scale_bytes: int = 0  # Of the stored gradient, the scale of FP8: a tensor of its own
    converted: bool = False  # Whether storing makes another tensor
    # Whether it is formed in rows that lie apart, and copied before anything else where none is there to add it to.
    spaced: bool = False
    # Whether the weight is no float parameter; its gradient is stored while the operation that formed it still holds
    # its inputs.
    coded: bool = False
    add_bytes: int = 0  # Temporaries of rounding into, and of adding to, a gradient store
    delayed: bool = False  # Whether its gradient waits for another to be added (a tied head), whatever the mode
    # Whether what waits, with the other gradient added in place, is then the gradient as it is stored.
    joins_as_stored: bool = False
    shared: bool = False  # Whether a gradient of it has been stored before, to which this one is added
    # Whether the bundled optimizer has moved the gradient into its store, and the one that was formed is gone, before
    # an update inside backward.
    handed_over: bool = False
    update_bytes: int = 0  # Temporaries of updating this tensor alone, for updates inside backward
    rows: int = 0  # Its first dimension
    columns: int = 0  # Its last dimension
    foreign: bool = False  # Whether it is stored in the 16-bit dtype that products are not computed in
    emptied: bool = False  # Whether a step takes its gradient away even where gradients are filled with zeros
    summed: bool = False  # Whether autograd adds up several gradients of it before it is stored
    decoding_sizes: tuple[int, ...] = ()  # What making a dequantised copy takes besides
    # Scales of its codes in fp32 where these are codes themselves: formed, and then added to their mean, for a product,
    # and formed alone for backward.
    scales_bytes: int = 0
    # The weight in the dtype that it was quantised from, where backward decodes it so and then casts it.
    decoded_bytes: int = 0
    # What decoding rows that are looked up takes for each that is decoded at a time, and once.
    row_decoding: tuple[tuple[int, ...], int] = (), 0
    # Temporaries of forming that copy by operators of torch, in order; negative for one that goes when the next is there.
    decoding_parts: tuple[int, ...] = ()
    decoded_alike: bool = False  # Whether a product of forward decodes it as one of backward does
    integers: bool = False  # Whether a product multiplies its codes, and not a decoded copy
    # Whether its codes are decoded when a module is asked for its weight, so that products read floats
    # (``BnbNF4Parametrization`` in axolotl/utils/nf4.py, 0.21.0).
    parametrised: bool = False
    # Whether a product forms its gradient as it is stored, and not the transpose, which is looked at: it is stored (in, out).
    direct: bool = False
    cast_as_view: bool = False  # Whether autocast casts a view of it, of whose gradient its own is a view

    @property
    def gradient_codes_bytes(self) -> int:
        """The block that holds its gradient as it is stored; the scale, of 4 bytes in the small pool, is not told."""
        return self.gradient_bytes - self.gradient_scale_bytes

    @property
    def decoding(self) -> list[Storage]:
        """What making a dequantised copy takes besides."""
        return [(Part.TEMPORARIES, Quantity.ONE, size) for size in self.decoding_sizes if size]

    @property
    def scales(self) -> list[Storage]:
        """Its scales decoded."""
        return [(Part.TEMPORARIES, Quantity.ONE, self.scales_bytes)] if self.scales_bytes else []

    @property
    def decoding_parts_again(self) -> tuple[int, ...]:
        """What forming the copy for backward takes, as ``decoding_parts``: scales are gone when the weight is cast."""
        scales = (-self.scales_bytes,) if self.scales_bytes else ()
        return self.decoding_parts or (*scales, *((self.decoded_bytes,) if self.decoded_bytes else ()))

    @property
    def decoding_again(self) -> list[Storage]:
        """What decoding for backward takes besides, when the copy that is read is there."""
        return [] if self.decoded_bytes else self.decoding

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions or more."""
        return self.own_bytes > self.rows * self.element_bytes or self.rows != self.columns

    def own_mode(self, mode: Mode) -> Mode:
        """Return how this weight's gradient fares where gradients in general fare so."""
        if self.summed:
            return "again"
        if mode != "filled":
            return mode
        return "first" if self.emptied else "again"

    @property
    def casts_gradient(self) -> bool:
        """Whether the gradient of autocast's copy is cast to the weight's own dtype."""
        formed = self.copy_bytes == self.formed_bytes or (self.spaced and self.copy_bytes > 0)
        return self.copy_saved and formed and self.copy_bytes < self.own_bytes

    def is_made_anew(self, mode: Mode) -> bool:
        """Tell whether the gradient that is formed is cast, or copied, and let go before anything else happens."""
        return self.casts_gradient or (self.spaced and (mode != "again" or self.converted))

    def joining_bytes(self, *, product: bool) -> int:
        """Return what it takes besides to add its gradient to one that waits: in place where that is a plain tensor, and no view."""
        if self.is_made_anew("again"):
            return 2 * self.own_bytes - self.formed_bytes if self.cast_as_view else self.own_bytes
        return self.formed_bytes if product and not self.direct else 0

    def stays(self, mode: Mode) -> bool:
        """Tell whether the gradient that is formed is the one that is stored, or used at once as a stored one would be."""
        return mode in ("first", "layer") and not self.converted and self.gradient_bytes == self.formed_bytes

    def stays_summed(self, mode: Mode) -> bool:
        """Tell the same of a gradient that several have been added up to."""
        return self.joins_as_stored and mode in ("first", "layer") if self.delayed else self.stays(mode)

    def made_bytes(self, mode: Mode) -> int:
        """Return the gradient that storing makes of the one that is formed, to be kept or used at once."""
        return self.gradient_bytes if mode in ("first", "layer") and not self.stays(mode) else 0

    def storing_form(self, mode: Mode) -> Form:
        """Return what storing takes (:meth:`storing_bytes`) by component."""
        made = 0 if self.fullest_as_cast(mode) else self.made_bytes(mode)
        rest = self.storing_bytes(mode) - made
        return constant_form(Part.GRADIENTS, made) + constant_form(Part.TEMPORARIES, rest)

    def fullest_as_cast(self, mode: Mode) -> bool:
        """Tell whether storing takes most as the gradient is made anew in the weight's own dtype, before what is stored is made."""
        anew = self.is_made_anew(self.own_mode(mode))
        other = anew and self.gradient_bytes != self.own_bytes
        return other and self.storing_bytes(mode) == self.own_bytes

    def storing_bytes(self, mode: Mode) -> int:
        """Return what storing, adding or using up the gradient takes besides the gradient as it was formed.

        Autocast's copy has a gradient of its own, which is cast to the weight's dtype and let go
        before anything else happens.
        """
        mode = self.own_mode(mode)
        anew = self.is_made_anew(mode)
        converted = self.converted and not self.casts_gradient
        converted |= anew and self.gradient_bytes != self.own_bytes
        stored = self.gradient_bytes if converted and mode != "again" else 0
        added = self.add_bytes if converted or mode == "again" else 0
        update = self.update_bytes if mode == "layer" else 0
        if self.handed_over:
            update -= self.own_bytes if anew else self.formed_bytes
        extra = stored + max(added, update)
        return max(self.own_bytes, self.own_bytes - self.formed_bytes + extra) if anew else extra


def summed_as_stored(weight: Weight) -> Weight:
    """Return a weight whose gradient is formed in its own dtype, whatever products are computed in, and stored as it is."""
    formed = weight.own_bytes if weight.trainable else 0
    converted = weight.converted and weight.gradient_bytes != formed
    return replace(weight, copy_bytes=0, copy_saved=False, formed_bytes=formed, converted=converted)


Sizes = Sequence[tuple[Quantity, int]]
"""Bytes for each unit of some quantities."""


@mutable(slots=True, eq=False)
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
    sums_last: bool = False  # Whether the first input's wide gradient is cast, and gone, before the others' are summed
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
    gone: Sizes = ()  # What that backward takes besides, and has let go of when it forms them
    used_up: Sizes = ()  # What it takes behind the first of its workspace, and has let go of when the rest is there
    makes_last: bool = False  # Whether its forward forms results when its scratch memory is there
    # Gradients that its forward has made and saved: those of inputs passed ``OVER``, then those of weights.
    made: tuple[Value, ...] = ()
    own_workspace: bool = (
        False  # Whether it takes none of cuBLAS: bitsandbytes' products have their own, exchanges none
    )
    attributes: tuple[Value, ...] = ()  # What its node has as attributes, which hooks of checkpointing do not see


PLAIN = Traits()
SAVES_NOTHING = Traits(packs=False)


@mutable(slots=True, eq=False)
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
    between: bool = False  # Whether its moments lie between those of others that are alike, as its operation's do

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


@mutable(slots=True, eq=False)
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
    # Whether its moments lie between those of alike operations before and behind it, each as much above the last: the
    # fullest is never one of them.
    between: bool = False
