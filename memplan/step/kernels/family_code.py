"""What the model code of a library does otherwise than the bundled models, family by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from memplan.catalog.stacks import ModelCode, Stack
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.model.spec import ModelSpec
from memplan.training.resolved import TrainingSetup


@dataclass(frozen=True, slots=True)
class FamilyCode:
    """How a family's code computes, where libraries differ."""

    functions: bool = False  # Whether activations that have no kernel (``gelu_new``) run operation by operation
    wide_scale: bool = False  # Whether a norm's weight multiplies in fp32, and the product is cast
    wide_layer_norm: bool = False  # Whether a layer norm is formed in fp32 and cast
    # Whether norms leave dtypes to torch: what they are given is cast to fp32 and back, and a weight in another dtype
    # widens the product.
    promotes: bool = False
    added_mask: bool = False  # Whether attention step by step adds a mask, made anew for each forward, to its scores
    # Whether attention step by step scales scores in place, has a name for them without the mask, and has one head of
    # keys and values repeated by the products themselves.
    own_scores: bool = False
    wide_softmax: bool = True  # Whether attention step by step forms probabilities in fp32
    # Whether adapters on ``all-linear``, or on projections that experts have too, go to stacked experts.
    adapts_experts: bool = False
    # How many masks a forward makes: of windowed layers and of others; 0 for one of the first where there are any.
    masks: int = 1
    # Whether each forward makes the mask of windowed layers where there are none, which no layer is given.
    idle_mask: bool = False
    masks_from: int = 1  # Layers from which on a model has both kinds, and rotary tables of both
    # Whether heads in groups are told to scaled-dot-product attention, and not repeated or left as one.
    asks_for_groups: bool = True
    # Whether its linear layers are of a class of its own, which bitsandbytes' loading leaves as they are.
    own_linear: bool = False
    # Whether its projections call a product of their own, and not the function of torch's linear layers.
    own_products: bool = False
    # Whether rotated dimensions are joined with those that are not, even where there are none of these.
    joins_rotated: bool = False
    names_norm: bool = False  # Whether a layer has a name of its own, until it returns, for what attention is given
    names_fed: bool = False  # The same for what the feed-forward part is given, where its result has another name
    # Whether functions have names for all that they form until they return, one for what each norm does.
    names_all: bool = False
    names_attention: bool = False  # The same for what attention returns
    copies_heads: bool = False  # Whether heads are copied together before they are rotated
    query_first: bool = False  # Whether the query is rotated before key and value are formed
    # Whether keys and values are repeated, one for each head of the query, whatever the kernel takes.
    repeats_keys: bool = False
    expands_alone: bool = False  # Whether a single head of them is then looked at, and not copied
    # Whether torch's attention is given contiguous copies of what lies apart, beside which the caller has names for it.
    contiguous_heads: bool = False
    names_parts: bool = False  # Whether a layer has names for what attention and feed-forward add until it ends
    # Whether grouped products of experts run in the dtype of their weights, under autocast too.
    grouped_uncast: bool = False
    # Whether norms are one kernel where their weights are in fp32, whatever the profile says.
    fused_wide_norms: bool = False
    forms_tables: bool = False  # Whether rotary tables are formed in each forward, and gone when its graph is
    passes_positions: bool = False  # Whether layers are called with the numbers of the positions
    wide_rotary: bool = False  # Whether rotary tables are in fp32, so that heads are rotated in fp32 and cast back
    complex_rotary: bool = False  # Whether heads are rotated as complex numbers, in fp32
    # How a layer adds up what attention and a feed-forward part beside it add: ``parts-first`` adds these, ``in-place``
    # in place of the second, ``residual-first`` adds attention's to the residual stream, ``late`` is ``parts-first``
    # with the second norm after attention; ``own`` is the bundled models' way.
    sums: Literal["own", "parts-first", "in-place", "residual-first", "late"] = "own"
    shared_first: bool = False  # Whether shared experts run before routed ones, and their gate after these
    # Whether a probability of dropout that a model is released with applies to its embedding too.
    drops_embedding: bool = True
    # Whether the model scales what its embedding has returned, and not the embedding itself.
    scales_embedded: bool = False
    # Whether each layer within a window makes a mask of its own, of floats and for one sequence.
    masks_layers: bool = False
    masks_always: bool = False  # Whether scaled-dot-product attention is always given a mask
    # Whether one function rotates query and key, whose caller has names for them until it returns.
    rotates_together: bool = False
    # How scores are formed where a family's only attention forms them of copies of queries and keys in fp32: ``masked`` by
    # a mask of each layer's own before that of the model, or ``divided`` before it.
    wide_scores: Literal["", "masked", "divided"] = ""
    scales_projected: bool = False  # Whether queries are scaled as they are projected, and scores by one
    # Whether every token has a position of its own, counted in the mask of padding, where other models look up a row's.
    counts_positions: bool = False
    norms_at_once: bool = False  # Whether query and key are normalised as they are projected, each before the next
    # How interleaved dimensions of a head are rotated, where these and not halves are: ``wide`` in fp32; ``spread``
    # by tables that each layer makes anew, ``spread-wide`` where these are in fp32.
    # ``looked-up`` in a table of each layer's own, by key and query apart.
    interleaved: Literal["", "wide", "spread", "spread-wide", "looked-up"] = ""
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
    names_magnitude: bool = False  # Whether DoRA's layer has names for all that it forms until it returns
    adapted_tables_apart: bool = False  # Whether layers with adapters have rotary tables of their own
    sequence_tables: bool = False  # Whether every sequence of a batch has rotary tables of its own
    # Whether one adapter of query, key and value together is made of one for each that has any.
    adapts_parts: bool = False
    # Whether there is dropout of what is added to the residual stream, and not of attention's weights alone.
    drops_residual: bool = True
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

    @property
    def steps_alone(self) -> bool:
        """Whether the family's code has no attention but step by step."""
        return bool(self.wide_scores)


