"""A decoder that a pretraining script builds of flags: each part of it is said, and no family's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memplan.model.families.common_parts import attention, experts, model, shape
from memplan.model.families.config_values import MAXIMUM_POSITIONS, ConfigValues
from memplan.model.model import Model
from memplan.model.spec import Layer, MixtureOfExperts, Mlp, Norm

ARCHITECTURE = "gpt"


def model_from_flags(flags: Mapping[str, Any], name: str, source: str) -> Model:
    """Return a decoder of layers that are all alike.

    Args:
        flags: ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``intermediate_size`` and ``vocab_size``, with
            what else it has of ``num_key_value_heads``, ``head_dim``, ``normalization`` (``layer`` or ``rms``), ``norm_bias``,
            ``linear_bias``, ``qkv_bias``, ``activation``, ``gated``, ``learned_positions`` (rows), ``rotary_percent``,
            ``query_key_norm``, ``tie_word_embeddings``, ``num_experts``, ``num_experts_per_tok``, ``moe_intermediate_size``,
            ``shared_intermediate_size``, ``shared_gate``, ``score_correction`` and ``dropout``.
        name: What to call it.
        source: The file of the flags, for messages.

    Raises:
        InvalidFileError: Shapes that are missing, impossible or do not go together; all of them are listed.
        CannotAnswerError: A part that is not modelled.
    """
    values = ConfigValues(flags, name, source, ARCHITECTURE)
    common = shape(values)
    rows = values.integer("learned_positions", default=0, minimum=0, maximum=MAXIMUM_POSITIONS)
    kind = values.text("normalization", "layer")
    norm = Norm("rms" if kind == "rms" else "layer", bias=values.flag("norm_bias", default=kind == "layer"))
    bias = values.flag("linear_bias")
    rotated = int(common.head_dim * values.number("rotary_percent", default=0.0)) // 2 * 2
    heads = attention(
        values,
        common,
        rotated,
        qkv_bias=values.flag("qkv_bias", default=bias),
        output_bias=bias,
        fused_qkv=True,
        query_key_norm=norm if values.flag("query_key_norm") else None,
    )
    spec = model(
        values,
        common,
        Layer(heads, _feed_forward(values, bias), norm),
        tied=True,
        dropout=("dropout",),
        learned_positions=rows,
        rotary_tables=1 if rotated else 0,
    )
    values.finish()
    return replace(Model.from_spec(spec, source), notes=values.notes())


def _feed_forward(values: ConfigValues, bias: bool) -> Mlp | MixtureOfExperts:
    activation = values.activation("activation", default="gelu")
    gated, width = values.flag("gated"), values.integer("intermediate_size")
    count = values.integer("num_experts", default=0, minimum=0)
    if not count:
        return Mlp(width, activation, gated=gated, fused_gate_up=gated, bias=bias)
    if not gated:
        values.refuse("num_experts", "experts without a gate are not modelled")
    mixture = MixtureOfExperts(
        num_experts=count,
        experts_per_token=values.integer("num_experts_per_tok", default=2),
        intermediate_size=values.integer("moe_intermediate_size", default=width),
        activation=activation,
        shared_intermediate_size=values.integer("shared_intermediate_size", default=0, minimum=0),
        shared_gate=values.flag("shared_gate"),
        score_correction=values.flag("score_correction"),
        expert_bias=bias,
    )
    return experts(values, mixture)
