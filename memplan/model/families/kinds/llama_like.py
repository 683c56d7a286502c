"""Llama and the families that differ from it in a norm, a bias, a factor, a window or a fused matrix."""

from dataclasses import replace

from memplan.model.families.common_parts import (
    attention,
    factor,
    gated_mlp,
    layer_norm,
    model,
    rms_norm,
    rotary_dim,
    shape,
    sliding_window,
)
from memplan.model.families.config_values import MAXIMUM_LAYERS, ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.families.layer_windows import layer_windows
from memplan.model.spec import Layer, Mlp, ModelSpec, Norm, Placement, TensorNames


@runs_as(scored=True)
def llama(config: ConfigValues) -> ModelSpec:
    """Llama 1 to 3, and the many models released as one: Yi, SmolLM, TinyLlama, Vicuna, CodeLlama.

    Source: ``transformers/models/llama/modeling_llama.py``; https://arxiv.org/abs/2302.13971.
    """
    common = shape(config)
    heads = attention(config, common, bias=config.flag("attention_bias"))
    return model(config, common, Layer(heads, gated_mlp(config, bias=config.flag("mlp_bias")), rms_norm(config)))


@runs_as(scored=False)
def internlm3(config: ConfigValues) -> ModelSpec:
    """InternLM 3: Llama itself, two keys of which have names of their own; either biases are everywhere or nowhere.

    Source: ``transformers/models/internlm3/modular_internlm3.py``.
    """
    common = shape(config, key_value_heads=2, head_dim=128)
    config.divides("num_attention_heads", common.num_attention_heads, "hidden_size", common.hidden_size)
    bias = config.flag("attention_bias", "qkv_bias")
    config.only("mlp_bias", bias)
    config.only("bias", bias)
    heads = attention(config, common, bias=bias)
    return model(config, common, Layer(heads, gated_mlp(config, bias=bias), rms_norm(config, 1e-5)))


@runs_as(scored=True)
def mistral(config: ConfigValues) -> ModelSpec:
    """Mistral: Llama's layers with grouped queries and, in the first release, a sliding window.

    Source: ``transformers/models/mistral/modeling_mistral.py``; https://arxiv.org/abs/2310.06825.
    """
    common = shape(config, key_value_heads=8)
    window = sliding_window(config, common.num_hidden_layers)
    layer = Layer(attention(config, common), gated_mlp(config), rms_norm(config))
    return model(config, common, layer, **window)


@runs_as(scored=True)
def ministral3(config: ConfigValues) -> ModelSpec:
    """Ministral 3: Mistral's layers, whose queries are scaled by their position after they are rotated.

    Source: ``transformers/models/ministral3/modeling_ministral3.py``.
    """
    common = shape(config, key_value_heads=8, head_dim=128)
    window = sliding_window(config, common.num_hidden_layers)
    layer = Layer(attention(config, common, scales_query=True), gated_mlp(config), rms_norm(config, 1e-5))
    return model(config, common, layer, **window)


@runs_as(scored=True)
def qwen2(config: ConfigValues) -> ModelSpec:
    """Qwen1.5, Qwen2 and Qwen2.5: Llama's layers with biases on query, key and value.

    Source: ``transformers/models/qwen2/modeling_qwen2.py``; https://arxiv.org/abs/2407.10671.
    """
    common = shape(config)
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, qkv_bias=True)
    return model(config, common, Layer(heads, gated_mlp(config), rms_norm(config)), **window)


@runs_as(scored=True, norms_at_once=True)
def qwen3(config: ConfigValues) -> ModelSpec:
    """Qwen3: each head's queries and keys are normalised, and heads have a width of their own.

    Source: ``transformers/models/qwen3/modeling_qwen3.py``; https://arxiv.org/abs/2505.09388.
    """
    common = shape(config, head_dim=128)
    bias = config.flag("attention_bias")
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, bias=bias, query_key_norm=rms_norm(config))
    return model(config, common, Layer(heads, gated_mlp(config), rms_norm(config)), **window)


@runs_as(
    names_fused=True,
    scored=True,
    joins_rotated=True,
    drops_embedding="never",
    drops_residual=True,
    dropouts=("self_attn.o_proj", "mlp.down_proj"),
)
def phi3(config: ConfigValues) -> ModelSpec:
    """Phi-3, Phi-3.5 and Phi-4: Llama's layers with query, key, value and with gate, up in one matrix each.

    Source: ``transformers/models/phi3/modeling_phi3.py``; https://arxiv.org/abs/2404.14219.
    """
    common = shape(config)
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, rotary_dim(config, common.head_dim), fused_qkv=True)
    mlp = Mlp(config.integer("intermediate_size"), config.activation("hidden_act"), fused_gate_up=True)
    dropout = ("resid_pdrop", "embd_pdrop", "attention_dropout")
    return model(config, common, Layer(heads, mlp, rms_norm(config, 1e-5)), dropout=dropout, **window)


