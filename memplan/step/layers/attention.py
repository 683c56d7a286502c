"""Multi-head attention with grouped queries on a tape."""

from collections.abc import Sequence

from memplan.model.spec import Attention
from memplan.step.blocks.adapted_projections import linear, linear_of_parts
from memplan.step.blocks.builder import Builder, looked_at
from memplan.step.blocks.fused_adapters import fused_linears, fuses
from memplan.step.blocks.norms import normalised
from memplan.step.blocks.projections import clipped
from memplan.step.divided.shared_ends_and_rows import row_product
from memplan.step.layers.attention_kernels import FLASH_WIDTH_MULTIPLE, Heads, chosen_heads, repeated, ungrouped
from memplan.step.layers.handed_down import cached, stored
from memplan.step.layers.head_gradients import (
    copied_gradients,
    heads_first,
    in_heads,
    is_transposed,
    normed_by_kernel,
    stays_transposed,
    views_normed,
)
from memplan.step.layers.interleaved_rotary import interleaved_rotation
from memplan.step.layers.rotation import rotary, turned
from memplan.step.layers.scaled_dot_product import attended, goes_by_steps, scaled_by_position
from memplan.step.tapes.taped_operations import NEW, SAVES_NOTHING, Value


def attention(builder: Builder, x: Value, part: Attention, prefix: str) -> Value:
    """Return what multi-head attention adds to the residual stream."""
    code = builder.settings.code
    with builder.tape.alive(x):
        (query, key, value), gates = _formed(builder, x, part, prefix)
        query.apart = key.apart = value.apart = True
        whole = value
        if code.by_groups:
            query, key, value = _put_together(builder, query, key, value, part)
        norms, late = part.query_key_norm is not None and not code.turns_each, part.norms_rotated
        if norms and not late and not _norms_at_once(builder, part, prefix):
            query, key = _normed(builder, query, key, value, part, prefix)
        if norms and views_normed(part):
            query, key, value = in_heads(builder, (query, key, value), part)
        named = gates
        if not (code.query_first or code.turns_each):
            with builder.tape.alive(*gates):
                turn = interleaved_rotation if code.interleaved and part.rotary_dim else turned
                query, key, named = turn(builder, (query, key, value), part)
        if norms and late:
            query, key = _normed(builder, query, key, value, part, prefix)
        if part.scales_query:
            with builder.tape.alive(query, key, value, *named):
                query, factors = scaled_by_position(builder, query)
            named = (*named, *factors)
        if code.cuts_sequences:
            query, key, value = [looked_at(builder, x) for x in (query, key, value)]
        with builder.tape.alive(query, *named):
            key, value = (key, value) if part.reuses else cached(builder, key, value)
            stored(builder, key, value)
        groups = part.num_heads if key.width == query.width else part.num_key_value_heads
        heads = _repeated(builder, Heads(query, key, value, part.num_heads, groups))
        named = (*named, whole) if code.names_all else named
        out, result = _result(builder, heads, (*named, *gates), gates, part, prefix)
        if code.names_all:  # as ``CausalSelfAttention.forward`` names them
            others = [x for x in (*heads.tensors, *named) if x.storage != whole.storage]
            builder.tape.touch(whole, *others, out)
        return result


def _result(
    builder: Builder, heads: Heads, named: Sequence[Value], gates: Sequence[Value], part: Attention, prefix: str
) -> tuple[Value, Value]:
    """Return what attention yields, and its projection, formed where its own function still has its names or behind it."""
    code, tape = builder.settings.code, builder.tape
    apart = code.projects_behind and not code.returns_projected
    with tape.alive(*heads.tensors, *named):
        out = attended(builder, heads, part)
        with tape.alive(out):
            out = builder.copied(out, moves=_keeps_heads_first(builder, part))
        for gate in gates:
            out = _gated(builder, out, gate)
        builder.named += [out] if code.adds_inside or apart else []
        if not apart:
            result = _projected(builder, out, prefix)
    if apart:
        result = _projected(builder, out, prefix)
    if code.returns_projected:
        tape.touch(*builder.named)
        builder.named[:] = [result]
    return out, result


