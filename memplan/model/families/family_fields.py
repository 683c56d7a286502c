"""What a family's model code can do otherwise than the bundled models, and what transformers' code of a family does."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

from memplan.documents.frozen_values import dataclass

Builder = TypeVar("Builder", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class FamilyCode:
    """How a family's code computes, where libraries differ."""

    functions: bool = False  # Whether activations that have no kernel (``gelu_new``) run operation by operation
    wide_scale: bool = False  # Whether a norm's weight multiplies in fp32, and the product is cast
    widens_scale: bool = False  # Whether the weight is cast to fp32 for that
    wide_logits: bool = False  # Whether a model casts its logits to fp32, and has no other name for them
    wide_layer_norm: bool = False  # Whether a layer norm is formed in fp32 and cast
    # Whether norms leave dtypes to torch: what they are given is cast to fp32 and back, and a weight in another dtype
    # widens the product.
    promotes: bool = False
    added_mask: bool = False  # Whether attention step by step adds a mask, made anew for each forward, to its scores
    # Whether attention step by step scales scores in place, has a name for them without the mask, and has one head of
    # keys and values repeated by the products themselves.
    own_scores: bool = False
    # Whether attention step by step returns its probabilities, which a layer has a name for until it ends.
    returns_weights: bool = True
    wide_weights: bool = False  # Whether probabilities that autocast has formed in fp32 stay so
    wide_softmax: bool = True  # Whether attention step by step forms probabilities in fp32
    # How many masks a forward makes: of windowed layers and of others; 0 for one of the first where there are any.
    masks: int = 1
    # Whether each forward makes the mask of windowed layers where there are none, which no layer is given.
    idle_mask: bool = False
    placed_mask: bool = False  # Whether layers are given it by its place, not by its name
    masks_from: int = 1  # Layers from which on a model has both kinds, and rotary tables of both
    # Whether heads in groups are told to scaled-dot-product attention, and not repeated or left as one.
    asks_for_groups: bool = True
    takes_flash_attn: bool = True  # Whether it runs with the package flash-attn
    # Whether its linear layers are of a class of its own, which bitsandbytes' loading leaves as they are, and multiply a view.
    own_linear: bool = False
    # Whether its projections call a product of their own, and not the function of torch's linear layers.
    own_products: bool = False
    # Whether rotated dimensions are joined with those that are not, even where there are none of these.
    joins_rotated: bool = False
    joins_none: bool = False  # The same, where both query and key are rotated before either is joined
    names_norm: bool = False  # Whether a layer has a name of its own, until it returns, for what attention is given
    # The same, until their result is added, for what attention and the feed-forward part are given, where that has another name.
    names_fed: bool = False
    # Whether functions have names for all that they form until they return, one for what each norm does.
    names_all: bool = False
    names_attention: bool = False  # The same for what attention returns
    names_fused: bool = (
        False  # The same for what one projection of query, key and value yields, until attention's result is projected
    )
    copies_heads: bool = False  # Whether heads are copied together before they are rotated
    query_first: bool = False  # Whether the query is rotated before key and value are formed
    # Whether keys and values are repeated, one for each head of the query, whatever the kernel takes.
    repeats_keys: bool = False
    repeats_for_flash: bool = True  # Whether the package flash-attn is given these repeated too
    expands_alone: bool = False  # Whether a single head of them is then looked at, and not copied
    # Whether one projection yields heads group by group, which are put together, and repeated, before they turn.
    by_groups: bool = False
    # Whether torch's attention is given contiguous copies of what lies apart, beside which the caller has names for it.
    contiguous_heads: bool = False
    names_parts: bool = False  # Whether a layer has names for what attention and feed-forward add until it ends
    # Whether a loop over experts is over those that have rows, whose numbers it reads from the device, and not over all.
    loops_over_hit: bool = False
    # Whether grouped products of experts run in the dtype of their weights, under autocast too, and are summed as wide as rows came.
    grouped_uncast: bool = False
    # Whether the function of routed experts gathers scores and biases of its rows ahead of the products, and names these until it returns.
    gathers_ahead: bool = False
    names_routers: bool = False  # Whether a mixture has names, until it ends, for what its router yields
    casts_routers: bool = False  # Whether a router in fp32 is cast to it by the model's code, and back by autocast
    # Whether keys of latent attention are formed in the dtype of their dimensions that are not rotated (``expand_kv``), not in the query's.
    latent_keys: bool = False
    # Whether norms are one kernel where their weights are in fp32, whatever the profile says.
    fused_wide_norms: bool = False
    forms_tables: bool = False  # Whether rotary tables are formed in each forward, and gone when its graph is
    passes_positions: bool = False  # Whether layers are called with the numbers of the positions
    wide_rotary: bool = False  # Whether rotary tables are in fp32, so that heads are rotated in fp32 and cast back
    # Whether heads are cast to fp32 for each product with a table, in whatever dtype that is (ModernBERT).
    widens_rotated: bool = False
    complex_rotary: bool = False  # Whether heads are rotated as complex numbers, in fp32
    # Whether a module behind attention projects its result, drops and adds it, when nothing else of attention has a name.
    projects_behind: bool = False
    # Whether attention projects it all the same, and returns it in a tuple that the module behind has a name for (MPNet).
    returns_projected: bool = False
    # How a layer adds up what attention and a feed-forward part beside it add: ``parts-first`` adds these, ``in-place``
    # in place of the second, ``residual-first`` adds attention's to the residual stream, ``late`` is ``parts-first``
    # with the second norm after attention; ``own`` is the bundled models' way.
    sums: Literal["own", "parts-first", "in-place", "residual-first", "late"] = "own"
    # Whether a mixture gives its router and shared experts rows of all sequences as one matrix.
    flattens_rows: bool = False
    shared_first: bool = False  # Whether shared experts run before routed ones, and their gate after these
    # Which probability of dropout applies to what the embedding returns: none, one that a job gives, or one that a model is
    # released with too.
    drops_embedding: Literal["never", "given", "released"] = "released"
    # Whether the model scales what its embedding has returned, and not the embedding itself.
    scales_embedded: bool = False
    # Whether numbers multiply keys, gates, and what parts are given and add (Falcon-H1).
    scales_parts: bool = False
    # Whether each layer within a window makes a mask of its own, of floats and for one sequence.
    masks_layers: bool = False
    masks_jointly: bool = False  # Whether every layer's attention is given a mask, as for images, and rows of text too
    window_masks: bool = False  # Whether each layer within a window makes a mask of the model's, by flags of its own
    masks_always: bool = False  # Whether scaled-dot-product attention is always given a mask
    # Whether one function rotates query and key, whose caller has names for them until it returns.
    rotates_together: bool = False
    # Whether a layer has a name, until it returns, for what routed experts add, and calls shared ones itself (Granite 4).
    names_routed: bool = False
    balances: bool = False  # Whether its own config has a factor for a loss of unbalanced experts
    drops_routers: bool = False  # Whether what its model returns has no place for what routers of its text model do
    # Why TRL's loss over the head's chunks ends with an error for it: what an error of Python says is missing.
    unfused: str = ""
    steps_alone: bool = False  # Whether its code has no attention but step by step
    # Whether attention and the feed-forward part add what runs beside them themselves, until when they have their names.
    adds_inside: bool = False
    # How scores are formed where a family's only attention forms them of copies of queries and keys in fp32: ``masked`` by
    # a mask of each layer's own before that of the model, or ``divided`` before it; ``unnamed`` where nothing but the graph has
    # the copies.
    wide_scores: Literal["", "masked", "divided", "unnamed"] = ""
    # Whether layers run the feed-forward part themselves, on rows of all sequences, with one name for all that it forms.
    feeds_inside: bool = False
    scales_projected: bool = False  # Whether queries are scaled as they are projected, and scores by one
    # Whether every token has a position of its own, counted in the mask of padding, where other models look up a row's.
    counts_positions: bool = False
    norms_at_once: bool = False  # Whether query and key are normalised as they are projected, each before the next
    # Whether query, key and value are normalised and rotated as they are projected, each before the next.
    turns_each: bool = False
    # Whether a norm has a name for nothing but what it is given, and then for what it has cast back.
    unnamed_norms: bool = False
    # Whether a forward makes a mask of each kind of layers that there are, within windows and not, and of no other.
    masks_by_kind: bool = False
    wide_factors: bool = False  # Whether factors of queries by position are in fp32, and named until attention returns
    powered_norms: bool = False  # Whether norms take a power for the root, and cast their weight to fp32
    scales_output: bool = False  # Whether a layer's result is multiplied in its place by a number that is not trained
    # How interleaved dimensions of a head are rotated, where these and not halves are: ``wide`` in fp32; ``spread``
    # by tables that each layer makes anew, ``spread-wide`` where these are in fp32.
    # by key and query apart, ``in-turn`` by rows of the model's table and ``looked-up`` in one of each layer's own.
    # ``by-model`` is by tables that the model has made so.
    interleaved: Literal["", "wide", "spread", "spread-wide", "in-turn", "looked-up", "by-model"] = ""
    centred_norms: bool = False  # Whether layer norms are formed operation by operation, in fp32
    half_tables: bool = False  # Whether a pair of dimensions shares its entries of the rotary tables
    # Whether attention has names for the dimensions that are not rotated, and for rotated ones, until it returns.
    names_passed: bool = False
    casts_scale: bool = False  # Whether a norm casts its weight to fp32, and squares by multiplying
    # Whether halves of a head turn by a table of cosines and one of sines, each cast to the head's dtype where tables
    # are not wide.
    halves_by_tables: bool = False
    # Whether a model has returned logits, in fp32 where they are whole, when the loss is formed.
    returns_logits: bool = False
    # Whether attention step by step scales its query in place, and makes its own mask in fp32.
    scales_in_place: bool = False
    caps_hidden: bool = False  # Whether what bounds logits is applied to the last norm's result in their place
    own_head_width: bool = False  # Whether heads may together be wider or narrower than the model
    quantises_adapted: bool = False  # Whether only projections with adapters are quantised
    # Whether DoRA's layer has names for all that it forms until it returns, and LoRA's for its first product until that is scaled.
    names_magnitude: bool = False
    adapted_tables_apart: bool = False  # Whether layers with adapters have rotary tables of their own
    sequence_tables: bool = False  # Whether every sequence of a batch has rotary tables of its own
    # Whether one adapter of query, key and value together is made of one for each that has any.
    adapts_parts: bool = False
    # Whether there is dropout of what is added to the residual stream, and not of attention's weights alone.
    drops_residual: bool = True
    # Where what attention adds is dropped: behind it, in its own function, beside all that this has names for, or nowhere.
    drops_attention: Literal["behind", "inside", "never"] = "behind"
    # Which dropout is one of modules, which trainers switch off, and not a function of torch's: what is added to the
    # residual stream (``residual``), attention's weights, both or neither.
    dropout_modules: Literal["both", "residual", "attention", "neither"] = "both"
    # Whether halves of a head, cast to fp32, turn by gathered rows of one table, where other families of the library
    # have complex numbers.
    turns_halves: bool = False
    # Whether experts have a tensor for each projection, a router in fp32, a bias that steers the choice and a count.
    experts_apart: bool = False
    # Whether heads of single sequences are attended to together and their results joined, which copies them, as
    # gradients of heads are copied on their way back.
    cuts_sequences: bool = False

    def cuts(self, rotary_dim: int, head_dim: int) -> bool:
        """Tell whether the dimensions of a head that are rotated are cut out of it, and joined with the others again."""
        return 0 < rotary_dim < head_dim + self.joins_none