@runs_as(scored=True)
def smollm3(config: ConfigValues) -> ModelSpec:
    """SmolLM3: Llama's layers, of which every fourth rotates nothing.

    Source: ``transformers/models/smollm3/modeling_smollm3.py``.
    """
    common = shape(config, key_value_heads=4)
    bias = config.flag("attention_bias")
    mlp = gated_mlp(config, bias=config.flag("mlp_bias"))
    window = sliding_window(config, common.num_hidden_layers)
    rotated = Layer(attention(config, common, bias=bias), mlp, rms_norm(config))
    plain = Layer(attention(config, common, 0, bias=bias), mlp, rms_norm(config))
    layers = [rotated if rotates else plain for rotates in _rotating(config, common.num_hidden_layers)]
    return model(config, common, layers, tied=True, **window)


def _rotating(config: ConfigValues, count: int) -> list[bool]:
    """Return for each layer whether it rotates; ``no_rope_layers`` holds 1 where it does."""
    interval = config.integer("no_rope_layer_interval", default=4, maximum=MAXIMUM_LAYERS)
    listed = config.integers("no_rope_layers", length=count)
    if listed is None:
        return [(index + 1) % interval != 0 for index in range(count)]
    return [bool(value) for value in listed[:count]]


@runs_as(
    scored=True,
    names_norm=True,
    names_attention=True,
    joins_none=True,
    names_passed=True,
    sums="residual-first",
    drops_embedding="never",
    drops_attention="never",
    drops_residual=True,
    dropouts=("mlp.down_proj",),
)
def stablelm(config: ConfigValues) -> ModelSpec:
    """StableLM 2 and StableLM-3B-4E1T: Llama's layers with LayerNorm and partly rotated heads.

    A norm with weights for each head apart (StableLM-2-12B) is refused.

    Source: ``transformers/models/stablelm/modeling_stablelm.py``; https://arxiv.org/abs/2402.17834.
    """
    common = shape(config)
    rotated = rotary_dim(config, common.head_dim, default=0.25)
    heads = attention(config, common, rotated, qkv_bias=config.flag("use_qkv_bias"))
    placement: Placement = "parallel" if config.flag("use_parallel_residual") else "pre"
    layer = Layer(heads, gated_mlp(config), layer_norm(config), placement=placement)
    return model(config, common, layer, dropout=("attention_dropout", "hidden_dropout"))


@runs_as(scored=True, wide_layer_norm=True, wide_rotary=True)
def olmo(config: ConfigValues) -> ModelSpec:
    """OLMo 1: Llama's layers behind a LayerNorm that has neither scale nor shift; 1.7 clips queries, keys and values.

    Source: ``transformers/models/olmo/modeling_olmo.py``; https://arxiv.org/abs/2402.00838.
    """
    common = shape(config)
    heads = attention(config, common, bias=config.flag("attention_bias"), clip=config.cap("clip_qkv", 0.0))
    return model(config, common, Layer(heads, gated_mlp(config), Norm("layer", weight=False)))


@runs_as(scored=True, wide_scale=True, wide_rotary=True, norms_at_once=True)
def olmo2(config: ConfigValues) -> ModelSpec:
    """OLMo 2: a norm after each part instead of before it, and all queries and keys normalised together.

    Source: ``transformers/models/olmo2/modeling_olmo2.py``; https://arxiv.org/abs/2501.00656.
    """
    common = shape(config)
    heads = attention(
        config,
        common,
        bias=config.flag("attention_bias"),
        query_key_norm=rms_norm(config, 1e-5),
        query_key_norm_scope="full",
    )
    return model(config, common, Layer(heads, gated_mlp(config), rms_norm(config, 1e-5), placement="post"))


@runs_as(scored=True, wide_scale=True, wide_rotary=True, norms_at_once=True, masks=2, masks_from=4)
def olmo3(config: ConfigValues) -> ModelSpec:
    """OLMo 3: OLMo 2's layers, of which three of four look back through a window and have rotary tables of their own.

    Source: ``transformers/models/olmo3/modeling_olmo3.py``.
    """
    spec = olmo2(config)
    return replace(spec, rotary_tables=2, **sliding_window(config, spec.num_hidden_layers))


@runs_as(scored=True)
def arcee(config: ConfigValues) -> ModelSpec:
    """Arcee's AFM: Llama's attention, and a feed-forward part of two matrices around a squared ReLU.

    Source: ``transformers/models/arcee/modeling_arcee.py``.
    """
    common = shape(config)
    heads = attention(config, common, bias=config.flag("attention_bias"))
    config.only("hidden_act", "relu2")
    mlp = Mlp(config.integer("intermediate_size"), "relu-squared", gated=False, bias=config.flag("mlp_bias"))
    return model(config, common, Layer(heads, mlp, rms_norm(config, 1e-5)))


@runs_as(scored=False, norms_at_once=True)
def apertus(config: ConfigValues) -> ModelSpec:
    """Apertus: Llama's layers with normalised heads, and a feed-forward part of two matrices around xIELU, which has parameters.

    Source: ``transformers/models/apertus/modeling_apertus.py`` (v5.24.0).
    """
    common, norm = shape(config), rms_norm(config, 1e-5)
    heads = attention(config, common, bias=config.flag("attention_bias"), query_key_norm=norm)
    config.only("hidden_act", "xielu")
    mlp = Mlp(config.integer("intermediate_size"), "xielu", gated=False)
    names = TensorNames(input_norm="attention_layernorm", post_attention_norm="feedforward_layernorm")
    config.only("qk_norm", True)
    config.only("post_norm", False)
    return model(config, common, Layer(heads, mlp, norm), names=names)