def _formed(builder: Builder, x: Value, part: Attention, prefix: str) -> tuple[Sequence[Value], tuple[Value, ...]]:
    """Return query, key and value as a family's code forms them, some of them normalised and rotated already, and gates."""
    code = builder.settings.code
    if code.query_first or code.turns_each:
        return (_each_turned if code.turns_each else _query_first)(builder, x, part, prefix), ()
    formed, gates = _projections(builder, x, part, prefix)
    projected = clipped(builder, *formed) if part.clip else formed
    if views_normed(part) or _looks_at_once(builder, part):
        return projected, gates
    return in_heads(builder, projected, part), gates


def _projected(builder: Builder, out: Value, prefix: str) -> Value:
    """Return what attention has yielded, projected, and dropped where its own code does that."""
    with builder.tape.alive(out, *builder.named):
        result = _output(builder, out, f"{prefix}.{builder.settings.names.output}")
    return builder.dropped(result) if builder.settings.code.drops_attention == "inside" else result


def _output(builder: Builder, x: Value, name: str) -> Value:
    """Return the projection of attention's result."""
    hidden = builder.settings.hidden_size
    if fuses(builder, "o", (name,)):
        return fused_linears(builder, x, ((name, hidden),))[0]
    return row_product(builder, x, name, hidden)


def _repeated(builder: Builder, heads: Heads) -> Heads:
    """Return heads as attention is given them: with keys and values repeated where a family's code does so before."""
    code = builder.settings.code
    if not code.repeats_keys or code.contiguous_heads or (builder.settings.flash_attn and not code.repeats_for_flash):
        return heads
    with builder.tape.alive(heads.query):
        return ungrouped(builder, heads, expands=code.asks_for_groups or code.expands_alone)


def _put_together(
    builder: Builder, query: Value, key: Value, value: Value, part: Attention
) -> tuple[Value, Value, Value]:
    """Return heads of groups as those of one dimension: with keys and values for each, copied where groups lie apart.

    Source:
        ``CausalSelfAttention.forward`` in litgpt/model.py (0.4.12), lines 244 to 262.
    """
    groups, times = part.num_key_value_heads, part.num_heads // part.num_key_value_heads
    if times == 1:
        return query, key, value
    with builder.tape.alive(query, key, value):
        query = builder.copied(query, moves=groups > 1)
        with builder.tape.alive(query):
            key = repeated(builder, key, times, alone=groups == 1)
            with builder.tape.alive(key):
                return query, key, repeated(builder, value, times, alone=groups == 1)


def _names(builder: Builder, prefix: str) -> list[str]:
    names = builder.settings.names
    return [f"{prefix}.{name}" for name in (names.query, names.key, names.value)]


def _norms_at_once(builder: Builder, part: Attention, prefix: str) -> bool:
    """Whether query and key are normalised as they are projected, each before the next."""
    return (
        part.query_key_norm is not None
        and builder.settings.code.norms_at_once
        and not part.norms_rotated
        and not fuses(builder, "qkv", _names(builder, prefix))
    )


def _gated(builder: Builder, x: Value, gate: Value) -> Value:
    """Return ``x * sigmoid(gate)``."""
    with builder.tape.alive(x):
        open_ = builder.fresh(gate)
        builder.tape.apply("sigmoid", [(gate, NEW)], open_, [open_])
        return builder.product(x, open_)


def _query_and_gate(builder: Builder, x: Value, part: Attention, prefix: str) -> tuple[Value, tuple[Value, ...]]:
    """Return the query, and what its projection yields besides: a gate, which is copied out of it."""
    tape, name = builder.tape, f"{prefix}.{builder.settings.names.query}"
    if not part.output_gate:
        query = linear(builder, x, name, part.query_size)
        return builder.pointwise("scale query", query) if builder.settings.code.scales_projected else query, ()
    both = linear(builder, x, name, 2 * part.query_size)
    query, gate = tape.view(both, part.query_size), tape.view(both, part.query_size)
    tape.apply("chunk", [(both, NEW)], (query, gate), traits=SAVES_NOTHING)
    with tape.alive(query):
        return query, (builder.copied(gate, moves=part.num_heads > 1),)


