"""Attention of query, key and value on a tape: by the kernel that a setup asks for, or step by step."""

from collections.abc import Sequence

from memplan.model.spec import Attention, LatentAttention
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import Builder, promoted
from memplan.step.blocks.norms import normalised
from memplan.step.kernels.attention_choice import is_wide
from memplan.step.layers.attention_kernels import (
    FLASH_WIDTH_MULTIPLE,
    Heads,
    additive_mask,
    attention_kernel,
    bucketed_attention,
    eager_attention,
    flash_attention,
    flex_attention,
    probabilities,
    repeated,
    scores_of,
    ungrouped,
    weighted_sum,
)
from memplan.step.layers.handed_down import cached
from memplan.step.layers.rotation import rotary, turned_complex
from memplan.step.layers.stepwise_attention import (
    biased_attention,
    capped_attention,
    distanced_attention,
    masked_in_layer,
    stepwise_attention,
    wide_attention,
)
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Value
from memplan.units import round_up


def attended(builder: Builder, heads: Heads, part: Attention | None = None) -> Value:
    """Return attention."""
    stepwise = goes_by_steps(builder, part)
    if part is not None and part.alibi:
        return biased_attention(builder, heads)
    if builder.score_bias is not None:
        return distanced_attention(builder, heads, builder.score_bias)
    if stepwise and builder.settings.code.wide_scores:
        return wide_attention(builder, heads)
    if stepwise and builder.settings.code.masks_layers:
        return capped_attention(builder, heads, part)
    if stepwise and builder.settings.code.added_mask:
        return stepwise_attention(builder, heads, part)
    if stepwise and part is not None and builder.settings.code.scales_in_place:
        return masked_in_layer(builder, heads, part)
    if builder.settings.code.contiguous_heads and not stepwise and not builder.settings.flash_attn:
        heads = _contiguous(builder, heads)
    if builder.settings.code.asks_for_groups and not stepwise and (builder.settings.regime.masked or is_wide(part)):
        heads = ungrouped(builder, heads, expands=True)  # before autocast casts them (``use_gqa_in_sdpa``)
    query, key, value = (builder.lowered(x) for x in heads.tensors)
    if builder.settings.flash_attn and query.element_bytes == 4:  # ``fa_peft_integration_check`` of transformers
        query, key, value = (builder.cast(x, builder.compute) for x in heads.tensors)
    lowered = Heads(query, key, value, heads.number, heads.groups)
    with builder.tape.alive(*heads.tensors, query, key, value):
        if stepwise and part is not None:
            return eager_attention(builder, lowered, part)
        if builder.settings.regime.masked:
            return _masked(builder, lowered)
        if builder.profile.attention == "math":
            return math_attention(builder, lowered)
        if builder.profile.attention == "flash":
            return flash_attention(builder, lowered)
        if builder.profile.attention == "flex":
            return flex_attention(builder, lowered)
        if builder.profile.attention == "cudnn" and builder.settings.code.cuts_sequences:
            return bucketed_attention(builder, lowered)
        efficient = builder.profile.attention == "efficient"
        return attention_kernel(builder, ungrouped(builder, lowered) if efficient else lowered)


def _contiguous(builder: Builder, heads: Heads) -> Heads:
    """Return heads in copies where they do not lie in order, and repeated where they are not told of in groups."""
    # Source: ``sdpa_attention_forward`` in transformers/integrations/sdpa_attention.py, 4.48.0 to 4.55.4.
    tensors: list[Value] = []
    with builder.tape.alive(*heads.tensors):
        heads = ungrouped(builder, heads) if builder.settings.code.repeats_keys else heads
        for x, number in zip(heads.tensors, (heads.number, heads.groups, heads.groups), strict=True):
            sliced = builder.tape.storages[x.storage][2] > x.coefficient  # of the rows of a fused projection
            moves = x.apart and (number > 1 or sliced) and not builder.settings.regime.one_token
            with builder.tape.alive(*heads.tensors, *tensors):
                tensors.append(builder.copied(x, moves=moves))
    query, key, value = tensors
    return heads._replace(query=query, key=key, value=value)


def _masked(builder: Builder, heads: Heads) -> Value:
    """Return attention by a kernel that is given a mask, for which keys and values are repeated."""
    if heads.groups > 1:
        heads = ungrouped(builder, heads)
    with builder.tape.alive(*heads.tensors):
        mask = additive_mask(builder, heads.query)
        with builder.tape.alive(mask):
            if builder.profile.attention == "math":
                return math_attention(builder, heads, (mask,))
            return attention_kernel(builder, heads, masks=(mask,))


def goes_by_steps(builder: Builder, part: Attention | None) -> bool:
    """Tell whether scores are formed operation by operation: as asked for, or as soft caps and sinks need it."""
    if builder.profile.attention == "eager" or builder.settings.flash_attn:
        return not builder.settings.flash_attn
    return part is not None and bool(part.sinks or part.logit_softcap)


