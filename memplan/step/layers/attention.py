"""Multi-head attention with grouped queries on a tape, and rotary positions."""

from __future__ import annotations

from memplan.model.spec import Attention
from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.blocks.fused_adapters import fused_linears, fuses
from memplan.step.blocks.norms import normalised
from memplan.step.blocks.projections import linear
from memplan.step.layers.attended import attended, goes_by_steps
from memplan.step.layers.attention_kernels import FLASH_WIDTH_MULTIPLE, Heads, ungrouped
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value


def attention(builder: Builder, x: Value, part: Attention, prefix: str) -> Value:
    """Return what multi-head attention adds to the residual stream."""
    with builder.tape.alive(x):
        if builder.settings.code.query_first:
            query, key, value = _query_first(builder, x, part, prefix)
        else:
            query, key, value = _projections(builder, x, part, prefix)
        query.apart = key.apart = value.apart = True
        if part.query_key_norm is not None:
            with builder.tape.alive(query, key, value):
                query, key = _normed(builder, query, key, part, prefix)
        if not builder.settings.code.query_first:
            query, key = _turned(builder, query, key, value, part)
        heads = Heads(query, key, value, part.num_heads, part.num_key_value_heads)
        if builder.settings.code.repeats_keys:
            with builder.tape.alive(query):
                heads = ungrouped(builder, heads)
        with builder.tape.alive(*heads.tensors):
            out = attended(builder, heads, part)
            with builder.tape.alive(out):
                out = builder.copied(out, moves=_keeps_heads_first(builder, part))
            with builder.tape.alive(out):
                name, hidden = f"{prefix}.{builder.settings.names.output}", builder.settings.hidden_size
                if fuses(builder, (name,)):
                    return fused_linears(builder, out, ((name, hidden),))[0]
                return linear(builder, out, name, hidden)


def _projections(builder: Builder, x: Value, part: Attention, prefix: str) -> tuple[Value, Value, Value]:
    """Return query, key and value: results of their own, or views of one."""
    names, tape = builder.settings.names, builder.tape
    sizes = (part.query_size, part.key_value_size, part.key_value_size)
    if part.fused_qkv:
        fused = linear(builder, x, f"{prefix}.{names.qkv}", sum(sizes))
        query, key, value = (tape.view(fused, size) for size in sizes)
        tape.apply("split", [(fused, NEW)], (query, key, value), traits=SAVES_NOTHING)
        if builder.settings.copies_fused:
            with tape.alive(fused, query, key, value):
                query = builder.copied(query)
                with tape.alive(query):
                    key = builder.copied(key)
                    with tape.alive(key):
                        return query, key, builder.copied(value)
        return query, key, value
    projections = [f"{prefix}.{name}" for name in (names.query, names.key, names.value)]
    if fuses(builder, projections):
        query, key, value = fused_linears(builder, x, list(zip(projections, sizes, strict=True)))
        return query, key, value
    query = linear(builder, x, f"{prefix}.{names.query}", sizes[0])
    with tape.alive(query):
        key = linear(builder, x, f"{prefix}.{names.key}", sizes[1])
        with tape.alive(key):
            return query, key, linear(builder, x, f"{prefix}.{names.value}", sizes[2])


def _query_first(builder: Builder, x: Value, part: Attention, prefix: str) -> tuple[Value, Value, Value]:
    """Return query, key and value; the query is rotated before the others are formed."""
    names, tape = builder.settings.names, builder.tape
    query = linear(builder, x, f"{prefix}.{names.query}", part.query_size)
    query = rotary(builder, query, part.head_dim, part.rotary_dim)
    with tape.alive(query):
        key = linear(builder, x, f"{prefix}.{names.key}", part.key_value_size)
        with tape.alive(key):
            value = linear(builder, x, f"{prefix}.{names.value}", part.key_value_size)
        with tape.alive(value):
            return query, rotary(builder, key, part.head_dim, part.rotary_dim), value


def _normed(builder: Builder, query: Value, key: Value, part: Attention, prefix: str) -> tuple[Value, Value]:
    """Return query and key normalised, each head alone or all together."""
    names, norm = builder.settings.names, part.query_key_norm
    assert norm is not None
    per_head = part.query_key_norm_scope == "head"
    sizes = (part.head_dim, part.head_dim) if per_head else (part.query_size, part.key_value_size)
    first = normalised(builder, query, norm, f"{prefix}.{names.query_norm}", sizes[0])
    with builder.tape.alive(first):
        return first, normalised(builder, key, norm, f"{prefix}.{names.key_norm}", sizes[1])


def _turned(builder: Builder, query: Value, key: Value, value: Value, part: Attention) -> tuple[Value, Value]:
    """Return query and key rotated; ``value`` is there meanwhile."""
    tape = builder.tape
    if builder.profile.rotary == "complex" and part.rotary_dim:
        with tape.alive(query, key, value):
            return _turned_complex(builder, query, key, part)
    with tape.alive(query, key, value):
        query = rotary(builder, query, part.head_dim, part.rotary_dim)
    with tape.alive(query, key, value):
        return query, rotary(builder, key, part.head_dim, part.rotary_dim)


