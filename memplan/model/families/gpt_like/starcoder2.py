"""StarCoder2: LayerNorm, biases everywhere, a feed-forward part of two matrices, and dropout behind both parts of a layer.

Source: ``transformers/models/starcoder2/modeling_starcoder2.py``; https://arxiv.org/abs/2402.19173.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, model, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, Norm, TensorNames


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a StarCoder2 config."""
    common = shape(config, key_value_heads=2)
    window = sliding_window(config, common.num_hidden_layers)
    bias = config.flag("use_bias", default=True)
    heads = attention(config, common, qkv_bias=bias, output_bias=bias)
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
