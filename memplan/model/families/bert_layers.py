"""Layers of BERT, which normalise what they have added up, and embeddings of types and positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memplan.model.encoder import Encoder
from memplan.model.families.common_parts import Shape, attention, model, plain_mlp
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, ModelSpec, Norm, TensorNames

NO_NORM = Norm("none", weight=False)
"""What stands before the head where the last layer ends with a norm."""

BERT_NAMES = TensorNames(
    embedding="embeddings.word_embeddings",
    embedding_norm="embeddings.LayerNorm",
    positions="embeddings.position_embeddings",
    layer="encoder.layer.{}",
    head="classifier",
    attention="attention",
    query="self.query",
    key="self.key",
    value="self.value",
    output="output.dense",
    mlp="",
    up="intermediate.dense",
    down="output.dense",
    post_attention_norm="attention.output.LayerNorm",
    post_feed_forward_norm="output.LayerNorm",
)

BERT_CODE: Mapping[str, Any] = {
    "scored": True,
    "projects_behind": True,
    "wide_softmax": False,
    "wide_weights": True,
    "forms_tables": False,
    "passes_positions": False,
    "drops_residual": True,
    "dropout_modules": "both",
    "dropouts": ("embeddings.LayerNorm", "attention.output.dense", "output.dense"),
}
"""What transformers' code of BERT, and of what was made of it, does."""


def bert_like(config: ConfigValues, common: Shape, encoder: Encoder, reserved: int = 0) -> ModelSpec:
    """Return a model of BERT's layers, of whose table of positions so many rows stand for none."""
    for key in ("is_decoder", "add_cross_attention"):
        config.only(key, False)
    config.only("position_embedding_type", "absolute")
    config.only("chunk_size_feed_forward", 0)
    norm = Norm("layer", bias=True, epsilon=config.number("layer_norm_eps", default=1e-12))
    rows = config.integer("max_position_embeddings", default=512, minimum=reserved + 1)
    mlp = plain_mlp(config, config.integer("intermediate_size"), "gelu", "hidden_act")
    spec = model(
        config,
        common,
        Layer(attention(config, common, 0, bias=True), mlp, norm, placement="summed"),
        tied=True,
        dropout=("attention_probs_dropout_prob", "hidden_dropout_prob"),
        default_dropout=0.1,
        final_norm=NO_NORM,
        embedding_norm=norm,
        learned_positions=rows - reserved,
        reserved_positions=reserved,
        rotary_tables=0,
        buffers=(8 * rows, 8 * rows),
        names=BERT_NAMES,
        encoder=encoder,
    )
    return replace(spec, max_position_embeddings=rows - reserved, tie_word_embeddings=True, use_cache=False)
