"""Layers of BERT, which normalise what they have added up, and embeddings of types and positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memplan.model.encoder import Encoder, Scorer
from memplan.model.families.common_parts import Shape, attention, model, plain_mlp
from memplan.model.families.config_values import ConfigValues
from memplan.model.spec import Layer, Mlp, ModelSpec, Norm, TensorNames

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

BERT_CODE: dict[str, Any] = {
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

ROBERTA_SCORER = Scorer("classifier.dense", "classifier.out_proj", drops_first=True)
"""``RobertaClassificationHead`` in transformers/models/roberta/modeling_roberta.py (5.24.0)."""

MPNET = Encoder(scorer=ROBERTA_SCORER, checkpoints=False)
MPNET_CODE: Mapping[str, Any] = BERT_CODE | {
    "counts_positions": True,
    "returns_projected": True,
    "returns_weights": False,
    "steps_alone": True,
    "scores_dropout": "attention.attn.o",
    "dropouts": ("embeddings.LayerNorm", "attention.attn.o", "output.dense"),
}
"""``MPNetSelfAttention`` and ``MPNetAttention`` in transformers/models/mpnet/modeling_mpnet.py (5.24.0)."""
MPNET_NAMES = BERT_NAMES._replace(
    query="attn.q", key="attn.k", value="attn.v", output="attn.o", post_attention_norm="attention.LayerNorm"
)

DISTILBERT_NAMES = BERT_NAMES._replace(
    layer="transformer.layer.{}",
    query="q_lin",
    key="k_lin",
    value="v_lin",
    output="out_lin",
    mlp="ffn",
    up="lin1",
    down="lin2",
    post_attention_norm="sa_layer_norm",
    post_feed_forward_norm="output_layer_norm",
)

DISTILBERT_CODE: Mapping[str, Any] = BERT_CODE | {
    "projects_behind": False,
    "drops_attention": "never",
    "dropouts": ("embeddings.LayerNorm", "ffn.lin2"),
}
"""``DistilBertSelfAttention``, ``FFN`` and ``TransformerBlock`` in transformers/models/distilbert/modeling_distilbert.py (5.24.0)."""


def distilled(config: ConfigValues, common: Shape) -> ModelSpec:
    """Return a DistilBERT."""
    config.ignore("sinusoidal_pos_embds", "qa_dropout")  # what its table of positions begins with; another head
    dropout = config.number("seq_classif_dropout", default=0.2)
    encoder = Encoder(pools=False, scorer=Scorer("pre_classifier", activation="relu", dropout=dropout))
    norm = Norm("layer", bias=True, epsilon=1e-12)
    mlp = plain_mlp(config, config.integer("hidden_dim"), "gelu", "activation")
    return _summed(config, common, mlp, norm, ("attention_dropout", "dropout"), DISTILBERT_NAMES, encoder)


def bert_like(config: ConfigValues, common: Shape, encoder: Encoder, reserved: int = 0) -> ModelSpec:
    """Return a model of BERT's layers, of whose table of positions so many rows stand for none."""
    for key in ("is_decoder", "add_cross_attention"):
        config.only(key, False)
    config.only("position_embedding_type", "absolute")
    norm = Norm("layer", bias=True, epsilon=config.number("layer_norm_eps", default=1e-12))
    mlp = plain_mlp(config, config.integer("intermediate_size"), "gelu", "hidden_act")
    dropout = "attention_probs_dropout_prob", "hidden_dropout_prob"
    names = MPNET_NAMES if encoder.distance_buckets else BERT_NAMES
    return _summed(config, common, mlp, norm, dropout, names, encoder, reserved)


def _summed(
    config: ConfigValues,
    common: Shape,
    mlp: Mlp,
    norm: Norm,
    dropout: tuple[str, str],
    names: TensorNames,
    encoder: Encoder,
    reserved: int = 0,
) -> ModelSpec:
    """Return an encoder whose layers norm each sum, with buffers of positions, and of token types where it has a table of these."""
    config.only("chunk_size_feed_forward", 0)
    rows = config.integer("max_position_embeddings", default=512, minimum=reserved + 1)
    spec = model(
        config,
        common,
        Layer(attention(config, common, 0, bias=True), mlp, norm, placement="summed"),
        tied=True,
        dropout=dropout,
        default_dropout=0.1,
        final_norm=NO_NORM,
        embedding_norm=norm,
        learned_positions=rows - reserved,
        reserved_positions=reserved,
        rotary_tables=0,
        buffers=(8 * rows,) * (2 if encoder.token_types else 1),
        names=names,
        encoder=encoder,
    )
    return replace(spec, max_position_embeddings=rows - reserved, tie_word_embeddings=True, use_cache=False)


MODERN_NAMES = TensorNames(
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.{}",
    final_norm="final_norm",
    attention="attn",
    qkv="Wqkv",
    output="Wo",
    gate_up="Wi",
    down="Wo",
    input_norm="attn_norm",
    post_attention_norm="mlp_norm",
)


def modern_bert(config: ConfigValues, common: Shape) -> ModelSpec:
    """Return a ModernBERT, whose first layer is given embedded tokens that are normalised already."""
    for key in ("attention_dropout", "embedding_dropout", "mlp_dropout"):
        config.only(key, 0, 0.0)
    config.only("sparse_prediction", False)
    config.ignore(
        "initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad",
        "sparse_pred_ignore_index", "decoder_bias", "cls_token_id", "global_rope_theta", "local_rope_theta"
    )  # fmt: skip
    bias = config.flag("attention_bias")
    norm = Norm("layer", bias=config.flag("norm_bias"), epsilon=config.number("norm_eps", default=1e-5))
    inner, kind = config.integer("intermediate_size"), config.activation("hidden_activation", default="gelu")
    mlp = Mlp(inner, kind, fused_gate_up=True, bias=config.flag("mlp_bias"))
    layer = Layer(attention(config, common, bias=bias, fused_qkv=True), mlp, norm)
    scorer = Scorer(
        "head.dense",
        bias=config.flag("classifier_bias"),
        activation="gelu",
        dropout=config.number("classifier_dropout", default=0.0),
        norm="head.norm",
        mean=config.text("classifier_pooling", "cls") == "mean",
    )
    config.only("classifier_activation", "gelu")
    count = common.num_hidden_layers
    every, listed = config.integer("global_attn_every_n_layers", default=3), config.keys.get("layer_types")
    kinds = list(listed) if isinstance(listed, (list, tuple)) else [number % every == 0 for number in range(count)]
    spec = model(
        config,
        common,
        [replace(layer, bare=True), *[layer] * (count - 1)],
        tied=True,
        embedding_norm=norm,
        rotary_tables=2,
        window=config.integer("local_attention", default=128) // 2,
        full_layers=tuple([number for number, kind in enumerate(kinds) if kind in (True, "full_attention")]),
        names=MODERN_NAMES,
        encoder=Encoder(pools=False, scorer=scorer, drops=False),
    )
    return replace(spec, tie_word_embeddings=True, use_cache=False)
