"""How a stack builds models, and the rotary tables that these keep."""

from typing import Literal

from memplan.documents.frozen_values import dataclass


@dataclass(frozen=True, slots=True)
class StackModels:
    """How a stack builds models, where that is not as they were released."""

    families: tuple[str, ...]  # Families that it has code for; nothing stands for all of them
    # ``released``; or one projection yields query, key and value in every model, as ``views`` of its result or as
    # ``copies``; or none does in any, nor gate and up: ``apart``.
    fused_qkv: Literal["released", "views", "copies", "apart"]
    tied_head: Literal["released", "never"]  # Whether head and embedding are one tensor: as ``released``, or ``never``
    vocabulary_multiple: int  # The vocabulary is rounded up to a multiple of it
    # Whether attention is within its ``released`` window, or where other layers, with masks of their own, are in none: ``mixed``.
    windows: Literal["released", "mixed"] = "released"
    uncapped_stretches: bool = False  # Whether logits that come stretch by stretch go without the cap of others
    unwindowed: tuple[str, ...] = ()  # Families within no window, whatever they were released with
    # Compute capabilities whose kernel is told of a window, where others get a mask, which is not modelled; none: all alike.
    windowed_on: tuple[str, ...] = ()
    adapted: bool = False  # Whether its own adapters on these models are modelled
    dora: bool = True  # Whether DoRA among these is: PEFT 0.11 forms its norms and products otherwise
    dropout: bool = True  # Whether its models have the dropout that a model or a config says
    # Whether gate and up of stacked experts are one tensor, as ``released``, or two: ``apart``, with a router in fp32; or each
    # expert has linear layers of its own, and the router is one: ``modules``.
    experts: Literal["released", "apart", "modules"] = "released"
    linear: Literal["all-linear", "listed"] = "all-linear"  # PEFT's word, or layers that the library lists by name
    hit_experts: tuple[str, ...] = ()  # Families whose loop over these modules is over those that have rows
    # What torch's attention is given: heads as they were formed (``views``), or copied where they are not ``contiguous``, and
    # with ``repeated`` ones keys and values for each head of the query, where a family tells it of groups now;
    # ``repeated-views`` repeats these and copies nothing else.
    attended: Literal["views", "contiguous", "repeated", "repeated-views"] = "views"
    repeating: tuple[str, ...] = ()  # Families of which all this is ``repeated-views`` whatever it is of others
    repeated_flash: tuple[str, ...] = ()  # Families that repeat these for flash-attn too, where ``repeated-views`` does
    head_first: bool = False  # Whether the head is made before all else
    # Whether one projection yields query, key and value group by group, so that heads are put together, and keys and values
    # repeated, before they turn; a layer adds its two parts up first, and has a name for what attention was given until it ends.
    by_groups: bool = False
    scales_embedded: tuple[str, ...] = ()  # Families that scale what their embedding returns, and now inside of that
    formed_tables: tuple[str, ...] = ()  # Families whose layers each form cosines and sines, in what they turn's dtype
    kept_tables: tuple[str, ...] = ()  # Families whose layers each keep those of all positions, and gather rows
    # Families whose layers each keep a table of sines and cosines, and attend step by step alone; now one table serves all.
    own_positions: tuple[str, ...] = ()
    triangles: tuple[str, ...] = ()  # Families whose layers keep a mask of flags, one for each pair of positions
    # Families whose eager attention is given a mask of keys, the same for each query, and keeps probabilities to itself.
    row_masks: tuple[str, ...] = ()
    # Families whose attention returns its probabilities only to who asks for them, and whose layers now return them always.
    unreturned: tuple[str, ...] = ()
    unmasked: tuple[str, ...] = ()  # Families that give torch's attention no mask where all tokens count, and now do
    uncached: tuple[str, ...] = ()  # Families that make no cache of keys and values where they train
    # Families whose last layer of each kind hands its keys and values on although no other layer attends to them.
    hands_unread: tuple[str, ...] = ()
    returns_features: bool = False  # Whether a model returns what its tower made of images, as ``image_outputs``
    wide_routers: bool = False  # Whether routers whose products are in fp32 stay so where all else is loaded in 16 bits
    uncheckpointed: tuple[str, ...] = ()  # Families whose layers no function of checkpointing calls, if it is asked for
    narrow_softmax: tuple[str, ...] = ()  # Families whose eager attention forms probabilities in its scores' dtype
    narrow_losses: tuple[str, ...] = ()  # Families that cut logits and form their loss of these in their own dtype
    # Families whose caps of scores torch's attention is not told of, which is run all the same, and now is not.
    uncapped: tuple[str, ...] = ()
    # Families whose layers within a window each make a mask of the one that their model has made, of floats for any kernel;
    # their attention step by step alone is modelled.
    window_masks: tuple[str, ...] = ()
    wide_tables: tuple[str, ...] = ()  # Families that turn heads by tables in fp32, which now are cast
    tuple_caches: tuple[str, ...] = ()  # Families that return keys and values in tuples, and not in an object
    # Families that name logits in fp32 alone, whatever ``loop.logits`` says of others.
    wide_logits: tuple[str, ...] = ()
    # Where parameters of an adapter are among the model's: ``behind`` all others, or in their module, ``before`` its weight or
    # ``beside`` it, behind that.
    adapter_place: Literal["behind", "before", "beside"] = "behind"
    # Modules of a layer, by the last part of a name, where it has them in another order.
    module_order: tuple[str, ...] = ()

    def attended_of(self, family: str) -> Literal["views", "contiguous", "repeated", "repeated-views"]:
        """Return what torch's attention is given in a family's models."""
        return "repeated-views" if family in self.repeating else self.attended


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """The tables of cosines and sines that a stack's models keep from step to step."""

    each: Literal["model", "layer"]  # Whether the ``model`` has one for all its layers, or each ``layer`` its own
    # That of products (``compute``), that of the ``residual`` stream, that which weights are ``loaded`` in, or fp32 always.
    dtype: Literal["compute", "residual", "loaded", "fp32", "fp32-unless-whole"]
    halved: bool  # Whether a pair of dimensions that turn together shares its entries
    # Positions that there are entries for: those of a ``sequence``, or of each sequence of a ``batch``, which says
    # them; or all that the ``model`` is made for; or the first of these, which are ``grown`` where sequences are
    # longer.
    rows: Literal["sequence", "batch", "model", "grown"]
    gathered: bool  # Whether each layer gathers the rows of the tokens' positions, and saves them for backward
    # Whether a model is made with tables for all its positions, which go once those of a shorter sequence are there.
    replaced: bool = False
    # Whether layers are given copies of those in fp32 in the dtype of products, which each call makes and not its caller.
    cast_for_layers: bool = False