OWN = FamilyCode()
TRANSFORMERS = FamilyCode(
    functions=True,
    promotes=True,
    added_mask=True,
    grouped_uncast=True,
    forms_tables=True,
    passes_positions=True,
    rotates_together=True,
    drops_residual=False,
    dropout_modules="residual",
)
TORCHTUNE = FamilyCode(
    wide_scale=True,
    query_first=True,
    repeats_keys=True,
    names_parts=True,
    fused_wide_norms=True,
    adapted_tables_apart=True,
    returns_logits=True,
    names_magnitude=True,
)
"""``MultiHeadAttention.forward``, ``TransformerSelfAttentionLayer.forward``, ``RMSNorm.forward`` (torchtune 0.6.1, modules/)."""
_TORCHTUNE: Mapping[str, FamilyCode] = {
    **dict.fromkeys(("llama", "mistral"), TORCHTUNE),
    "gemma": replace(TORCHTUNE, fused_wide_norms=False, own_head_width=True),
    "gemma2": replace(TORCHTUNE, fused_wide_norms=False, own_head_width=True, scales_in_place=True, caps_hidden=True),
    "phi3": replace(TORCHTUNE, halves_by_tables=True, wide_rotary=True),
    "qwen2": replace(TORCHTUNE, halves_by_tables=True, quantises_adapted=True),
}
"""``GemmaRMSNorm`` (models/gemma/rms_norm.py), ``Gemma2Attention`` (models/gemma2/_attention.py), ``Gemma2FinalNorm``, ``Phi3RotaryPositionalEmbeddings``, ``Qwen2RotaryPositionalEmbeddings`` (0.6.1)."""
UNSCALED_POSITIONS = 16384
"""Positions of Code Llama, the most of a Llama without scaled rotary tables (torchtune/models/code_llama2, 0.6.1)."""
LITGPT = FamilyCode(
    wide_scale=True,
    casts_scale=True,
    adapts_parts=True,
    masks_layers=True,
    joins_rotated=True,
    asks_for_groups=False,
    repeats_keys=True,
    names_all=True,
    names_passed=True,
    rotates_together=True,
)
"""``RMSNorm``, ``apply_rope``, ``CausalSelfAttention.forward`` and ``Block.forward`` in litgpt/model.py (0.5.13)."""

