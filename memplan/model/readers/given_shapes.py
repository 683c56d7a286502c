"""A model by shapes: on the command line, Llama-like, or by a pretraining script's flags, each part of which is said."""

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memplan.model.families import read_config
from memplan.model.families.common_parts import Shape, attention, experts, model, shape
from memplan.model.families.config_values import MAXIMUM_LAYERS, MAXIMUM_POSITIONS, ConfigValues
from memplan.model.families.nanochat_gpt import nanochat_gpt
from memplan.model.model import Model
from memplan.model.spec import Attention, LatentAttention, Layer, MixtureOfExperts, Mlp, Norm
from memplan.units import ceil_div, round_up

SOURCE = "command line"

_OPTIONS = {
    "hidden_size": "--hidden",
    "intermediate_size": "--intermediate",
    "num_hidden_layers": "--layers",
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "vocab_size": "--vocab",
}


def model_from_shapes(
    *,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    vocab: int = 32_000,
    tied: bool = False,
    name: str = "custom",
) -> Model:
    """Return a Llama-like model of the given shapes.

    Args:
        hidden: Width of the residual stream.
        intermediate: Width of the feed-forward part; by default Llama's, :func:`llama_intermediate`.
        kv_heads: Key and value heads; by default as many as query heads.
        head_dim: Width of a head; by default ``hidden / heads``, which must come out even.
        vocab: Rows of the embedding; by default those of Llama 1 and 2.

    Raises:
        InvalidFileError: A value is not a positive integer, is absurd, or does not go with another.

    Example:
        >>> from memplan.model.inventory import parameter_count
        >>> parameter_count(model_from_shapes(layers=32, hidden=4096, heads=32).inventory)
        6738415616
    """
    usable = type(hidden) is int and hidden > 0
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": llama_intermediate(hidden) if intermediate is None and usable else intermediate or 0,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    if intermediate is None and not usable:
        config["intermediate_size"] = 1  # the message about the width is enough
    spec, notes = read_config(config, name, SOURCE, lambda key: _OPTIONS.get(key, key))
    model = Model.from_spec(spec, SOURCE)
    return Model(model.spec, model.inventory, SOURCE, notes=notes)


def llama_intermediate(hidden: int) -> int:
    """Return the feed-forward width that Llama has at a given width.

    Formula:
        ``round_up(ceil(8 / 3 * hidden), 256)``: two thirds of 4 * hidden, so that three
        matrices cost what two of 4 * hidden would, rounded up to a multiple of 256.

    Args:
        hidden: Width of the residual stream; at least 1.

    Source:
        https://arxiv.org/abs/2302.13971, section 2.2, and ``FeedForward`` with
        ``multiple_of=256`` in https://github.com/meta-llama/llama.

    Example:
        >>> llama_intermediate(4096), llama_intermediate(5120)
        (11008, 13824)
    """
    return round_up(ceil_div(8 * hidden, 3), 256)


ARCHITECTURE = "gpt"


def model_from_flags(flags: Mapping[str, Any], name: str, source: str) -> Model:
    """Return a decoder of layers that are all alike, but for those that have experts.

    Args:
        flags: ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``intermediate_size`` and ``vocab_size``, with
            what else it has of ``num_key_value_heads``, ``head_dim``, ``normalization`` (``layer`` or ``rms``), ``norm_bias``,
            ``linear_bias``, ``qkv_bias``, ``activation``, ``squared_relu``, ``gated``, ``learned_positions`` (rows), ``rotary_percent``,
            ``query_key_norm``, ``sinks``, ``tie_word_embeddings``, ``num_experts``, ``num_experts_per_tok``, ``moe_intermediate_size``,
            ``expert_layers`` (:func:`memplan.model.readers.given_shapes.expert_layers`), ``shared_intermediate_size``,
            ``shared_gate``, ``score_correction``, ``kv_lora_rank``, ``q_lora_rank``, ``qk_head_dim``, ``qk_rope_head_dim``,
            ``v_head_dim`` and ``dropout``. Or ``window_pattern`` and
            ``sequence_length``, which nanochat's own model has. Or ``model_type``, with the keys of that family's ``config.json``.
        source: The file of the flags, for messages.

    Raises:
        InvalidFileError: Shapes that are missing, impossible or do not go together; all of them are listed.
        CannotAnswerError: A part that is not modelled.
    """
    if "model_type" in flags:
        spec, notes = read_config(flags, name, source)
        return replace(Model.from_spec(spec, source), notes=notes)
    values = ConfigValues(flags, name, source, ARCHITECTURE)
    if values.has("window_pattern"):
        spec = nanochat_gpt(values)
        values.finish()
        return replace(Model.from_spec(spec, source), notes=values.notes())
    common = shape(values)
    rows = values.integer("learned_positions", default=0, minimum=0, maximum=MAXIMUM_POSITIONS)
    kind = values.text("normalization", "layer")
    norm = Norm("rms" if kind == "rms" else "layer", bias=values.flag("norm_bias", default=kind == "layer"))
    bias = values.flag("linear_bias")
    rotated = int(common.head_dim * values.number("rotary_percent", default=0.0)) // 2 * 2
    heads = _attention(values, common, rotated, norm, bias)
    spec = model(
        values,
        common,
        [Layer(heads, part, norm) for part in _feed_forwards(values, common.num_hidden_layers, bias)],
        tied=True,
        dropout=("dropout",),
        learned_positions=rows,
        rotary_tables=1 if rotated else 0,
    )
    values.finish()
    return replace(Model.from_spec(spec, source), notes=values.notes())