def latent_attention(builder: Builder, x: Value, part: LatentAttention, prefix: str) -> Value:
    """Return what multi-head latent attention adds to the residual stream.

    Source:
        ``DeepseekV3Attention.forward`` in transformers/models/deepseek_v3/modeling_deepseek_v3.py (5.23.0), Glm4MoeLite's and Mistral4's.
    """
    names, tape, heads = builder.settings.names, builder.tape, part.num_heads
    with tape.alive(x):
        risen_query = _in_heads(builder, _query(builder, x, part, prefix), heads)
        plain, turned = _split(builder, risen_query, heads * part.qk_nope_head_dim, heads * part.qk_rope_head_dim)
        with tape.alive(risen_query):
            down = linear(builder, x, f"{prefix}.{names.key_value_down}", part.kv_lora_rank + part.qk_rope_head_dim)
            latent, key_turned = _split(builder, down, part.kv_lora_rank, part.qk_rope_head_dim)
            cast = builder.settings.autocast and latent.element_bytes < 4  # the copy of a slice lies in order
            sliced = (1, 1) if part.qk_rope_head_dim and not (cast or builder.settings.regime.one_token) else (0, 0)
            norm = f"{prefix}.{names.key_value_down_norm}"
            latent = normalised(builder, latent, part.compressed_norm, norm, part.kv_lora_rank, copied=sliced)
            turned, key_turned = _turned(builder, turned, key_turned, part.qk_rope_head_dim)
            with tape.alive(turned, down):
                latent, key_turned = cached(builder, latent, key_turned)  # before they rise again
            width = promoted(plain, turned)
            ways = [(plain, SAME if plain.element_bytes == width else NEW), (turned, SAME)]
            joined = builder.fresh(plain, heads * part.qk_head_dim, width)
            query = tape.apply("cat", ways, joined, traits=SAVES_NOTHING)
            if part.scales_query:
                with tape.alive(turned, latent, key_turned, down):
                    query, _ = scaled_by_position(builder, query)
            inner = heads * (part.qk_nope_head_dim + part.v_head_dim)
            risen = _in_heads(builder, linear(builder, latent, f"{prefix}.{names.key_value_up}", inner), heads)
            key_plain, value = _split(builder, risen, heads * part.qk_nope_head_dim, heads * part.v_head_dim)
            ways = [(key_plain, SAME), (key_turned, NEW)]
            own = key_plain if builder.settings.code.latent_keys else plain
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


def scaled_by_position(builder: Builder, query: Value) -> tuple[Value, tuple[Value, ...]]:
    """Return queries times a factor for each position, which backward multiplies by again, and what attention names of these.

    Source:
        ``get_llama_4_attn_scale`` in transformers/models/ministral3/modeling_ministral3.py, ``Llama4TextAttention.forward`` in
        models/llama4/modeling_llama4.py (5.23.0).
    """
    tape, wide = builder.tape, builder.settings.code.wide_factors
    if not wide:
        factors = tape.make("factors", tape.value(Quantity.POSITIONS, 1, query.element_bytes))
        return builder.pointwise("scale query", query, (factors,)), ()
    positions = tape.make("positions", tape.value(Quantity.POSITIONS, 1, 8))
    factors = tape.make("factors", tape.value(Quantity.POSITIONS, 1, 4), positions)
    with tape.alive(query, positions, factors):
        scaled = builder.cast(
            builder.product(query, factors, "scale query"), query.element_bytes, foreign=query.foreign
        )
    return scaled, (positions, factors)


def _query(builder: Builder, x: Value, part: LatentAttention, prefix: str) -> Value:
    """Return the query, compressed and risen again where the model does that."""
    names, queries = builder.settings.names, part.num_heads * part.qk_head_dim
    if not part.q_lora_rank:
        return linear(builder, x, f"{prefix}.{names.query}", queries)
    down = linear(builder, x, f"{prefix}.{names.query_down}", part.q_lora_rank)
    normed = normalised(builder, down, part.compressed_norm, f"{prefix}.{names.query_down_norm}", part.q_lora_rank)
    return linear(builder, normed, f"{prefix}.{names.query_up}", queries)


def _in_heads(builder: Builder, x: Value, heads: int) -> Value:
    """Return a projection with heads before tokens, whose gradient, joined so, is copied where their order is another."""
    if heads == 1 or builder.settings.regime.one_token:
        return x
    return builder.tape.apply("look", [(x, NEW)], builder.tape.view(x), traits=SAVES_NOTHING)


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


def math_attention(builder: Builder, heads: Heads, masks: Sequence[Value] = ()) -> Value:
    """Return attention that saves its probabilities, in fp32 (attention.cpp, _scaled_dot_product_attention_math)."""
    tape = builder.tape
    out_bytes, count = heads.query.element_bytes, heads.number
    mask: Value | None
    wide = query, key, value = [builder.cast(x, 4) for x in heads.tensors]
    query = builder.pointwise("scale", query)
    if masks:
        (mask,) = masks
    elif builder.settings.sees_all:
        mask = None
    else:
        square = (Quantity.SQUARE, 1)
        ones = tape.make("ones", tape.value(*square, 1, part=Part.TEMPORARIES))
        flags = tape.make("mask", tape.value(*square, 1, part=Part.TEMPORARIES), ones)
        mask = tape.make("mask", tape.value(*square, 4, part=Part.TEMPORARIES), flags)
    late = builder.settings.code.own_scores and heads.groups == 1 < count  # products look at the one head as often
    if not late:
        _, key, value, _, _ = ungrouped(builder, Heads(query, key, value, count, heads.groups))
    columns = builder.pointwise("scale", key)
    scores = scores_of(builder, query, repeated(builder, columns, count, alone=True) if late else columns, count, 4)
    if mask is not None:
        scores = tape.apply("mask", [(scores, SAME)], builder.fresh(scores), traits=SAVES_NOTHING)
    weights = probabilities(builder, scores)
    with tape.alive(weights):
        weights = builder.dropped(weights, builder.settings.attention_dropout)
    narrow = () if out_bytes == 4 else (tape.make("cast", tape.value(Quantity.SCORES, count, out_bytes), weights),)
    read = repeated(builder, value, count, alone=True) if late else value
    out = builder.cast(weighted_sum(builder, weights, read, read.width, count), out_bytes)
    variables = (
        weights,
        key,
        value,
        query,
        *(() if mask is None else (mask,)),
        *reversed(wide),
    )  # what was made last goes first, results at the end
    tape.touch(*variables, *(narrow or (weights,)))
    return out