def _projections(
    builder: Builder, x: Value, part: Attention, prefix: str
) -> tuple[tuple[Value, Value, Value], tuple[Value, ...]]:
    """Return query, key and value, results of their own or views of one, and the gate of the result, where there is one."""
    names, tape = builder.settings.names, builder.tape
    sizes = (part.query_size, part.key_value_size, part.key_value_size)
    if part.fused_qkv:
        return _parts_of_one(builder, x, part, f"{prefix}.{names.qkv}", sizes), ()
    at_once = _norms_at_once(builder, part, prefix)
    projections = _names(builder, prefix)
    if fuses(builder, "qkv", projections):
        query, key, value = fused_linears(builder, x, list(zip(projections, sizes, strict=True)))
        return (query, key, value), ()
    moved = copied_gradients(builder, part) if _looks_at_once(builder, part) else (False, False, False)
    query, gates = _query_and_gate(builder, x, part, prefix)
    with tape.alive(*gates):
        query = looked_at(builder, query) if moved[0] else query
        query = _norm(builder, query, part, prefix, names.query_norm) if at_once else query
    with tape.alive(query, *gates):
        key = linear(builder, x, f"{prefix}.{names.key}", sizes[1])
        key = looked_at(builder, key) if moved[1] or stays_transposed(builder, part) else key
        key = _norm(builder, key, part, prefix, names.key_norm) if at_once else key
        key = builder.pointwise("scale key", key) if builder.settings.code.scales_parts else key
        with tape.alive(key):
            value = linear(builder, x, f"{prefix}.{names.value}", sizes[2])
            return (query, key, looked_at(builder, value) if moved[2] else value), gates


def _parts_of_one(
    builder: Builder, x: Value, part: Attention, name: str, sizes: tuple[int, int, int]
) -> tuple[Value, Value, Value]:
    """Return query, key and value as views or copies of one projection's result."""
    tape, code = builder.tape, builder.settings.code
    apart = code.adapts_parts
    fused = linear_of_parts(builder, x, name, sizes) if apart else linear(builder, x, name, sum(sizes))
    query, key, value = (tape.view(fused, size) for size in sizes)
    builder.named += [fused] if code.adds_inside or code.names_fused else []
    if code.own_scores and part.num_key_value_heads < part.num_heads:
        return chosen_heads(builder, fused, part)
    fused = looked_at(builder, fused) if code.by_groups else fused
    tape.apply("split", [(fused, NEW)], (query, key, value), traits=SAVES_NOTHING)
    if builder.settings.copies_fused:
        with tape.alive(fused, query, key, value):
            query = builder.copied(query)
            with tape.alive(query):
                key = builder.copied(key)
                with tape.alive(key):
                    return query, key, builder.copied(value)
    if apart and not code.by_groups and part.rotary_dim and part.query_key_norm is None:
        # a slice's gradient has heads before tokens
        query = looked_at(builder, query) if part.num_heads > 1 else query
        key = looked_at(builder, key) if part.num_key_value_heads > 1 else key
    return query, key, value


def _looks_at_once(builder: Builder, part: Attention) -> bool:
    """Tell whether each projection's heads are looked at apart before the next one is formed, as transformers' models do."""
    return builder.settings.code.promotes and not (part.fused_qkv or part.clip or views_normed(part))


def _query_first(builder: Builder, x: Value, part: Attention, prefix: str) -> tuple[Value, Value, Value]:
    """Return query, key and value; the query is rotated before the others are formed."""
    names, tape = builder.settings.names, builder.tape
    query = linear(builder, x, f"{prefix}.{names.query}", part.query_size)
    query = rotary(builder, query, part.head_dim, part.rotary_dim)
    with tape.alive(query):
        key = linear(builder, x, f"{prefix}.{names.key}", part.key_value_size)
        with tape.alive(key):
            value = linear(builder, x, f"{prefix}.{names.value}", part.key_value_size)
            if 1 < part.num_key_value_heads < part.num_heads and not builder.settings.regime.one_token:
                value = looked_at(builder, value)  # its gradient, a sum over groups, has heads before tokens
        with tape.alive(value):
            return query, rotary(builder, key, part.head_dim, part.rotary_dim), value