def _attention(
    values: ConfigValues, common: Shape, rotated: int, norm: Norm, bias: bool
) -> Attention | LatentAttention:
    """Return attention, latent where a width is given that keys and values are compressed to."""
    query_key_norm, qkv_bias = values.flag("query_key_norm"), values.flag("qkv_bias", default=bias)
    rank = values.integer("kv_lora_rank", default=0, minimum=0)
    if not rank:
        return attention(
            values,
            common,
            rotated,
            qkv_bias=qkv_bias,
            output_bias=bias,
            fused_qkv=True,
            query_key_norm=norm if query_key_norm else None,
            sinks=values.flag("sinks"),
        )
    return LatentAttention(
        common.num_attention_heads,
        values.integer("q_lora_rank", default=0, minimum=0),
        rank,
        values.integer("qk_head_dim", default=128),
        values.integer("qk_rope_head_dim", default=64),
        values.integer("v_head_dim", default=128),
        norm if query_key_norm else None,
        output_bias=bias,
    )


def _feed_forwards(values: ConfigValues, layers: int, bias: bool) -> list[Mlp | MixtureOfExperts]:
    """Return what each layer feeds forward through: experts where the pattern of layers says so, in all without one."""
    activation = values.activation("activation", default="gelu")
    activation = "relu-squared" if values.flag("squared_relu") else activation
    gated, width = values.flag("gated"), values.integer("intermediate_size")
    count, pattern = values.integer("num_experts", default=0, minimum=0), values.text("expert_layers", "1")
    dense = Mlp(width, activation, gated=gated, fused_gate_up=gated, bias=bias)
    if not count:
        return [dense] * layers
    sparse = expert_layers(pattern, layers)
    if sparse is None:
        values.problem(
            "expert_layers", f"expected a number, or a 0 or 1 for each of {layers} layers, got {pattern!r:.60}"
        )
    mixture = MixtureOfExperts(
        num_experts=count,
        experts_per_token=values.integer("num_experts_per_tok", default=2),
        intermediate_size=values.integer("moe_intermediate_size", default=width),
        activation=activation,
        shared_intermediate_size=values.integer("shared_intermediate_size", default=0, minimum=0),
        shared_gate=values.flag("shared_gate"),
        score_correction=values.flag("score_correction"),
        expert_bias=bias,
        router_bias=bias,
        gated=gated,
    )
    part = experts(values, mixture)
    return [part if one else dense for one in sparse or (True,) * layers]


ALLOWED = re.compile(r"[,\d\[\]()+*\s]*")


def expert_layers(text: str, layers: int) -> tuple[bool, ...] | None:
    """Return for each layer whether it has experts; None where the text says it of another number of layers, or not at all.

    Args:
        text: A number, of which every layer whose index is a multiple has experts, or a Python expression of lists.

    Example:
        >>> expert_layers("([0]*1+[1]*2)", 3), expert_layers("2", 3)
        ((False, True, True), (True, False, True))
    """
    text = text.strip()
    if text.isdecimal() and 0 < int(text) <= MAXIMUM_LAYERS:
        return tuple(index % int(text) == 0 for index in range(layers))
    pattern = _evaluated(text)
    if pattern is None or len(pattern) != layers or not {0, 1}.issuperset(pattern):
        return None
    return tuple(map(bool, pattern))


def _evaluated(text: str) -> list[int] | None:
    """Return the list that sums and multiples of lists make; None for anything else."""
    if not ALLOWED.fullmatch(text) or len(text) > MAXIMUM_LAYERS:
        return None
    try:
        return _list(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _list(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        return [_number(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        total = _list(node.left) + _list(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        part, times = (node.left, node.right) if isinstance(node.right, ast.Constant) else (node.right, node.left)
        count = _number(times)
        if count > MAXIMUM_LAYERS:
            raise ValueError
        total = _list(part) * count
    else:
        raise ValueError
    if len(total) > MAXIMUM_LAYERS:
        raise ValueError
    return total


def _number(node: ast.expr) -> int:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        raise ValueError
    return node.value