@runs_as(scored=True, masks=0, masks_from=4)
def exaone4(config: ConfigValues) -> ModelSpec:
    """EXAONE 4: a norm after each part, as in OLMo 2, normalised heads, and positions in windowed layers alone where there are any.

    Source: ``transformers/models/exaone4/modeling_exaone4.py``; https://arxiv.org/abs/2507.11407.
    """
    common = shape(config)
    norm, window = rms_norm(config, 1e-5), sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, query_key_norm=norm)
    turning = Layer(heads, gated_mlp(config), norm, placement="post")
    still = replace(turning, attention=replace(heads, rotary_dim=0)) if window else turning
    windows = layer_windows(config.keys, common.num_hidden_layers)
    return model(config, common, [turning if width else still for width in windows], **window)


@runs_as(scored=False, scales_embedded=True)
def granite(config: ConfigValues) -> ModelSpec:
    """Granite 3 and 4 without experts: Llama's layers with factors of the embedding, the scores, what layers add, and the logits.

    The catalog leaves the factors out: transformers multiplies by 1 as well, so that no byte depends on one.

    Source: ``transformers/models/granite/modeling_granite.py``; https://huggingface.co/ibm-granite.
    """
    common = shape(config)
    bias, scale = config.flag("attention_bias"), factor(config, "attention_multiplier")
    heads = attention(config, common, bias=bias, scale=scale)
    mlp = gated_mlp(config, bias=config.flag("mlp_bias"))
    layer = Layer(heads, mlp, rms_norm(config), residual_scale=factor(config, "residual_multiplier"))
    return model(
        config,
        common,
        layer,
        embedding_scale=factor(config, "embedding_multiplier"),
        logit_scale=1 / factor(config, "logits_scaling"),
    )


@runs_as(scored=True)
def hunyuan_v1_dense(config: ConfigValues) -> ModelSpec:
    """Hunyuan without experts: Llama's layers, whose queries and keys are normalised after they are rotated.

    Source: ``transformers/models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py``.
    """
    common = shape(config)
    bias, norm = config.flag("attention_bias"), rms_norm(config, 1e-5)
    config.only("use_qk_norm", True)
    config.only("use_cla", False)
    config.only("mlp_bias", False)
    config.only("num_experts", 1)
    config.ignore("attention_head_dim", "eod_token_id")
    heads = attention(config, common, bias=bias, query_key_norm=norm, norms_rotated=True)
    names = TensorNames(query_norm="query_layernorm", key_norm="key_layernorm")
    return model(config, common, Layer(heads, gated_mlp(config), norm), names=names)


@runs_as(scored=True, drops_embedding="never", drops_residual=True, drops_attention="inside", dropout_modules="neither")
def seed_oss(config: ConfigValues) -> ModelSpec:
    """Seed-OSS: Llama's layers with biases of queries, keys and values, and dropout behind both parts of a layer.

    Source: ``transformers/models/seed_oss/modeling_seed_oss.py``.
    """
    common = shape(config, key_value_heads=8, head_dim=128)
    heads = attention(
        config,
        common,
        qkv_bias=config.flag("attention_bias", default=True),
        output_bias=config.flag("attention_out_bias"),
    )
    layer = Layer(heads, gated_mlp(config, bias=config.flag("mlp_bias")), rms_norm(config))
    return model(config, common, layer, dropout=("attention_dropout", "residual_dropout"), default_dropout=0.1)


@runs_as(scored=True, drops_residual=True, drops_attention="inside", dropout_modules="neither")
def starcoder2(config: ConfigValues) -> ModelSpec:
    """StarCoder2: LayerNorm, biases everywhere, a feed-forward part of two matrices, and dropout behind both parts of a layer.

    Source: ``transformers/models/starcoder2/modeling_starcoder2.py``; https://arxiv.org/abs/2402.19173.
    """
    common = shape(config, key_value_heads=2)
    window = sliding_window(config, common.num_hidden_layers)
    bias = config.flag("use_bias", default=True)
    heads = attention(config, common, bias=bias)
    activation = config.activation("hidden_act", default="gelu_pytorch_tanh")
    mlp = Mlp(config.integer("intermediate_size"), activation, gated=False, bias=bias)
    for key in ("residual_dropout", "embedding_dropout"):
        config.only(key, config.number("residual_dropout", "embedding_dropout", default=0.0))
    config.only("mlp_type", "default")
    config.only("norm_type", "layer_norm")
    return model(
        config,
        common,
        Layer(heads, mlp, Norm("layer", bias=True, epsilon=config.number("norm_epsilon", default=1e-5))),
        tied=True,
        dropout=("attention_dropout", "residual_dropout", "embedding_dropout"),
        names=TensorNames(up="c_fc", down="c_proj"),
        **window,
    )
