"""What the model code of a library does otherwise than the bundled models, family by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from memplan.catalog.stacks import ModelCode, Stack, StackModels
from memplan.errors import CannotAnswerError
from memplan.model.spec import ModelSpec
from memplan.step.kernels.family_fields import FamilyCode
from memplan.training.resolved import TrainingSetup

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
QWEN3_NEXT = replace(TRANSFORMERS, balances=True, norms_at_once=True, shared_first=True, joins_none=True)
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

_ALIKE = (
    "arcee",
    "gemma",
    "hunyuan_v1_dense",
    "internlm3",
    "llava",
    "llava_next",
    "llama",
    "ministral3",
    "mistral",
    "mistral3",
    "mistral4",
    "qwen2",
    "smollm3",
)
"""Families that run as Llama does: what their parts have of their own, order and sizes, their shapes say."""
GEMMA4 = replace(
    TRANSFORMERS,
    masks=2,
    masks_from=2,
    rotates_together=False,
    turns_each=True,
    powered_norms=True,
    scales_output=True,
)
_TRANSFORMERS: Mapping[str, FamilyCode] = {
    **dict.fromkeys(_ALIKE, TRANSFORMERS),
    "gpt2": replace(
        TRANSFORMERS,
        own_products=True,
        wide_softmax=False,
        placed_mask=True,
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
        steps_alone=True,
        wide_scores="masked",
        names_fed=True,
        names_attention=True,
        passes_positions=False,
        drops_residual=True,
        dropout_modules="both",
    ),
    "bloom": replace(
        TRANSFORMERS,
        steps_alone=True,
        adds_inside=True,
        names_fed=True,
        passes_positions=False,
        drops_embedding=False,
        drops_residual=True,
        dropout_modules="attention",
    ),
    "gptj": replace(
        TRANSFORMERS,
        steps_alone=True,
        wide_scores="divided",
        interleaved="looked-up",
        sums="parts-first",
        drops_residual=True,
        dropout_modules="both",
    ),
    "opt": replace(
        TRANSFORMERS,
        feeds_inside=True,
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
    "qwen2_moe": replace(TRANSFORMERS, balances=True, shared_first=True, masks=2, idle_mask=True),
    "gpt_neox": replace(TRANSFORMERS, sums="late", drops_residual=True),
    "falcon_h1": replace(TRANSFORMERS, scales_embedded=True, scales_parts=True),
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
    "gpt_oss": replace(TRANSFORMERS, balances=True, wide_scale=True, masks=2, masks_from=2, half_tables=True),
    "gemma2": replace(TRANSFORMERS, masks=2, masks_from=2),
    "gemma3_text": replace(TRANSFORMERS, masks=2, masks_from=6),
    "gemma3": replace(TRANSFORMERS, masks=2, masks_from=6),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), replace(TRANSFORMERS, sequence_tables=True, passes_positions=False)),
    "qwen3_vl": replace(TRANSFORMERS, sequence_tables=True, norms_at_once=True),
    "qwen3_vl_moe": replace(TRANSFORMERS, balances=True, sequence_tables=True, norms_at_once=True),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified_text"), GEMMA4),
    "gemma4_unified": replace(GEMMA4, masks_jointly=True, masks_by_kind=True),
    "llama4_text": replace(
        TRANSFORMERS,
        complex_rotary=True,
        wide_softmax=False,
        wide_weights=True,
        names_attention=True,
        unnamed_norms=True,
        masks_by_kind=True,
        wide_factors=True,
        unfused="last_hidden_state",
        takes_flash_attn=False,
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), replace(TRANSFORMERS, norms_at_once=True)),
    "mixtral": replace(TRANSFORMERS, balances=True, adapts_experts=True),
    "qwen3_moe": replace(TRANSFORMERS, balances=True, adapts_experts=True, norms_at_once=True),
    "qwen3_next": QWEN3_NEXT,
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), replace(QWEN3_NEXT, sequence_tables=True)),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text"), replace(QWEN3_NEXT, sequence_tables=True, balances=False, shared_first=False)
    ),
    "olmoe": replace(TRANSFORMERS, balances=True, adapts_experts=True, norms_at_once=True),
    "deepseek_v2": replace(TRANSFORMERS, adapts_experts=True, complex_rotary=True),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), replace(TRANSFORMERS, adapts_experts=True)),
    "minimax_m2": replace(TRANSFORMERS, balances=True, adapts_experts=True, norms_at_once=True),
    "cohere": replace(TRANSFORMERS, interleaved="wide", centred_norms=True, sums="residual-first"),
    "cohere2": replace(
        TRANSFORMERS, interleaved="wide", centred_norms=True, sums="residual-first", masks=2, masks_from=4
    ),
    "exaone4": replace(TRANSFORMERS, masks=0, masks_from=4),
    **dict.fromkeys(("glm", "glm4"), replace(TRANSFORMERS, interleaved="spread")),
    "ernie4_5": replace(TRANSFORMERS, interleaved="spread-wide", wide_rotary=True),
    "granite": replace(TRANSFORMERS, scales_embedded=True),
    "granitemoe": replace(TRANSFORMERS, balances=True, scales_embedded=True, unfused="num_experts"),
    "granitemoehybrid": replace(
        TRANSFORMERS,
        balances=True,
        scales_embedded=True,
        unfused="num_experts",
        names_routed=True,
        passes_positions=False,
    ),
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

    Source:
        ``MistralFlashAttention2`` and ``LlamaFlashAttention2`` in transformers/models (4.46.3), of which the first repeats;
        ``FalconModel._update_causal_mask`` in transformers/models/falcon/modeling_falcon.py, lines 871 to 884 (4.57.6);
        ``GPTJAttention.forward`` in transformers/models/gptj/modeling_gptj.py, line 219 (4.55.4) and 218 (4.57.6);
        ``GPT2Attention.forward`` in transformers/models/gpt2/modeling_gpt2.py, lines 351 to 355 (4.48.3 and 4.51.3);
        ``LlamaAttention.forward`` in transformers/models/llama/modeling_llama.py (4.44.2, 4.47.1), which returns none either.
    """
    return _code_at(stack.model_code, stack.models, architecture)


