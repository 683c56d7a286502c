"""Rotary positions on a tape: query and key rotated, whole or in part, as numbers or as complex ones."""

from collections.abc import Sequence

from memplan.model.spec import Attention
from memplan.step.blocks.builder import TOKENS, Builder, promoted
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value

Rotated = tuple[Value, Value, Value]
"""Query, key and value."""


def turned(builder: Builder, heads: Rotated, part: Attention) -> tuple[Value, Value, tuple[Value, ...]]:
    """Return query and key rotated, and what attention has names for besides until it returns; the value is there meanwhile."""
    query, key, value = heads
    tape, code = builder.tape, builder.settings.code
    with tape.alive(query, key, value):
        if code.turns_halves and part.rotary_dim:
            return (*turned_halves(builder, query, key, part.head_dim), ())
        if builder.profile.rotary == "together" and part.rotary_dim:
            return (*_by_one_kernel(builder, query, key, part), ())
        if (builder.profile.rotary == "complex" or code.complex_rotary) and part.rotary_dim:
            return (*turned_complex(builder, query, key, part.head_dim), ())
        if builder.settings.own_tables:
            return _by_own_tables(builder, heads, part)
        if code.rotates_together:
            return _turned_together(builder, query, key, part)
        query = rotary(builder, query, part.head_dim, part.rotary_dim)
    with tape.alive(query, key, value):
        return query, rotary(builder, key, part.head_dim, part.rotary_dim), ()


def receive_tables(builder: Builder, part: Attention) -> None:
    """Put copies of cosines and sines on a layer's tape, which its caller makes and has names for until it returns."""
    # Source: ``FSDPState._cast_forward_inputs`` in torch/distributed/fsdp/_fully_shard/_fsdp_state.py (v2.13.0).
    for _ in ("cos", "sin") if part.rotary_dim else ():
        with builder.tape.alive(*builder.tables):
            table = builder.tape.value(Quantity.POSITIONS, part.rotary_dim, builder.compute)
            builder.tables += (builder.tape.make("cast table", table),)
    builder.named_values += builder.tables
    if not builder.settings.casts_tables_again:
        builder.tape.called_with = tuple([table.storage for table in builder.tables])


def _by_own_tables(builder: Builder, heads: Rotated, part: Attention) -> tuple[Value, Value, tuple[Value, ...]]:
    """Return query and key rotated by cosines and sines that the layer has formed or gathered, and has names for."""
    query, key, value = heads
    tables: list[Value] = []
    for name in ("cos", "sin"):
        with builder.tape.alive(*tables):
            row = builder.tape.value(Quantity.POSITIONS, part.head_dim, value.element_bytes)
            tables.append(builder.tape.make(name, row))
    with builder.tape.alive(key, value, *tables):
        query = turned_whole(builder, query, tables)
        with builder.tape.alive(query):
            return query, turned_whole(builder, key, tables), tuple(tables)


def _turned_together(
    builder: Builder, query: Value, key: Value, part: Attention
) -> tuple[Value, Value, tuple[Value, ...]]:
    """Return query and key rotated by one function, whose caller names what it gave until that returns."""
    tape, code = builder.tape, builder.settings.code
    if code.widens_rotated:
        return _turned_wide(builder, query, key)
    each = code.joins_rotated and code.names_passed  # both are rotated before either is joined
    if not each and (not code.cuts(part.rotary_dim, part.head_dim) or code.joins_rotated):
        first = rotary(builder, query, part.head_dim, part.rotary_dim)
        with tape.alive(first):
            second = rotary(builder, key, part.head_dim, part.rotary_dim)
        if not code.wide_rotary:  # what a wider table has widened stays so
            return first, second, ()
        with tape.alive(first, second):
            first = builder.cast(first, query.element_bytes, foreign=query.foreign)
            with tape.alive(first):
                return first, builder.cast(second, key.element_bytes, foreign=key.foreign), ()
    share = part.rotary_dim / part.head_dim
    query_parts = cut_heads(builder, query, share, late=each)
    key_parts = None if each else cut_heads(builder, key, share)
    rotated = turned_whole(builder, query_parts[0])
    with tape.alive(rotated):
        key_parts = key_parts or cut_heads(builder, key, share, late=True)
        other = turned_whole(builder, key_parts[0])
    with tape.alive(other):
        first = joined_heads(builder, query, rotated, query_parts[1])
        with tape.alive(first, *((rotated,) if code.names_passed else ())):
            second = joined_heads(builder, key, other, key_parts[1])
    named = (rotated, other) if each else (query, key, rotated, other)
    return first, second, named if code.names_passed else ()