_ALIKE = ("arcee", "gemma", "hunyuan_v1_dense", "llama", "ministral3", "mistral", "mistral3", "qwen2", "smollm3")
"""Families that run as Llama does: what their parts have of their own, order and sizes, their shapes say."""
_TRANSFORMERS: Mapping[str, FamilyCode] = {
    **dict.fromkeys(_ALIKE, TRANSFORMERS),
    "gpt2": replace(
        TRANSFORMERS,
        own_products=True,
        wide_softmax=False,
        names_fed=True,
        names_attention=True,
        grouped_uncast=False,
        drops_residual=True,
        dropout_modules="both",
    ),
    "gpt_bigcode": replace(
        TRANSFORMERS, names_fed=True, names_attention=True, drops_residual=True, dropout_modules="residual"
    ),
    "gpt_neo": replace(
        TRANSFORMERS,
        wide_scores="masked",
        names_fed=True,
        names_attention=True,
        passes_positions=False,
        drops_residual=True,
        dropout_modules="both",
    ),
    "gptj": replace(
        TRANSFORMERS,
        wide_scores="divided",
        interleaved="looked-up",
        sums="parts-first",
        drops_residual=True,
        dropout_modules="both",
    ),
    "opt": replace(
        TRANSFORMERS,
        scales_projected=True,
        counts_positions=True,
        drops_embedding=False,
        drops_residual=True,
        dropout_modules="neither",
    ),
    "stablelm": replace(
        TRANSFORMERS,
        names_norm=True,
        names_attention=True,
        names_passed=True,
        sums="residual-first",
        drops_residual=True,
    ),
    "phi": replace(TRANSFORMERS, names_passed=True, sums="parts-first", drops_embedding=False, drops_residual=True),
    "qwen2_moe": replace(TRANSFORMERS, shared_first=True, masks=2, idle_mask=True),
    "gpt_neox": replace(TRANSFORMERS, sums="late", drops_residual=True),
    "falcon": replace(
        TRANSFORMERS,
        own_scores=True,
        wide_softmax=False,
        copies_heads=True,
        asks_for_groups=False,
        sums="in-place",
        masks_always=True,
        own_linear=True,
        own_products=True,
        names_norm=True,
        names_attention=True,
        drops_residual=True,
        dropout_modules="attention",
    ),
    "phi3": replace(TRANSFORMERS, joins_rotated=True, drops_residual=True),
    "olmo": replace(TRANSFORMERS, wide_layer_norm=True, wide_rotary=True),
    "qwen3": replace(TRANSFORMERS, norms_at_once=True),
    "olmo2": replace(TRANSFORMERS, wide_scale=True, wide_rotary=True, norms_at_once=True),
    "olmo3": replace(TRANSFORMERS, wide_scale=True, wide_rotary=True, norms_at_once=True, masks=2, masks_from=4),
    "gpt_oss": replace(TRANSFORMERS, wide_scale=True, masks=2, masks_from=2, half_tables=True),
    "gemma2": replace(TRANSFORMERS, masks=2, masks_from=2),
    "gemma3_text": replace(TRANSFORMERS, masks=2, masks_from=6),
    "gemma3": replace(TRANSFORMERS, masks=2, masks_from=6),
    "qwen2_5_vl": replace(TRANSFORMERS, sequence_tables=True, passes_positions=False),
    "qwen3_vl": replace(TRANSFORMERS, sequence_tables=True, norms_at_once=True),
    "mixtral": replace(TRANSFORMERS, adapts_experts=True),
    "qwen3_moe": replace(TRANSFORMERS, adapts_experts=True, norms_at_once=True),
    "qwen3_next": replace(TRANSFORMERS, norms_at_once=True, shared_first=True),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), replace(TRANSFORMERS, norms_at_once=True, sequence_tables=True)),
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        replace(TRANSFORMERS, norms_at_once=True, shared_first=True, sequence_tables=True),
    ),
    "olmoe": replace(TRANSFORMERS, adapts_experts=True, norms_at_once=True),
    "deepseek_v2": replace(TRANSFORMERS, adapts_experts=True, complex_rotary=True),
    **dict.fromkeys(("deepseek_v3", "glm4_moe"), replace(TRANSFORMERS, adapts_experts=True)),
    "cohere": replace(TRANSFORMERS, interleaved="wide", centred_norms=True, sums="residual-first"),
    "cohere2": replace(
        TRANSFORMERS, interleaved="wide", centred_norms=True, sums="residual-first", masks=2, masks_from=4
    ),
    "exaone4": replace(TRANSFORMERS, masks=0, masks_from=4),
    **dict.fromkeys(("glm", "glm4"), replace(TRANSFORMERS, interleaved="spread")),
    "ernie4_5": replace(TRANSFORMERS, interleaved="spread-wide", wide_rotary=True),
    **dict.fromkeys(("granite", "granitemoe"), replace(TRANSFORMERS, scales_embedded=True)),
    "seed_oss": replace(TRANSFORMERS, drops_embedding=False, drops_residual=True, dropout_modules="neither"),
    "starcoder2": replace(TRANSFORMERS, drops_residual=True, dropout_modules="neither"),
}
"""How each family runs in transformers 5.23.0, as ``models/NAME/modeling_NAME.py`` has it: ``NewGELUActivation``
(activations.py), ``Olmo2RMSNorm`` and ``GptOssRMSNorm`` (``self.weight * hidden_states`` before the cast), ``OlmoLayerNorm``,
``eager_attention_forward`` of gpt2, ``FalconAttention._split_heads`` with ``reshape``. Which have adapters on stacked experts is in
peft/utils/transformers_weight_conversion.py (0.21.2), ``_MODEL_TO_CONVERSION_PATTERN`` and ``_MOE_TARGET_MODULE_MAPPING``."""