def _each_turned(builder: Builder, x: Value, part: Attention, prefix: str) -> tuple[Value, Value, Value]:
    """Return query, key and value, each normalised before the next is, of which the first two are rotated by functions of their own."""
    # Source: ``Gemma4TextAttention.forward`` in transformers/models/gemma4/modeling_gemma4.py (5.23.0).
    names, tape = builder.settings.names, builder.tape
    query = linear(builder, x, f"{prefix}.{names.query}", part.query_size)
    query = rotary(builder, _norm(builder, query, part, prefix, names.query_norm), part.head_dim, part.rotary_dim)
    if part.reuses:
        key, value = builder.given_keys
        return query, key, value
    with tape.alive(query):
        key = linear(builder, x, f"{prefix}.{names.key}", part.key_value_size)
        with tape.alive(key):
            value = key
            if not part.keys_as_values:
                value = linear(builder, x, f"{prefix}.{names.value}", part.key_value_size)
        with tape.alive(value):
            key = rotary(builder, _norm(builder, key, part, prefix, names.key_norm), part.head_dim, part.rotary_dim)
        with tape.alive(key):
            return query, key, _norm(builder, value, part, prefix, "v_norm")


def _normed(
    builder: Builder, query: Value, key: Value, value: Value, part: Attention, prefix: str
) -> tuple[Value, Value]:
    """Return query and key normalised; ``value`` is there meanwhile, and the first query where nothing takes its name."""
    names, tape = builder.settings.names, builder.tape
    renames = builder.settings.code.rotates_together
    with tape.alive(query, key, value):
        first = _norm(builder, query, part, prefix, names.query_norm)
    with tape.alive(first, key, value, *(() if renames else (query,))):
        return first, _norm(builder, key, part, prefix, names.key_norm)


def _norm(builder: Builder, x: Value, part: Attention, prefix: str, name: str) -> Value:
    """Return a query or a key normalised, each head alone or all together."""
    assert part.query_key_norm is not None
    full = part.query_key_norm_scope == "full"
    whole, is_key = not builder.settings.regime.one_token, name == builder.settings.names.key_norm
    several = whole and x.width > part.head_dim
    transposed, stacked = whole and is_key and is_transposed(builder, part), heads_first(builder, part)[is_key]
    late = part.norms_rotated and not _joins_rotated(builder, part)
    # The efficient kernel's gradients have tokens before heads, as its inputs have (attention_backward.cu).
    unordered = transposed or (builder.profile.attention == "efficient" and not stacked)
    copied = (1, 1 + unordered) if late and several else (0, 0)
    if stacked and not part.norms_rotated:
        copied = (0, int(transposed or (several and not full)))
    size = x.width if full else part.head_dim
    normal = normalised(builder, x, part.query_key_norm, f"{prefix}.{name}", size, copied=copied)
    normal.apart = not (late and normed_by_kernel(builder, part))
    return normal


def _joins_rotated(builder: Builder, part: Attention) -> bool:
    """Whether what is rotated is joined with what is not, or with its other half, which puts heads before tokens."""
    code = builder.settings.code
    cuts = code.cuts(part.rotary_dim, part.head_dim) and code.interleaved != "in-turn"
    return (cuts or code.joins_rotated) and builder.profile.rotary == "composite"


def _keeps_heads_first(builder: Builder, part: Attention) -> bool:
    """Whether attention's result has heads before tokens, so that joining the heads copies it.

    Products of matrices put it out so. Flash and cuDNN allocate it like the query, which is so where it was
    concatenated, copied, or put out by a kernel that normalises it after its rotation; what is cut out of padded heads lies
    apart in any case. With one head, and but for padding with one token, the two are the same.
    """
    if builder.settings.code.cuts_sequences:
        return True
    if part.num_heads == 1:
        return False
    eager = goes_by_steps(builder, part)
    if not eager and builder.profile.attention == "flash" and part.head_dim % FLASH_WIDTH_MULTIPLE:
        return True
    partial = _joins_rotated(builder, part)
    put_out = part.norms_rotated and builder.profile.norm != "composite"
    ordered = builder.settings.code.contiguous_heads and not builder.settings.flash_attn
    first = (
        eager
        or builder.profile.attention == "math"
        or ((partial or put_out or ordered) and builder.profile.attention in ("flash", "cudnn"))
    )
    return first and not builder.settings.regime.one_token