def _turned_wide(builder: Builder, query: Value, key: Value) -> tuple[Value, Value, tuple[Value, ...]]:
    """Return query and key rotated in fp32, of each of which there is a copy for either product, and cast back.

    Source:
        ``apply_rotary_pos_emb`` in transformers/models/modernbert/modeling_modernbert.py (5.24.0).
    """
    tape = builder.tape

    def turned(x: Value) -> Value:
        by_cos = by_table(builder, "mul cos", builder.cast(x, 4), 4, ())
        with tape.alive(by_cos):
            swapped = _swapped(builder, builder.cast(x, 4), first_half_first=True)
            return _sum_of_products(builder, x, swapped, 4, (), by_cos)

    with tape.alive(query, key):
        first = turned(query)
        with tape.alive(first):
            second = turned(key)
        with tape.alive(first, second):
            narrow = builder.cast(first, query.element_bytes, foreign=query.foreign)
            with tape.alive(narrow):
                return narrow, builder.cast(second, key.element_bytes, foreign=key.foreign), ()


def _by_one_kernel(builder: Builder, query: Value, key: Value, part: Attention) -> tuple[Value, Value]:
    """Return query and key turned by one kernel, where they are if there is one head, whose backward forms both gradients."""
    # Source: ``Fast_RoPE_Embedding_QK`` in unsloth/kernels/rope_embedding.py (2026.10.9).
    pairs = ((query, part.num_heads), (key, part.num_key_value_heads))
    turned = tuple([builder.fresh(x) if heads > 1 else builder.tape.view(x) for x, heads in pairs])
    traits = Traits(packs=False, custom=True)
    builder.tape.apply("rotary", [(query, NEW), (key, NEW)], turned, traits=traits)
    return turned[0], turned[1]


def turned_complex(builder: Builder, query: Value, key: Value, head_dim: int) -> tuple[Value, Value]:
    """Return query and key rotated as complex numbers in fp32, in one function that names all it makes.

    Backward multiplies by the conjugate of the table, which it forms first. Rows of it may be gathered for each token.

    Source:
        torchtitan/models/common/rope.py, ``ComplexRoPE.apply_rotary_emb`` (0.3.0); that is ``apply_rotary_emb`` in
        torchtitan/models/llama3/model/model.py (0.2.2).
    """
    tape, widths = builder.tape, (query.element_bytes, key.element_bytes)
    rows = [tape.make("gather", tape.value(TOKENS, head_dim, 4))] if builder.settings.gathered_rows else []
    conjugate = [(TOKENS if rows else Quantity.POSITIONS, 4 * head_dim)]

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


def turned_halves(builder: Builder, query: Value, key: Value, head_dim: int) -> tuple[Value, Value]:
    """Return query and key whose halves are turned in fp32 by gathered rows of one table, in one function that names all it makes.

    Source:
        torchtitan/models/common/rope.py, ``CosSinRoPE.apply_rotary_emb`` (0.3.0).
    """
    tape = builder.tape
    rows = tape.make("gather", tape.value(TOKENS, 2 * head_dim, 4))
    with tape.alive(rows):
        wide_query = builder.cast(query, 4)
        with tape.alive(wide_query):
            wide_key = builder.cast(key, 4)
            with tape.alive(wide_key):
                first = turned_whole(builder, wide_query, (rows, rows), cosines_first=True)
                with tape.alive(first):
                    second = turned_whole(builder, wide_key, (rows, rows), cosines_first=True)
                    narrow = builder.cast(first, query.element_bytes)
                    with tape.alive(narrow):
                        last = builder.cast(second, key.element_bytes)
        tape.touch(wide_query, wide_key, first, second)
        return narrow, last


def rotary(builder: Builder, x: Value, head_dim: int, rotary_dim: int) -> Value:
    """Return ``x`` with the first ``rotary_dim`` of every head's dimensions rotated."""
    if not rotary_dim:
        return x
    with builder.tape.alive(x):
        if builder.settings.code.halves_by_tables:
            return _halves_turned(builder, x, head_dim)
        if builder.profile.rotary == "in-place":
            # Backward turns the gradient, or a copy of it where heads are before tokens in it.
            way = NEW if builder.profile.attention in ("math", "eager") else SAME
            traits = Traits(packs=True, custom=True)
            return builder.tape.apply("rotary", [(x, way)], builder.tape.view(x), traits=traits)
        if builder.profile.rotary == "fused":
            return builder.tape.apply("rotary", [(x, NEW)], builder.fresh(x), traits=Traits(packs=True, custom=True))
        if builder.profile.rotary == "pairs":
            return _turned_pairs(builder, x)
        if rotary_dim == head_dim and not builder.settings.code.joins_rotated:
            return turned_whole(builder, x)
        first, passed = cut_heads(builder, x, rotary_dim / head_dim)
        return joined_heads(builder, x, turned_whole(builder, first), passed)


def cut_heads(builder: Builder, x: Value, share: float, *, late: bool = False) -> tuple[Value, Value | None]:
    """Return the dimensions of ``x`` that are rotated, and those that are not, unless these are cut out late, where both are joined."""
    width = round(x.width * share)
    return builder.sliced(x, width), None if late else builder.sliced(x, x.width - width)


