"""Families with state space layers, in the place of attention or beside it."""

from typing import Any

from memplan.model.families.common_parts import attention, experts, factor, gated_mlp, model, rms_norm, shape
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.family_fields import runs_as
from memplan.model.families.latent_mixtures import grouped
from memplan.model.spec import Attention, Layer, MixtureOfExperts, Mlp, ModelSpec, Norm, TensorNames
from memplan.model.state_space import StateSpace

HYBRID = "hybrid"
"""What Falcon-H1's config calls each of its layers."""
LINEAR, FULL = "linear_attention", "full_attention"
SCANNED = ("mamba", LINEAR)
"""What Granite 4's config, as released and as transformers saves it, calls a layer without attention."""

FALCON_UNREAD = (
    "attention_in_multiplier attention_out_multiplier key_multiplier mlp_multipliers ssm_in_multiplier ssm_multipliers "
    "ssm_out_multiplier num_logits_to_keep mamba_use_mlp mlp_expansion_factor"
)
"""Factors that no byte depends on, and keys of Falcon-H1 that transformers does not read."""


@runs_as(scored=False, scales_embedded=True, scales_parts=True)
def falcon_h1(config: ConfigValues) -> ModelSpec:
    """Falcon-H1: attention and a state space part read the same input; numbers multiply what most parts are given and return.

    The catalog leaves those numbers out: transformers multiplies by 1 as well, so that no byte depends on one.

    Source: ``transformers/models/falcon_h1/modeling_falcon_h1.py`` and its configuration (v5.23.0); https://arxiv.org/abs/2507.22448.
    """
    common, norm = shape(config, heads=32, key_value_heads=8), rms_norm(config, 1e-5)
    config.ignore(*FALCON_UNREAD.split())
    normalised = config.flag("mamba_rms_norm")
    if normalised:
        config.only("mamba_norm_before_gate", False)
    config.ignore("mamba_norm_before_gate")
    inner = config.integer("mamba_d_ssm", default=0 if config.has("mamba_d_ssm") else 1024) or _expanded(
        config, common.hidden_size
    )
    beside = _state_space(
        config,
        inner,
        bias=config.flag("mamba_proj_bias"),
        output_bias=config.flag("projectors_bias"),
        normalised=normalised,
        multiplied=True,
        adapted=False,
        epsilon=norm.epsilon,
    )
    heads = attention(config, common, bias=config.flag("attention_bias"))
    layer = Layer(heads, gated_mlp(config, bias=config.flag("mlp_bias")), norm, beside=beside)
    return model(
        config,
        common,
        layer,
        embedding_scale=factor(config, "embedding_multiplier"),
        logit_scale=factor(config, "lm_head_multiplier"),
        layer_kinds=(HYBRID,),
        names=TensorNames(
            final_norm="model.final_layernorm", post_attention_norm="pre_ff_layernorm", mlp="feed_forward"
        ),
    )


@runs_as(
    scored=False,
    balances=True,
    scales_embedded=True,
    unfused="num_experts",
    names_routed=True,
    passes_positions=False,
    adapted_experts="left",
)
def granitemoehybrid(config: ConfigValues) -> ModelSpec:
    """Granite 4: state space layers, attention without positions in some of their places, and routed experts beside a dense part or not.

    Source: ``transformers/models/granitemoehybrid/modeling_granitemoehybrid.py`` and its configuration (v5.23.0).
    """
    common, norm = shape(config, heads=32), rms_norm(config)
    bias = config.flag("mamba_proj_bias")
    scan = _state_space(
        config, _expanded(config, common.hidden_size), bias=bias, output_bias=bias, adapted=True, epsilon=norm.epsilon
    )
    turned = config.text("position_embedding_type", default="") == "rope"
    bias = config.flag("attention_bias")
    heads = attention(config, common, None if turned else 0, bias=bias, scale=factor(config, "attention_multiplier"))
    sparse = config.integer("num_local_experts", default=8, minimum=0) > 0
    part = _granite_mixture(config) if sparse else _granite_mlp(config)
    added = factor(config, "residual_multiplier")
    kinds = config.keys.get("layer_types")  # checked where the model is put together
    listed = (
        kinds
        if isinstance(kinds, list) and len(kinds) == common.num_hidden_layers
        else [LINEAR] * common.num_hidden_layers
    )
    layers = [Layer(scan if kind in SCANNED else heads, part, norm, residual_scale=added) for kind in listed]
    module = "block_sparse_moe." if sparse else ""
    return model(
        config,
        common,
        layers,
        embedding_scale=factor(config, "embedding_multiplier"),
        logit_scale=1 / factor(config, "logits_scaling"),
        layer_kinds=(*SCANNED, "attention"),
        names=TensorNames(
            mlp="" if sparse else "shared_mlp",
            gate_up="input_linear",
            down="output_linear",
            router=f"{module}router",
            experts=f"{module}experts",
            shared_experts="shared_mlp",
        ),
    )


