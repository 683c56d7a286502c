"""Multi-head latent attention on a tape: keys and values that rise from one narrow vector per token (DeepSeek)."""

from __future__ import annotations

from memplan.model.spec import LatentAttention
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import Builder, promoted
from memplan.step.blocks.norms import normalised
from memplan.step.layers.attended import attended
from memplan.step.layers.attention_kernels import FLASH_WIDTH_MULTIPLE, Heads
from memplan.step.layers.rotation import rotary, turned_complex
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Value
from memplan.units import round_up


def latent_attention(builder: Builder, x: Value, part: LatentAttention, prefix: str) -> Value:
    """Return what multi-head latent attention adds to the residual stream."""
    names, tape, heads = builder.settings.names, builder.tape, part.num_heads
    with tape.alive(x):
        risen_query = _query(builder, x, part, prefix)
        plain, turned = _split(builder, risen_query, heads * part.qk_nope_head_dim, heads * part.qk_rope_head_dim)
        with tape.alive(risen_query):
            down = linear(builder, x, f"{prefix}.{names.key_value_down}", part.kv_lora_rank + part.qk_rope_head_dim)
            latent, key_turned = _split(builder, down, part.kv_lora_rank, part.qk_rope_head_dim)
            latent = normalised(builder, latent, part.norm, f"{prefix}.{names.key_value_down_norm}", part.kv_lora_rank)
            turned, key_turned = _turned(builder, turned, key_turned, part.qk_rope_head_dim)
            width = promoted(plain, turned)
            ways = [(plain, SAME if plain.element_bytes == width else NEW), (turned, SAME)]
            joined = builder.fresh(plain, heads * part.qk_head_dim, width)
            query = tape.apply("cat", ways, joined, traits=SAVES_NOTHING)
            inner = heads * (part.qk_nope_head_dim + part.v_head_dim)
            risen = linear(builder, latent, f"{prefix}.{names.key_value_up}", inner)
            key_plain, value = _split(builder, risen, heads * part.qk_nope_head_dim, heads * part.v_head_dim)
            ways = [(key_plain, SAME), (key_turned, NEW)]
            own = (
                key_plain if builder.settings.code.grouped_uncast else plain
            )  # transformers' ``expand_kv``: ``kv_nope.new_empty``
            key = tape.apply("cat", ways, builder.fresh(own, heads * part.qk_head_dim), traits=SAVES_NOTHING)
            value.apart = True
            named = (down,) if builder.settings.code.forms_tables else ()  # transformers' ``compressed_kv``
            with tape.alive(turned, latent, key_turned, query, risen, key, *named):
                return _output(builder, query, key, value, part, prefix)


def _turned(builder: Builder, query: Value, key: Value, width: int) -> tuple[Value, Value]:
    if builder.settings.code.complex_rotary:
        with builder.tape.alive(query, key):
            return turned_complex(builder, query, key, width)
    query = rotary(builder, query, width, width)
    return query, rotary(builder, key, width, width)


def _query(builder: Builder, x: Value, part: LatentAttention, prefix: str) -> Value:
    """Return the query, compressed and risen again where the model does that."""
    names, queries = builder.settings.names, part.num_heads * part.qk_head_dim
    if not part.q_lora_rank:
        return linear(builder, x, f"{prefix}.{names.query}", queries)
    down = linear(builder, x, f"{prefix}.{names.query_down}", part.q_lora_rank)
    normed = normalised(builder, down, part.norm, f"{prefix}.{names.query_down_norm}", part.q_lora_rank)
    return linear(builder, normed, f"{prefix}.{names.query_up}", queries)


def _split(builder: Builder, x: Value, first: int, second: int) -> tuple[Value, Value]:
    """Return two views of ``x``, of these widths."""
    views = builder.tape.view(x, first), builder.tape.view(x, second)
    builder.tape.apply("split", [(x, NEW)], views, traits=SAVES_NOTHING)
    return views


def _output(builder: Builder, query: Value, key: Value, value: Value, part: LatentAttention, prefix: str) -> Value:
    """Return attention, whose heads lie before tokens since queries were concatenated, and its projection."""
    heads = part.num_heads
    out = attended(builder, Heads(query, key, value, heads, heads))
    cut = builder.profile.attention == "flash" and round_up(part.qk_head_dim, FLASH_WIDTH_MULTIPLE) != part.v_head_dim
    first = builder.profile.attention in ("flash", "cudnn", "math", "eager") and not builder.settings.regime.one_token
    with builder.tape.alive(out):
        out = builder.copied(out, moves=heads > 1 and (first or cut))
        with builder.tape.alive(out):
            return linear(builder, out, f"{prefix}.{builder.settings.names.output}", builder.settings.hidden_size)