@lru_cache(maxsize=256)
def _code_at(model_code: ModelCode, models: StackModels, architecture: str) -> FamilyCode:
    code = _newest_code(model_code, architecture)
    if models.experts == "modules":
        masks = 1 if code.idle_mask else code.masks  # Qwen2-MoE's of windowed layers came with stacked experts
        code = replace(code, shared_first=False, adapts_experts=False, masks=masks, idle_mask=False)
        code = replace(code, loops_over_hit=architecture in models.hit_experts)
    if architecture in models.scales_embedded:
        code = replace(code, scales_embedded=True)
    attended = models.attended_of(architecture)
    if architecture in (*models.row_masks, *models.unreturned) or attended == "repeated-views":
        code = replace(code, returns_weights=False)
    if architecture in models.unmasked:
        code = replace(code, masks_always=False)
    if architecture in models.narrow_softmax:
        code = replace(code, wide_softmax=False)
    if architecture in models.window_masks:
        code = replace(code, masks=1, masks_from=1, window_masks=True)
    if architecture in models.wide_tables:
        code = replace(code, wide_rotary=True)
    if attended == "views":
        return code
    contiguous = attended != "repeated-views"
    if attended.startswith("repeated") and code.asks_for_groups:
        repeats = replace(code, asks_for_groups=False, repeats_keys=True)
        flash = architecture in models.repeated_flash
        return replace(repeats, contiguous_heads=contiguous, expands_alone=not contiguous, repeats_for_flash=flash)
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


def tables_in_layers(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether layers of a model that forms tables in each forward otherwise have cosines and sines of their own.

    Source:
        ``MistralRotaryEmbedding`` and ``apply_rotary_pos_emb`` in transformers/models/mistral/modeling_mistral.py (4.41.2, 4.44.2).
    """
    return setup.stack.rotary_tables.each == "layer" and family_code(setup.stack, spec.architecture).forms_tables


def tables_apart(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether each layer has rotary tables of its own: torchtune's ``lora_*`` builders but those with scaled ones make them so."""
    code = family_code(setup.stack, spec.architecture)
    if setup.config.adapter is None or not code.adapted_tables_apart:
        return setup.stack.rotary_tables.each == "layer"
    scaled = spec.tie_word_embeddings or spec.max_position_embeddings > UNSCALED_POSITIONS
    return spec.architecture != "llama" or not scaled
