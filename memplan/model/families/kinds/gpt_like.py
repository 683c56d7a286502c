"""Families with LayerNorm, biases and a feed-forward part of two matrices; positions learned, rotated in part or in pairs, or none."""

from dataclasses import replace

from memplan.model.encoder import Encoder
from memplan.model.families.bert_layers import (
    BERT_CODE,
    DISTILBERT_CODE,
    MPNET,
    MPNET_CODE,
    ROBERTA_SCORER,
    bert_like,
    distilled,
)
from memplan.model.families.common_parts import (
    GPT_NAMES,
    attention,
    even_rotary,
    layer_norm,
    model,
    plain_mlp,
    whole_heads,
)
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.families.kinds.interleaved_and_parallel import FALCON_NAMES
from memplan.model.spec import Layer, Mlp, ModelSpec, Norm, TensorNames

GPT2_NAMES = GPT_NAMES._replace(
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    qkv="c_attn",
    input_norm="ln_1",
    post_attention_norm="ln_2",
)


@runs_as(
    scored=True,
    own_products=True,
    wide_softmax=False,
    placed_mask=True,
    names_fed=True,
    names_attention=True,
    drops_residual=True,
    drops_attention="inside",
    dropout_modules="both",
    dropouts=("wpe", "attn.c_proj", "mlp.c_proj"),
)
def gpt2(config: ConfigValues) -> ModelSpec:
    """GPT-2: learned positions, one fused projection, weights stored (in, out), dropout of 0.1.

    Source: ``transformers/models/gpt2/modeling_gpt2.py`` and its ``Conv1D``.
    """
    common = whole_heads(config)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("reorder_and_upcast_attn", False)
    scale = None if config.flag("scale_attn_weights", default=True) else 1.0
    heads = attention(config, common, 0, bias=True, fused_qkv=True, scale=scale)
    mlp = plain_mlp(config, config.integer("n_inner", "intermediate_size", default=4 * common.hidden_size), "gelu_new")
    return model(
        config,
        common,
        Layer(heads, mlp, layer_norm(config)),
        tied=True,
        dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        default_dropout=0.1,
        learned_positions=config.integer("n_positions", "max_position_embeddings", default=1024),
        transposed_linear=True,
        rotary_tables=0,
        names=GPT2_NAMES,
    )


OPT_NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}",
    final_norm="model.decoder.final_layer_norm",
    output="out_proj",
    mlp="",
    up="fc1",
    down="fc2",
    input_norm="self_attn_layer_norm",
    post_attention_norm="final_layer_norm",
)


@runs_as(
    scored=True,
    feeds_inside=True,
    scales_projected=True,
    counts_positions=True,
    drops_embedding="never",
    drops_residual=True,
    dropout_modules="neither",
)
def opt(config: ConfigValues) -> ModelSpec:
    """OPT: learned positions behind two rows that none has, and a ReLU in each layer's own code.

    OPT-350m's layers, which normalise what they have added up, behind a narrower embedding, are refused.

    Source: ``transformers/models/opt/modeling_opt.py``; https://arxiv.org/abs/2205.01068.
    """
    common = whole_heads(config)
    bias, affine = config.flag("enable_bias", default=True), config.flag("layer_norm_elementwise_affine", default=True)
    config.expect("word_embed_proj_dim", common.hidden_size)
    config.only("do_layer_norm_before", True)
    config.only("_remove_final_layer_norm", False)
    config.only("layerdrop", 0.0)
    config.ignore("init_std")
    heads = attention(config, common, 0, bias=bias)
    mlp = plain_mlp(config, config.integer("ffn_dim"), "relu", bias=bias)
    spec = model(
        config,
        common,
        Layer(heads, mlp, Norm("layer", weight=affine, bias=affine)),
        tied=True,
        dropout=("attention_dropout", "dropout"),
        learned_positions=config.integer("max_position_embeddings", default=2048),
        reserved_positions=2,
        rotary_tables=0,
        names=OPT_NAMES,
    )
    return replace(spec, dropout=config.number("dropout", default=0.1))