def joined_heads(builder: Builder, x: Value, rotated: Value, passed: Value | None = None) -> Value:
    """Return the rotated dimensions of ``x`` joined with those that are not, which are cut out now unless they have been."""
    passed = passed or builder.sliced(x, x.width - rotated.width)
    joined = builder.fresh(x, element_bytes=promoted(rotated, passed))
    joined.apart = False
    ways = [(rotated, SAME), (passed, SAME if passed.element_bytes == joined.element_bytes else NEW)]
    return builder.tape.apply("cat", ways, joined, traits=SAVES_NOTHING)


def _turned_pairs(builder: Builder, x: Value) -> Value:
    """Return ``x`` with neighbours turned in fp32: each number of a pair is a sum of two products, which are stacked."""
    # Source: ``forward`` of torchtune/models/llama3_1/_position_embeddings.py and of
    # torchtune/modules/position_embeddings.py (0.6.1).
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


def _halves_turned(builder: Builder, x: Value, head_dim: int) -> Value:
    """Return ``x`` with the halves of each head turned by rows of a table, which are cast and saved where that is not wide."""
    # Source: ``forward`` of torchtune/models/qwen2/_positional_embeddings.py and of phi3/_position_embeddings.py
    # (0.6.1).
    tape, tables = builder.tape, []
    if x.element_bytes != 4 and not builder.settings.code.wide_rotary:
        for name in ("cos", "sin"):
            table = tape.value(Quantity.POSITIONS, head_dim, x.element_bytes)
            tables.append(tape.make(f"cast {name}", table))
    swapped = _swapped(builder, x, first_half_first=True)
    with tape.alive(x, *tables, swapped):
        width = max(x.element_bytes, _table_bytes(builder))
        total = _sum_of_products(builder, x, swapped, width, tables)
        with tape.alive(total):
            return builder.cast(total, x.element_bytes)


def _swapped(builder: Builder, x: Value, *, first_half_first: bool) -> Value:
    """Return the second half of each head, negative, joined with the first; which of the halves is a statement's of its own, or taken late."""
    tape, half = builder.tape, x.width // 2
    parts = [builder.sliced(x, half)] if first_half_first else []
    negative = builder.pointwise("neg", builder.sliced(x, half))
    first = parts[0] if parts else builder.sliced(x, half)
    return tape.apply("cat", [(negative, SAME), (first, SAME)], builder.fresh(x), traits=SAVES_NOTHING)


def _sum_of_products(
    builder: Builder, x: Value, swapped: Value, width: int, tables: Sequence[Value], by_cos: Value | None = None
) -> Value:
    """Return ``x * cos + swapped * sin``; the first of these may be there already."""
    by_cos = by_cos or by_table(builder, "mul cos", x, width, tables[:1])
    by_sin = by_table(builder, "mul sin", swapped, width, tables[1:])
    ways = [(by_cos, SAME), (by_sin, SAME)]
    return builder.tape.apply("add", ways, builder.fresh(by_cos), traits=SAVES_NOTHING)


def turned_whole(
    builder: Builder, x: Value, tables: Sequence[Value] = (), *, cosines_first: bool | None = None
) -> Value:
    """Return ``x * cos + cat(-second half, first half) * sin``, in fp32 where the tables are; these may be saved."""
    tape, tables = builder.tape, tables or builder.tables
    formed = builder.settings.code.forms_tables if cosines_first is None else cosines_first
    width = max(x.element_bytes, tables[0].element_bytes if tables else _table_bytes(builder))
    with tape.alive(x):
        by_cos = [by_table(builder, "mul cos", x, width, tables[:1])] if formed else []
        with tape.alive(*by_cos):
            swapped = _swapped(builder, x, first_half_first=formed or builder.settings.code.names_all)
        with tape.alive(*(() if formed else (swapped,))):
            total = _sum_of_products(builder, x, swapped, width, tables, *by_cos)
            out = builder.cast(total, x.element_bytes) if builder.settings.regime.wide_tables else total
        tape.touch(*((total,) if builder.settings.code.names_all and out is not total else ()))
        return out


def _table_bytes(builder: Builder) -> int:
    """Return the bytes of a table's entry where it may be wider than what it multiplies: as wide as the residual stream, or fp32."""
    code = builder.settings.code
    return (
        4
        if code.wide_rotary or builder.settings.regime.wide_tables
        else builder.settings.residual_bytes
        if code.forms_tables
        else 0
    )


def by_table(builder: Builder, name: str, x: Value, width: int, tables: Sequence[Value]) -> Value:
    """Return ``x`` times a table; of a wider product the gradient is formed wide, and cast."""
    workspace = [(x.quantity, x.width * width)] if width != x.element_bytes else []
    out = builder.fresh(x, element_bytes=width)
    traits = Traits(packs=True, workspace=workspace, forms_last=True)
    return builder.tape.apply(name, [(x, NEW)], out, tables, traits=traits)
