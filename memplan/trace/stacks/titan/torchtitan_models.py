"""torchtitan's own models, configured by their own builders with the shapes of a spec."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from memplan.model.spec import Attention, Layer, MixtureOfExperts, Mlp, ModelSpec
from memplan.training.resolved import TrainingSetup


@dataclass(frozen=True, slots=True)
class Family:
    """What torchtitan builds a family of."""

    name: str  # Of its folder in torchtitan/models
    model: Any  # The class of the whole
    block: Any  # The class of a layer
    rope: Any  # The class that turns heads
    # Says how its parts are divided, given whether GPUs share the sequence too, and whether they share experts.
    shard: Callable[[Any, bool, bool], None]


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "llama3",
        Llama3Model,
        Llama3TransformerBlock,
        ComplexRoPE,
        lambda config, shared, _: set_llama3_sharding_config(config, enable_sp=shared),
    ),
    "qwen3": Family(
        "qwen3",
        Qwen3Model,
        Qwen3TransformerBlock,
        CosSinRoPE,
        lambda config, shared, experts: set_qwen3_sharding_config(config, enable_sp=shared, enable_ep=experts),
    ),
}
FAMILIES |= {"qwen3_moe": FAMILIES["qwen3"]}


def model_config(spec: ModelSpec, setup: TrainingSetup) -> Any:
    """Return the config of a model, which builds it."""
    dim, family = spec.hidden_size, FAMILIES[spec.architecture]
    layers: list[Any] = []
    for run in spec.runs:
        layers += [_layer(run.layer, family, dim, setup)] * run.count
    config = family.model.Config(
        dim=dim,
        vocab_size=spec.vocab_size,
        enable_weight_tying=spec.tie_word_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=spec.vocab_size, embedding_dim=dim),
        norm=RMSNorm.Config(normalized_shape=dim),
        lm_head=Linear.Config(in_features=dim, out_features=spec.vocab_size),
        layers=layers,
    )
    family.shard(config, setup.config.parallel.sequence, setup.config.parallel.expert > 1)
    return config


def _layer(layer: Layer, family: Family, dim: int, setup: TrainingSetup) -> Any:
    heads, flex = layer.attention, setup.profile.attention == "flex"
    assert isinstance(heads, Attention)
    attention = make_gqa_config(
        dim=dim,
        n_heads=heads.num_heads,
        n_kv_heads=heads.num_key_value_heads,
        head_dim=heads.head_dim,
        wqkv_param_init={},
        wo_param_init={},
        inner_attention=FlexAttention.Config() if flex else ScaledDotProductAttention.Config(),
        fuse_qkv=True,
        rope=family.rope.Config(dim=heads.head_dim, max_seq_len=setup.config.sequence_length),
        qk_norm=RMSNorm.Config(normalized_shape=heads.head_dim) if heads.query_key_norm else None,
    )
    norms = {name: RMSNorm.Config(normalized_shape=dim) for name in ("attention_norm", "ffn_norm")}
    assert layer.feed_forward is not None
    return family.block.Config(attention=attention, **_feed_forward(layer.feed_forward, dim), **norms)


def _feed_forward(part: Mlp | MixtureOfExperts, dim: int) -> dict[str, Any]:
    """Return what a layer's feed-forward part is called, with its config."""
    if isinstance(part, Mlp):
        return {"feed_forward": _dense(part.intermediate_size, dim)}
    count, used = part.num_experts, part.experts_per_token
    router = make_router_config(
        dim=dim,
        num_experts=count,
        gate_param_init={},
        top_k=used,
        score_func="sigmoid" if part.score_correction else "softmax",
        route_norm=part.normalised,
        route_scale=part.score_scale,
        num_expert_groups=part.groups if part.groups > 1 else None,
        num_limited_groups=part.groups_per_token if part.groups > 1 else None,
    )
    routed = make_routed_experts_config(
        dim=dim,
        hidden_dim=part.intermediate_size,
        num_experts=count,
        top_k=used,
        param_init={},
        comm_backend="standard",
    )
    shared = _dense(part.shared_intermediate_size, dim) if part.shared_intermediate_size else None
    return {"moe": make_moe_config(num_experts=count, router=router, routed_experts=routed, shared_experts=shared)}


def _dense(width: int, dim: int) -> Any:
    return make_ffn_config(dim=dim, hidden_dim=width, w1_param_init={}, w2w3_param_init={})