GPT_NEO_NAMES = GPT2_NAMES._replace(attention="attn.attention", output="out_proj")


@runs_as(
    scored=True,
    steps_alone=True,
    wide_scores="masked",
    names_fed=True,
    names_attention=True,
    passes_positions=False,
    drops_residual=True,
    drops_attention="inside",
    dropout_modules="both",
    dropouts=("wpe", "attn.attention.out_proj", "mlp.c_proj"),
    scores_dropout="attn.attention.out_proj",
)
def gpt_neo(config: ConfigValues) -> ModelSpec:
    """GPT-Neo: GPT-2's layers, whose scores are in fp32 and not scaled; each keeps a mask of all positions, every other within a window.

    Source: ``transformers/models/gpt_neo/modeling_gpt_neo.py``; https://github.com/EleutherAI/gpt-neo.
    """
    common = whole_heads(config)
    config.ignore("attention_types", "attention_layers", "window_size")
    heads = attention(config, common, 0, output_bias=True, scale=1.0)
    config.only("embed_dropout", config.number("resid_dropout", "embed_dropout", default=0.0))
    positions = config.integer("max_position_embeddings", default=2048)
    return model(
        config,
        common,
        Layer(
            heads,
            plain_mlp(config, config.integer("intermediate_size", default=4 * common.hidden_size), "gelu_new"),
            layer_norm(config),
        ),
        tied=True,
        dropout=("attention_dropout", "resid_dropout", "embed_dropout"),
        learned_positions=positions,
        buffers=(positions**2,) * common.num_hidden_layers,
        rotary_tables=0,
        names=GPT_NEO_NAMES,
    )


GPTJ_NAMES = GPT2_NAMES._replace(output="out_proj", up="fc_in", down="fc_out")


@runs_as(
    scored=True,
    wide_scores="unnamed",
    interleaved="in-turn",
    half_tables=True,
    sums="parts-first",
    drops_residual=True,
    dropouts=("wte", "attn.out_proj", "mlp.fc_out"),
    scores_dropout="attn.out_proj",
)
def gptj(config: ConfigValues) -> ModelSpec:
    """GPT-J: attention and feed-forward in parallel behind one norm, neighbours rotated, scores in fp32, a head with a bias.

    Source: ``transformers/models/gptj/modeling_gptj.py``; https://github.com/kingoflolz/mesh-transformer-jax.
    """
    common = whole_heads(config)
    rotated = even_rotary(config, config.integer("rotary_dim", default=64, maximum=common.head_dim))
    rows = config.integer("n_positions", "max_position_embeddings", default=2048)
    heads = attention(config, common, rotated, position_rows=rows)
    return model(
        config,
        common,
        Layer(
            heads,
            plain_mlp(
                config, config.integer("n_inner", "intermediate_size", default=4 * common.hidden_size), "gelu_new"
            ),
            layer_norm(config),
            placement="parallel",
        ),
        dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        head_bias=True,
        buffers=(4 * rows * rotated,),
        names=GPTJ_NAMES,
    )


@runs_as(
    names_fused=True,
    scored=True,
    steps_alone=True,
    adds_inside=True,
    names_fed=True,
    passes_positions=False,
    drops_embedding="never",
    drops_residual=True,
    dropout_modules="attention",
    scores_dropout="self_attention.dense",
)
def bloom(config: ConfigValues) -> ModelSpec:
    """BLOOM, BLOOMZ: ALiBi in place of positions, a norm behind the embedding, a GELU that backward forms again.

    Source: ``transformers/models/bloom/modeling_bloom.py``; https://arxiv.org/abs/2211.05100.
    """
    common = whole_heads(config)
    config.only("apply_residual_connection_post_layernorm", False)
    config.only("slow_but_exact", False)
    config.ignore(
        "offset_alibi", "attention_softmax_in_fp32", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv"
    )
    heads = attention(config, common, 0, bias=True, fused_qkv=True, alibi=True)
    mlp = Mlp(4 * common.hidden_size, "gelu-again", gated=False, bias=True)
    norm = layer_norm(config)
    return model(
        config,
        common,
        Layer(heads, mlp, norm),
        tied=True,
        dropout=("attention_dropout", "hidden_dropout"),
        embedding_norm=norm,
        rotary_tables=0,
        names=FALCON_NAMES,
    )