GEMMA4: dict[str, Any] = {
    "masks": 2,
    "masks_from": 2,
    "rotates_together": False,
    "turns_each": True,
    "powered_norms": True,
    "scales_output": True,
}
"""What transformers' code of all kinds of Gemma 4 does."""


class Around(NamedTuple):
    """What libraries do with a family; of a tower where it has one, None where not."""

    scored: bool  # Whether ``AutoModelForSequenceClassification`` has a class for it (models/auto/modeling_auto.py)
    # Whether accelerate finds all classes of its tower that it is to wrap, where a file names none; the part of a block that
    # it wraps where that is no block.
    wrapped: bool | str | None = None
    # Whether ms-swift embeds its tokens ahead of the forward (``_post_encode`` in swift/template/templates/qwen.py, 4.6.0).
    ahead: bool | None = None
    # Modules that one of dropout stands behind, of what is added to the residual stream; None where no such dropout is a module.
    dropouts: tuple[str, ...] | None = None
    # Module that one of attention's probabilities stands before; empty for none.
    scores_dropout: str = ""
    # Of families with experts, what becomes of stacked ones under adapters on ``all-linear``, or on projections that experts
    # have too: PEFT leaves them (``left``), adapts them on ``all-linear`` alone, or for their projections' names too (``named``).
    adapted_experts: Literal["", "left", "all-linear", "named"] = ""
    wide_norms: bool = False  # Whether norms stay in fp32 where weights are loaded in fp16 (``_keep_in_fp32_modules``)