def _granite_mlp(config: ConfigValues) -> Mlp:
    """Return Granite 4's dense part; sizes of experts are released, and mean nothing without any."""
    config.ignore("intermediate_size", "num_experts_per_tok")
    inner = config.integer("shared_intermediate_size", default=1024)
    return Mlp(inner, config.activation("hidden_act"), fused_gate_up=True)


def _granite_mixture(config: ConfigValues) -> MixtureOfExperts:
    mixture = MixtureOfExperts(
        num_experts=config.integer("num_local_experts", default=8),
        experts_per_token=config.integer("num_experts_per_tok", default=2),
        intermediate_size=config.integer("intermediate_size", default=11008),
        activation=config.activation("hidden_act"),
        shared_intermediate_size=config.integer("shared_intermediate_size", default=1024),
        shared_fused=True,
        softmax_of_chosen=True,
        fp32_choice=True,
    )
    return experts(config, mixture)


def _expanded(config: ConfigValues, hidden: int) -> int:
    """Return the width of heads that a config says as a multiple of the model's."""
    return config.integer("mamba_expand", default=2) * hidden


def _state_space(config: ConfigValues, inner: int, **options: Any) -> StateSpace:
    """Return a state space part whose heads are ``inner`` wide together, by the keys that Bamba's config has."""
    heads = config.integer("mamba_n_heads", default=128)
    config.divides("mamba_n_heads", heads, "the width of state space heads", inner)
    config.ignore("mamba_expand", "time_step_limit")
    if config.keys.get("mamba_d_head") != "auto":
        config.expect("mamba_d_head", max(inner // heads, 1))
    config.ignore("mamba_d_head")
    groups = config.integer("mamba_n_groups", default=1)
    config.divides("mamba_n_groups", groups, "mamba_n_heads", heads)
    return StateSpace(
        num_heads=heads,
        head_dim=max(inner // heads, 1),
        num_groups=groups,
        state_size=config.integer("mamba_d_state", default=256),
        kernel_size=config.integer("mamba_d_conv", default=4),
        chunk_tokens=config.integer("mamba_chunk_size", default=256),
        convolution_bias=config.flag("mamba_conv_bias", default=True),
        **options,
    )


NEMOTRON_PARTS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}
NEMOTRON_WORDS = {
    **NEMOTRON_PARTS,
    "mamba": LINEAR,
    "attention": FULL,
    **{name: name for name in NEMOTRON_PARTS.values()},
}
"""Letters of a pattern, and words of a list, of layers -> what Nemotron-H's layers are."""
NEMOTRON_UNREAD = (
    "expand hidden_dropout n_shared_experts num_logits_to_keep rescale_prenorm_residual residual_in_fp32 use_mamba_kernels "
    "mamba_proj_bias mamba_ssm_cache_dtype mamba_expand mamba_dt_min mamba_dt_max mamba_dt_limit mamba_dt_init_floor "
    "time_step_floor time_step_limit time_step_max time_step_min time_step_rank moe_shared_expert_overlap "
    "mtp_layers_block_type mtp_hybrid_override_pattern norm_eps partial_rotary_factor"
)
"""Keys that change no byte, or that transformers' code of Nemotron-H does not read."""


@runs_as(scored=False, wide_scale=True, widens_scale=True, wide_logits=True, adapted_experts="left")
def nemotron_h(config: ConfigValues) -> ModelSpec:
    """Nemotron-H, Nemotron Nano 2, Nemotron 3: each layer is a state space part, attention without positions, an MLP or routed experts.

    Multi-token prediction modules are left out, as transformers leaves them out.

    Source: ``transformers/models/nemotron_h/modeling_nemotron_h.py`` and its configuration (v5.24.0); https://arxiv.org/abs/2504.03624.
    """
    kinds = _nemotron_kinds(config)
    common = shape(config, heads=32, key_value_heads=8, head_dim=128, vocab_size=131_072, layers=len(kinds))
    if len(kinds) != common.num_hidden_layers:
        config.conflict("num_hidden_layers", f"{common.num_hidden_layers} layers, and {len(kinds)} are listed")
        kinds = [FULL] * common.num_hidden_layers
    norm = Norm(epsilon=config.number("layer_norm_epsilon", default=1e-5))
    config.expect("attention_head_dim", common.head_dim)
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings"):  # read by nothing, or by experts and MLPs alike
        config.only(key, False)
    for key in ("mlp_hidden_act", "mamba_hidden_act"):
        config.only(key, "relu2" if key.startswith("mlp") else "silu")
    config.ignore(*NEMOTRON_UNREAD.split())
    parts: dict[str, StateSpace | Attention | Mlp | MixtureOfExperts] = {
        LINEAR: _nemotron_scan(config, norm),
        FULL: attention(config, common, 0),
        "mlp": Mlp(config.integer("intermediate_size", default=21_504), "relu-squared", gated=False),
        "moe": _nemotron_mixture(config),
    }
    layers = [_alone(parts[kind], norm) for kind in kinds]
    names = TensorNames(
        embedding="model.embeddings", final_norm="model.norm_f", attention="mixer", mlp="mixer", input_norm="norm"
    )
    return model(config, common, layers, layer_kinds=tuple(NEMOTRON_WORDS), names=names)


def _alone(part: StateSpace | Attention | Mlp | MixtureOfExperts, norm: Norm) -> Layer:
    """Return a layer of one part."""
    if isinstance(part, Mlp | MixtureOfExperts):
        return Layer(None, part, norm, placement="alone")
    return Layer(part, None, norm, placement="alone")


def _nemotron_kinds(config: ConfigValues) -> list[str]:
    """Return what each layer is, by a list or a pattern of letters."""
    # Source: ``NemotronHConfig.__post_init__``; a list counts before a pattern.
    config.ignore("layers_block_type", "hybrid_override_pattern")
    given = [config.keys.get(key) for key in ("layers_block_type", "layer_types", "hybrid_override_pattern")]
    listed = next((value for value in given if isinstance(value, list | str) and value), [*NEMOTRON_PARTS])
    kinds = [NEMOTRON_WORDS.get(str(name), "") for name in listed]
    if "" in kinds:
        config.refuse(
            "layers_block_type",
            f"layers are {', '.join(NEMOTRON_WORDS)}, and one of these is none of them: {listed!r:.60}",
        )
    if FULL not in kinds:
        config.refuse("layers_block_type", "a model without attention is not modelled")
    return [kind or FULL for kind in kinds]


def _nemotron_scan(config: ConfigValues, norm: Norm) -> StateSpace:
    heads, groups = (
        config.integer("mamba_num_heads", default=128),
        config.integer("n_groups", "mamba_n_groups", default=8),
    )
    config.divides("n_groups", groups, "mamba_num_heads", heads)
    bias = config.flag("use_bias")
    return StateSpace(
        num_heads=heads,
        head_dim=config.integer("mamba_head_dim", default=64),
        num_groups=groups,
        state_size=config.integer("ssm_state_size", default=128),
        kernel_size=config.integer("conv_kernel", "mamba_d_conv", default=4),
        chunk_tokens=config.integer("chunk_size", "mamba_chunk_size", default=128),
        convolution_bias=config.flag("use_conv_bias", "mamba_conv_bias", default=True),
        bias=bias,
        output_bias=bias,
        adapted=False,
        epsilon=norm.epsilon,
        prefix="mixer",
    )


def _nemotron_mixture(config: ConfigValues) -> MixtureOfExperts:
    mixture = MixtureOfExperts(
        num_experts=config.integer("n_routed_experts", "num_local_experts", default=8),
        experts_per_token=config.integer("num_experts_per_tok", default=2),
        intermediate_size=config.integer("moe_intermediate_size", default=7688),
        activation="relu-squared",
        gated=False,
        shared_intermediate_size=config.integer("moe_shared_expert_intermediate_size", default=7688),
        latent_size=config.integer("moe_latent_size", default=0),
        score_correction=True,
        score_scale=config.number("routed_scaling_factor", default=1.0, maximum=1e6),
        normalised=config.flag("norm_topk_prob", default=True),
        fp32_router=True,
        fp32_scores=True,
    )
    return experts(config, grouped(config, mixture))