def _turned_complex(builder: Builder, query: Value, key: Value, part: Attention) -> tuple[Value, Value]:
    """Return query and key rotated as complex numbers in fp32, in one function that names all it makes.

    Backward multiplies by the conjugate of the table, which it forms first. Rows of it may be gathered for each token.

    Source:
        torchtitan/models/common/rope.py, ``ComplexRoPE.apply_rotary_emb`` (0.3.0); that is ``apply_rotary_emb`` in
        torchtitan/models/llama3/model/model.py (0.2.2).
    """
    tape, widths = builder.tape, (query.element_bytes, key.element_bytes)
    rows = [tape.make("gather", tape.value(TOKENS, part.head_dim, 4))] if builder.settings.gathered_rows else []
    conjugate = [(TOKENS if rows else Quantity.POSITIONS, 4 * part.head_dim)]

    def multiplied(x: Value) -> Value:
        traits = Traits(packs=True, workspace=conjugate)
        return tape.apply("mul complex", [(x, NEW)], builder.fresh(x), rows, traits=traits)

    wide_query = builder.cast(query, 4)
    with tape.alive(wide_query, *rows):
        wide_key = builder.cast(key, 4)
        with tape.alive(wide_key):
            query = multiplied(wide_query)
            with tape.alive(query):
                key = multiplied(wide_key)
                with tape.alive(key):
                    narrow = builder.cast(query, widths[0])
                    with tape.alive(narrow):
                        return narrow, builder.cast(key, widths[1])


def _keeps_heads_first(builder: Builder, part: Attention) -> bool:
    """Whether attention's result has heads before tokens, so that joining the heads copies it.

    Products of matrices put it out so. Flash and cuDNN allocate it like the query, which is so where it was
    concatenated; what is cut out of padded heads lies apart in any case. With one head, and but for padding
    with one token, the two are the same.
    """
    if part.num_heads == 1:
        return False
    eager = goes_by_steps(builder, part)
    if not eager and builder.profile.attention == "flash" and part.head_dim % FLASH_WIDTH_MULTIPLE:
        return True
    joined = 0 < part.rotary_dim < part.head_dim or builder.settings.code.joins_rotated
    partial = joined and builder.profile.rotary == "composite"
    first = (
        eager or builder.profile.attention == "math" or (partial and builder.profile.attention in ("flash", "cudnn"))
    )
    return first and not builder.settings.regime.one_token


def rotary(builder: Builder, x: Value, head_dim: int, rotary_dim: int) -> Value:
    """Return ``x`` with the first ``rotary_dim`` of every head's dimensions rotated."""
    if not rotary_dim:
        return x
    with builder.tape.alive(x):
        if builder.profile.rotary == "fused":
            return builder.tape.apply("rotary", [(x, NEW)], builder.fresh(x), traits=Traits(packs=True, custom=True))
        if builder.profile.rotary == "pairs":
            return _turned_pairs(builder, x)
        if rotary_dim == head_dim and not builder.settings.code.joins_rotated:
            return _rotated(builder, x)
        part = x.width // head_dim * rotary_dim
        turned = builder.sliced(x, part)
        passed = builder.sliced(x, x.width - part)
        ways = [(_rotated(builder, turned), SAME), (passed, SAME)]
        joined = builder.fresh(x)
        joined.apart = False
        return builder.tape.apply("cat", ways, joined, traits=SAVES_NOTHING)


def _turned_pairs(builder: Builder, x: Value) -> Value:
    """Return ``x`` with neighbours turned in fp32: each number of a pair is a sum of two products, which are stacked.

    Source:
        ``forward`` of torchtune/models/llama3_1/_position_embeddings.py and of torchtune/modules/position_embeddings.py (0.6.1).
    """
    tape = builder.tape
    wide = builder.cast(x, 4)
    half = wide.width // 2

    def product(table: str) -> Value:
        return builder.pointwise(f"mul {table}", builder.sliced(wide, half), packs=True)

    with tape.alive(wide):
        by_cos, by_sin = product("cos"), product("sin")
        first = tape.apply("sub", [(by_cos, SAME), (by_sin, NEW)], builder.fresh(by_cos), traits=SAVES_NOTHING)
        by_cos, by_sin = product("cos"), product("sin")
        second = tape.apply("add", [(by_cos, SAME), (by_sin, SAME)], builder.fresh(by_cos), traits=SAVES_NOTHING)
        ways = [(first, SAME), (second, SAME)]
        out = tape.apply("stack", ways, builder.fresh(wide), traits=SAVES_NOTHING)
        with tape.alive(out):
            return builder.cast(out, x.element_bytes)


def _rotated(builder: Builder, x: Value) -> Value:
    """Return ``x * cos + cat(-second half, first half) * sin``."""
    tape, half = builder.tape, x.width // 2
    negative = builder.pointwise("neg", builder.sliced(x, half))
    first = builder.sliced(x, half)
    turned = tape.apply("cat", [(negative, SAME), (first, SAME)], builder.fresh(x), traits=SAVES_NOTHING)
    with tape.alive(x, turned):
        by_cos = builder.pointwise("mul cos", x, packs=True)
        by_sin = builder.pointwise("mul sin", turned, packs=True)
        return tape.apply("add", [(by_cos, SAME), (by_sin, SAME)], builder.fresh(x), traits=SAVES_NOTHING)