def runs_as(
    *,
    scored: bool,
    wrapped: bool | str | None = None,
    ahead: bool | None = None,
    dropouts: tuple[str, ...] | None = None,
    scores_dropout: str = "",
    adapted_experts: Literal["", "left", "all-linear", "named"] = "",
    wide_norms: bool = False,
    **fields: Any,
) -> Callable[[Builder], Builder]:
    """Return a decorator that says how transformers' code of a family computes, where it differs from that of Llama.

    Args:
        scored: As in :class:`Around`, like the next six: every family says so.
        wrapped: Of families with a tower.
        ahead: Likewise.
        dropouts: Of families whose dropout of what is added to the residual stream is a module.
        scores_dropout: Of families in which one of attention's probabilities is called.
        adapted_experts: Of families with experts.
        wide_norms: Of families that say so.
        fields: Those of :class:`FamilyCode` that differ.

    Source:
        ``models/NAME/modeling_NAME.py`` of transformers 5.23.0; ``NewGELUActivation`` (activations.py), ``Olmo2RMSNorm`` and
        ``GptOssRMSNorm`` (``self.weight * hidden_states`` before the cast), ``OlmoLayerNorm``, ``eager_attention_forward`` of
        gpt2, ``FalconAttention._split_heads`` with ``reshape``. Which have adapters on stacked experts is in
        peft/utils/transformers_weight_conversion.py (0.21.2), ``_MODEL_TO_CONVERSION_PATTERN`` and
        ``_MOE_TARGET_MODULE_MAPPING``.
    """

    def marked(builder: Builder) -> Builder:
        if fields.get("drops_residual") and fields.get("dropout_modules", "residual") in ("both", "residual"):
            assert dropouts, f"{builder.__name__}: which modules does a dropout stand behind?"
        vars(builder).update(
            runs_as=fields, around=Around(scored, wrapped, ahead, dropouts, scores_dropout, adapted_experts, wide_norms)
        )
        return builder

    return marked