@runs_as(
    scored=True,
    names_fed=True,
    names_attention=True,
    drops_residual=True,
    drops_attention="inside",
    dropouts=("wpe", "attn.c_proj", "mlp.c_proj"),
)
def gpt_bigcode(config: ConfigValues) -> ModelSpec:
    """StarCoder, SantaCoder: GPT-2's layers with one head of keys and values for all; the model keeps a causal mask of all positions.

    Source: ``transformers/models/gpt_bigcode/modeling_gpt_bigcode.py``; https://arxiv.org/abs/2305.06161.
    """
    common = whole_heads(config)
    if config.flag("multi_query", default=True):
        common = replace(common, num_key_value_heads=1)
    config.expect("num_key_value_heads", common.num_key_value_heads)
    scale = None if config.flag("scale_attn_weights", default=True) else 1.0
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    heads = attention(config, common, 0, bias=True, fused_qkv=True, scale=scale)
    mlp = plain_mlp(
        config, config.integer("n_inner", "intermediate_size", default=4 * common.hidden_size), "gelu_pytorch_tanh"
    )
    positions = config.integer("n_positions", "max_position_embeddings", default=1024)
    return model(
        config,
        common,
        Layer(heads, mlp, layer_norm(config)),
        tied=True,
        dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        default_dropout=0.1,
        learned_positions=positions,
        buffers=(positions**2,),
        rotary_tables=0,
        names=GPT2_NAMES,
    )


@runs_as(**BERT_CODE)
def bert(config: ConfigValues) -> ModelSpec:
    """BERT, and what shares its code: MiniLM, BGE, E5, GTE.

    Source: ``transformers/models/bert/modeling_bert.py``; https://arxiv.org/abs/1810.04805.
    """
    return bert_like(
        config, whole_heads(config), Encoder(config.integer("type_vocab_size", default=2), typed_rows=True)
    )


@runs_as(**BERT_CODE, counts_positions=True)
def roberta(config: ConfigValues) -> ModelSpec:
    """RoBERTa: BERT's layers, whose positions are counted behind the number that stands for padding.

    Source: ``transformers/models/roberta/modeling_roberta.py``; https://arxiv.org/abs/1907.11692.
    """
    padding = config.integer("pad_token_id", default=1, minimum=0)
    types = Encoder(config.integer("type_vocab_size", default=2), scorer=ROBERTA_SCORER)
    return bert_like(config, whole_heads(config), types, reserved=padding + 1)


@runs_as(**BERT_CODE, counts_positions=True)
def xlm_roberta(config: ConfigValues) -> ModelSpec:
    """XLM-RoBERTa, and what shares its code: BGE-M3, multilingual E5.

    Source: ``transformers/models/xlm_roberta/modeling_xlm_roberta.py``; https://arxiv.org/abs/1911.02116.
    """
    return roberta(config)


@runs_as(**DISTILBERT_CODE)
def distilbert(config: ConfigValues) -> ModelSpec:
    """DistilBERT: BERT's layers without types of tokens, and without a projection of the first one.

    Source: ``transformers/models/distilbert/modeling_distilbert.py``; https://arxiv.org/abs/1910.01108.
    """
    return distilled(config, whole_heads(config))


@runs_as(**MPNET_CODE)
def mpnet(config: ConfigValues) -> ModelSpec:
    """MPNet: RoBERTa's layers, whose scores get a bias by distance that all share.

    Source: ``transformers/models/mpnet/modeling_mpnet.py``; https://arxiv.org/abs/2004.09297.
    """
    buckets = config.integer("relative_attention_num_buckets", default=32)
    return bert_like(config, whole_heads(config), replace(MPNET, distance_buckets=buckets), reserved=2)
