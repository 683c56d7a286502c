"""LitGPT's configs of models, with adapters and without."""

from dataclasses import fields
from typing import Any

from litgpt.config import Config
from litgpt.lora import Config as AdaptedConfig

from memplan.errors import CannotAnswerError
from memplan.model.model import Model
from memplan.model.spec import Attention, Mlp, ModelSpec
from memplan.training.adapters import litgpt_parts
from memplan.training.resolved import TrainingSetup

NAMES = {field.name for field in fields(Config)}
ANYWAY = {"norm_1": True, "norm_2": True, "norm_qk_type": "default"}
"""What versions do that have no key for it."""


def config_of(model: Model, setup: TrainingSetup) -> Config:
    """Return LitGPT's config of a model with layers of one kind, within no window where its version knows of none."""
    spec = model.spec
    layer = spec.runs[0].layer
    heads, mlp, gemma = layer.attention, layer.feed_forward, spec.architecture.startswith("gemma")
    assert isinstance(heads, Attention)
    assert isinstance(mlp, Mlp)
    after = layer.placement in ("post", "sandwich")
    return _config(
        name="Gemma" if gemma else spec.architecture,
        block_size=spec.max_position_embeddings or 2048,  # of Falcon (litgpt/config.py)
        vocab_size=spec.vocab_size,
        padded_vocab_size=spec.vocab_size,
        n_layer=spec.num_hidden_layers,
        n_embd=spec.hidden_size,
        n_head=heads.num_heads,
        head_size=heads.head_dim,
        n_query_groups=heads.num_key_value_heads,
        rotary_percentage=heads.rotary_dim / heads.head_dim,
        parallel_residual=layer.placement == "parallel",
        shared_attention_norm=layer.placement == "parallel" and layer.parallel_norms == 1,
        post_attention_norm=after,
        post_mlp_norm=after,
        norm_1=layer.placement != "post",
        norm_2=layer.placement != "post",
        bias=mlp.bias,
        attn_bias=heads.qkv_bias and not mlp.bias,
        lm_head_bias=spec.head_bias,
        norm_qk=heads.query_key_norm is not None,
        norm_qk_type="olmo2" if heads.query_key_norm_scope == "full" else "default",
        norm_class_name="RMSNorm" if layer.norm.kind == "rms" else "LayerNorm",
        mlp_class_name=("GemmaMLP" if gemma else "LLaMAMLP") if mlp.gated else "GptNeoxMLP",
        intermediate_size=mlp.intermediate_size,
        scale_embeddings=gemma,
        attention_logit_softcapping=heads.logit_softcap or None,
        final_logit_softcapping=spec.final_logit_softcap or None,
        **({} if spec.architecture in setup.stack.models.unwindowed else _windows(spec)),
    )


def _config(**keys: Any) -> Config:
    """Return a config of those keys that the installed version has; the others have to say what it does anyway.

    Raises:
        CannotAnswerError: One of them does not.
    """
    later = [key for key, value in keys.items() if key not in NAMES and value not in (None, False, ANYWAY.get(key))]
    if later:
        raise CannotAnswerError(f"this version of LitGPT has no {', '.join(later)}, which the model needs")
    return Config(**{key: value for key, value in keys.items() if key in NAMES})


def _windows(spec: ModelSpec) -> dict[str, Any]:
    """Return what says which layers attend within a window."""
    if not spec.window:
        return {}
    if "sliding_window_indices" not in NAMES:  # up to 0.5.4
        placing = "interleaved" if spec.full_layers else "all"
        return {"sliding_window_size": spec.window, "sliding_window_layer_placing": placing}
    return {
        "sliding_window_size": spec.window,
        "sliding_window_indices": [int(n not in spec.full_layers) for n in range(spec.num_hidden_layers)],
    }


def adapted_config_of(model: Model, setup: TrainingSetup) -> AdaptedConfig:
    """Return the same with a setup's adapters."""
    adapter = setup.config.adapter
    assert adapter is not None
    parts = {f"lora_{part}": True for part in litgpt_parts(model.spec, adapter.targets)}
    config = config_of(model, setup)
    own = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    return AdaptedConfig(**own, lora_r=adapter.rank, lora_alpha=16, lora_dropout=adapter.dropout or 0.0, **parts)
