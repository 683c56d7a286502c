"""What families have in common: the usual keys, and runs of equal layers."""

from collections.abc import Sequence
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.model.families.config_values import MAXIMUM_LAYERS, MAXIMUM_POSITIONS, ConfigValues
from memplan.model.families.layer_windows import layer_windows
from memplan.model.spec import Attention, Layer, MixtureOfExperts, Mlp, ModelSpec, Norm, TensorNames, layer_runs

GPT_NAMES = TensorNames(
    embedding="transformer.wte",
    layer="transformer.h.{}",
    attention="attn",
    output="c_proj",
    up="c_fc",
    down="c_proj",
)
"""Names of GPT-2's parts, which models after it have too."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The keys that every family has."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


def shape(
    config: ConfigValues,
    *,
    heads: int | None = None,
    key_value_heads: int | None = None,
    head_dim: int | None = None,
    vocab_size: int | None = None,
    layers: int | None = None,
) -> Shape:
    """Return the common keys; a keyword is what a family's missing key means.

    A null, or neither, means that key-value heads are as many as query heads, and that a head
    has its share of the width.
    """
    hidden = config.integer("hidden_size", "n_embd")
    layers = config.integer("num_hidden_layers", "n_layer", default=layers, maximum=MAXIMUM_LAYERS)
    heads = config.integer("num_attention_heads", "n_head", default=heads)
    missing = heads if key_value_heads is None or config.has("num_key_value_heads") else key_value_heads
    groups = config.integer("num_key_value_heads", default=missing)
    config.divides("num_key_value_heads", groups, "num_attention_heads", heads)
    width = config.integer("head_dim", default=head_dim or 0)
    if not width:
        config.divides("num_attention_heads", heads, "hidden_size", hidden)
        width = max(hidden // heads, 1)
    return Shape(hidden, layers, heads, groups, width, config.integer("vocab_size", default=vocab_size))


def whole_heads(config: ConfigValues) -> Shape:
    """Return the common keys of a family in which heads share the width and keys are not grouped."""
    hidden = config.integer("hidden_size", "n_embd", "n_embed", "dim")
    layers = config.integer("num_hidden_layers", "n_layer", "num_layers", "n_layers", maximum=MAXIMUM_LAYERS)
    heads = config.integer("num_attention_heads", "n_head", "num_heads", "n_heads")
    config.divides("num_attention_heads", heads, "hidden_size", hidden)
    width = max(hidden // heads, 1)
    config.expect("head_dim", width)
    return Shape(hidden, layers, heads, heads, width, config.integer("vocab_size"))


def rotary_dim(config: ConfigValues, head_dim: int, default: float = 1.0) -> int:
    """Return how many dimensions of a head are rotated.

    Formula:
        ``int(head_dim * partial_rotary_factor)``, as transformers computes it.
    """
    nested = config.mapping("rope_parameters", "rope_scaling").get("partial_rotary_factor")
    if isinstance(nested, int | float) and not isinstance(nested, bool) and 0 <= nested <= 1:
        default = float(nested)
    factor = config.number("partial_rotary_factor", "rotary_pct", default=default)
    return even_rotary(config, int(head_dim * factor))


def even_rotary(config: ConfigValues, rotated: int) -> int:
    """Return ``rotated``, noting a problem where it is odd: dimensions are rotated in pairs."""
    if rotated % 2:
        config.conflict("head_dim", f"{rotated} dimensions of a head are rotated, and they come in pairs")
    return rotated


def rms_norm(config: ConfigValues, default: float = 1e-6, *, unit_offset: bool = False) -> Norm:
    """Return a root-mean-square norm; ``default`` is the epsilon that a missing ``rms_norm_eps`` means."""
    return Norm(unit_offset=unit_offset, epsilon=config.number("rms_norm_eps", default=default))


def layer_norm(config: ConfigValues) -> Norm:
    """Return LayerNorm with scale and shift; a missing epsilon is that of ``torch.nn.LayerNorm``."""
    return Norm("layer", bias=True, epsilon=config.number("layer_norm_eps", "layer_norm_epsilon", default=1e-5))


def attention(
    config: ConfigValues, common: Shape, rotated: int | None = None, *, bias: bool = False, **options: Any
) -> Attention:
    """Return attention of the common shape, all of each head rotated unless ``rotated`` is given; ``bias`` is of all projections."""
    options = {"qkv_bias": bias, "output_bias": bias} | options
    if rotated is None:
        rotated = even_rotary(config, common.head_dim)
    return Attention(common.num_attention_heads, common.num_key_value_heads, common.head_dim, rotated, **options)


def plain_mlp(
    config: ConfigValues, inner: int, activation: str, key: str = "activation_function", *, bias: bool = True
) -> Mlp:
    """Return a feed-forward part of two matrices; ``activation`` is what a missing ``key`` means."""
    return Mlp(inner, config.activation(key, default=activation), gated=False, bias=bias)


def gated_mlp(config: ConfigValues, *, bias: bool = False) -> Mlp:
    """Return a SwiGLU feed-forward part, or one with the gate that the config names."""
    return Mlp(config.integer("intermediate_size"), config.activation("hidden_act"), bias=bias)


def factor(config: ConfigValues, key: str, default: float = 1.0) -> float:
    """Return a factor above 0; a missing key means ``default``."""
    value = config.number(key, default=default, maximum=1e9)
    if value:
        return value
    config.problem(key, "expected a number above 0, got 0")
    return 1.0


def sparse_layers(config: ConfigValues, count: int) -> list[bool]:
    """Return for each layer whether it has experts, as Qwen's MoE families decide it.

    Formula:
        ``index not in mlp_only_layers and (index + 1) % decoder_sparse_step == 0``
    """
    step = config.integer("decoder_sparse_step", default=1, maximum=MAXIMUM_LAYERS)
    dense = frozenset(config.integers("mlp_only_layers") or ())
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]


def experts(config: ConfigValues, mixture: MixtureOfExperts) -> MixtureOfExperts:
    """Return ``mixture``, noting a problem where a token uses more experts than there are."""
    if mixture.experts_per_token > mixture.num_experts:
        config.conflict("num_experts_per_tok", f"{mixture.experts_per_token} of {mixture.num_experts} experts")
    return mixture


def model(
    config: ConfigValues,
    common: Shape,
    layers: Layer | Sequence[Layer],
    *,
    tied: bool = False,
    dropout: Sequence[str] = ("attention_dropout",),
    default_dropout: float = 0.0,
    final_norm: Norm | None = None,
    layer_kinds: Sequence[str] = (),
    **options: Any,
) -> ModelSpec:
    """Return a model of the common shape.

    Args:
        config: The config, of which the keys that are left are read.
        layers: All layers, or the one that all are equal to.
        tied: Whether a missing ``tie_word_embeddings`` means tied.
        dropout: Keys that hold a dropout probability; where none but attention has one, it stands for all.
        default_dropout: What they mean when missing.
        final_norm: Norm before the head, if unlike those of the layers.
        layer_kinds: Kinds of layers in ``layer_types`` besides full and windowed attention.
        options: Further fields of :class:`ModelSpec`.
    """
    attention = [key for key in dropout if key.startswith("att")]
    others = [key for key in dropout if key not in attention]
    config.layer_types(common.num_hidden_layers, *layer_kinds)
    alike = [layers] * common.num_hidden_layers if isinstance(layers, Layer) else list(layers)
    runs = layer_runs(alike)
    return ModelSpec(
        name=config.name,
        architecture=config.family,
        vocab_size=common.vocab_size,
        hidden_size=common.hidden_size,
        runs=runs,
        final_norm=final_norm or runs[-1].layer.norm,
        tie_word_embeddings=config.flag("tie_word_embeddings", default=tied),
        max_position_embeddings=config.integer(
            "max_position_embeddings", "n_positions", default=0, maximum=MAXIMUM_POSITIONS
        ),
        dropout=config.dropout(*(others or dropout), default=default_dropout),
        attention_dropout=config.dropout(*(attention or dropout), default=default_dropout),
        use_cache=config.flag("use_cache", default=True),
        source=config.source,
        **options,
    )


def sliding_window(config: ConfigValues, layers: int) -> dict[str, Any]:
    """Return the fields of :class:`ModelSpec` for a sliding window, which the bundled models do not follow."""
    config.integer("sliding_window", default=0, minimum=0, maximum=MAXIMUM_POSITIONS)
    windows = layer_windows(config.keys, layers)
    size = max(windows, default=0)
    if not size:
        return {}
    config.note(f"attention within a window of {size} tokens is planned as attention over the whole sequence")
    return {"window": size, "full_layers": tuple([index for index, window in enumerate(windows) if not window])}