UNSLOTH = FamilyCode(cuts_sequences=True)
"""``LlamaAttention_fast_forward`` in unsloth/models/llama.py, ``run_attention`` in utils/attention_dispatch.py (2026.10.9)."""

_TORCHTITAN: Mapping[str, FamilyCode] = {
    "llama": OWN,
    "qwen3": FamilyCode(rotates_together=True, turns_halves=True),
    "qwen3_moe": FamilyCode(rotates_together=True, turns_halves=True, experts_apart=True),
}
"""``CosSinRoPE`` (models/common/rope.py) and ``GQAttention.forward`` (models/common/attention.py), torchtitan 0.3.0."""


_ONE_DECODER: Mapping[ModelCode, FamilyCode] = {"own": OWN, "litgpt": LITGPT, "unsloth": UNSLOTH}
"""Implementations whose families are settings of one decoder."""
_BY_FAMILY: Mapping[ModelCode, Mapping[str, FamilyCode]] = {
    "transformers": _TRANSFORMERS,
    "torchtune": _TORCHTUNE,
    "torchtitan": _TORCHTITAN,
}


def family_code(stack: Stack, architecture: str) -> FamilyCode:
    """Return how a family runs in the implementation that a stack has its models from, at the stack's version.

    Raises:
        CannotAnswerError: The implementation differs from family to family, and this one's is not described.
    """
    code = _newest_code(stack.model_code, architecture)
    if architecture in stack.models.scales_embedded:
        code = replace(code, scales_embedded=True)
    if stack.models.attended == "views":
        return code
    contiguous = stack.models.attended != "repeated-views"
    if stack.models.attended.startswith("repeated") and code.asks_for_groups:
        repeats = replace(code, asks_for_groups=False, repeats_keys=True)
        return replace(repeats, contiguous_heads=contiguous, expands_alone=not contiguous)
    return replace(code, contiguous_heads=contiguous)


def _newest_code(code: ModelCode, architecture: str) -> FamilyCode:
    if code in _ONE_DECODER:
        return _ONE_DECODER[code]
    if architecture not in (described := _BY_FAMILY[code]):
        raise CannotAnswerError(
            f"{code}'s code of family {architecture} is not described; that of {', '.join(sorted(described))} is"
        )
    return described[architecture]


def dropouts(spec: ModelSpec, setup: TrainingSetup) -> tuple[float, float]:
    """Return the probabilities of dropout that apply: to what is added to the residual stream, and to attention's weights.

    Source:
        ``disable_dropout_in_model`` in trl/trainer/utils.py (1.16.0) sets those of ``torch.nn.Dropout`` to 0, of which
        ``torch.nn.functional.dropout`` in a model's forward knows nothing.
    """
    given = setup.config.dropout
    residual, attention = (spec.dropout, spec.attention_dropout) if given is None else (given, given)
    code = family_code(setup.stack, spec.architecture)
    off = code.dropout_modules if setup.disables_dropout else "neither"
    residual = residual if code.drops_residual and off not in ("both", "residual") else 0.0
    return residual, 0.0 if off in ("both", "attention") else attention


def tables_apart(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether each layer has rotary tables of its own: torchtune's ``lora_*`` builders but those with scaled ones make them so."""
    code = family_code(setup.stack, spec.architecture)
    if setup.config.adapter is None or not code.adapted_tables_apart:
        return setup.stack.rotary_tables.each == "layer"
    scaled = spec.tie_word_embeddings or spec.max_position_embeddings > UNSCALED_POSITIONS
    return spec.architecture != "llama" or not scaled
