"""Phi-3, Phi-3.5 and Phi-4: Llama's layers with query, key, value and with gate, up in one matrix each.

Source: ``transformers/models/phi3/modeling_phi3.py``; https://arxiv.org/abs/2404.14219.
"""

from __future__ import annotations

from memplan.model.families.common_parts import attention, model, rms_norm, rotary_dim, shape, sliding_window
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec


def model_spec(config: ConfigValues) -> ModelSpec:
    """Return the shapes of a Phi-3 config."""
    common = shape(config)
    window = sliding_window(config, common.num_hidden_layers)
    heads = attention(config, common, rotary_dim(config, common.head_dim), fused_qkv=True)
    mlp = Mlp(config.integer("intermediate_size"), config.activation("hidden_act"), fused_gate_up=True)
    dropout = ("resid_pdrop", "embd_pdrop", "attention_dropout")
    return model(config, common, Layer(heads, mlp, rms_norm(config, 1e-5)), dropout=dropout, **window)
