"""What the model code of a library does otherwise than the bundled models, family by family."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from memplan.catalog.built_models import StackModels
from memplan.catalog.stacks import ModelCode, Stack
from memplan.errors import CannotAnswerError
from memplan.model.families import around, transformers_rows
from memplan.model.families.family_fields import FamilyCode
from memplan.model.spec import ModelSpec
from memplan.training.resolved import TrainingSetup

OWN = FamilyCode(flattens_rows=True)
TRANSFORMERS = FamilyCode(
    functions=True,
    promotes=True,
    added_mask=True,
    grouped_uncast=True,
    gathers_ahead=True,
    names_routers=True,
    casts_routers=True,
    latent_keys=True,
    forms_tables=True,
    passes_positions=True,
    rotates_together=True,
    drops_residual=False,
    dropout_modules="residual",
)
"""Transformers' code of Llama; that of a family differs by what its function says (:func:`memplan.model.families.family_fields.runs_as`)."""
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
BY_GROUPS: Mapping[str, Any] = {"by_groups": True, "sums": "parts-first"}
"""The last two in litgpt/model.py up to 0.5.4, lines 203 to 300."""

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
_BY_FAMILY: Mapping[ModelCode, Mapping[str, FamilyCode]] = {"torchtune": _TORCHTUNE, "torchtitan": _TORCHTITAN}


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
        code = replace(code, shared_first=False, masks=masks, idle_mask=False)
        code = replace(code, loops_over_hit=architecture in models.hit_experts)
    if architecture in models.own_positions:
        own: dict[str, Any] = {"steps_alone": True, "wide_scores": "divided", "interleaved": "looked-up"}
        code = replace(code, half_tables=False, dropout_modules="both", **own)
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
    if models.by_groups:
        code = replace(code, **BY_GROUPS)
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
    described = transformers_rows() if code == "transformers" else _BY_FAMILY[code]
    if architecture not in described:
        raise CannotAnswerError(
            f"{code}'s code of family {architecture} is not described; that of {', '.join(sorted(described))} is"
        )
    row = described[architecture]
    return row if isinstance(row, FamilyCode) else replace(TRANSFORMERS, **row)


def module_dropouts(stack: Stack, architecture: str) -> tuple[tuple[str, ...], str]:
    """Return the modules that one of dropout stands behind, and the one that dropout of attention's probabilities stands before."""
    said, called = around(architecture), family_code(stack, architecture).dropout_modules in ("both", "attention")
    return said.dropouts or (), said.scores_dropout if called else ""


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
