"""Interleaved rotary positions, which turn neighbouring dimensions of a head and not its halves, as some families of transformers have them."""

from memplan.model.spec import Attention
from memplan.step.blocks.builder import Builder
from memplan.step.layers.rotation import Rotated, by_table, cut_heads, joined_heads, turned_whole
from memplan.step.tapes.taped_operations import SAME, SAVES_NOTHING, Value

Turned = tuple[Value, Value]
"""Query and key."""


def interleaved_rotation(builder: Builder, heads: Rotated, part: Attention) -> tuple[Value, Value, tuple[Value, ...]]:
    """Return query and key rotated by a function that forms neighbours as tensors, and nothing besides.

    Source:
        ``apply_rotary_pos_emb`` in transformers 5.23.0, models/cohere (``wide``), glm (``spread``), ernie4_5
        (``spread-wide``) and glm4v (``by-model``).
    """
    query, key, _ = heads
    with builder.tape.alive(*heads):
        if builder.settings.code.interleaved == "looked-up":
            return _looked_up(builder, query, key, part)
        if builder.settings.code.interleaved == "in-turn":
            return _in_turn(builder, query, key, part, builder.settings.residual_bytes)
        if builder.settings.code.interleaved == "wide":
            return (*_turned_wide(builder, query, key), ())
        if builder.settings.code.interleaved == "by-model":
            return (*_turned_in_part(builder, query, key, part, []), ())
        wide = builder.settings.code.interleaved == "spread-wide"
        widest = wide and not builder.settings.copies_tables
        spread = [_spread(builder, part, 4 if widest else builder.settings.residual_bytes) for _ in ("cos", "sin")]
        with builder.tape.alive(*spread):
            turn = _turned_by_wide if wide else _turned_in_part
            return (*turn(builder, query, key, part, spread), ())


def _spread(builder: Builder, part: Attention, element_bytes: int) -> Value:
    """Return half of a table with each entry twice, which every layer makes anew."""
    table = builder.tape.value(builder.settings.table_rows, part.rotary_dim, element_bytes)
    return builder.tape.make("spread table", table)


def _turned_wide(builder: Builder, query: Value, key: Value) -> Turned:
    """Return both turned in fp32, which they are cast to before either is."""
    tape = builder.tape
    wide = builder.cast(query, 4)
    with tape.alive(wide):
        other = builder.cast(key, 4)
        with tape.alive(other):
            first = turned_whole(builder, wide)
            with tape.alive(first):
                second = turned_whole(builder, other)
                return _narrowed(builder, (first, second), (query, key))


def _narrowed(builder: Builder, turned: Turned, given: Turned) -> Turned:
    with builder.tape.alive(*turned):
        first = builder.cast(turned[0], given[0].element_bytes, foreign=given[0].foreign)
        with builder.tape.alive(first):
            return first, builder.cast(turned[1], given[1].element_bytes, foreign=given[1].foreign)


def _turned_in_part(builder: Builder, query: Value, key: Value, part: Attention, spread: list[Value]) -> Turned:
    """Return both turned, each joined with its dimensions that are not, even where there are none of these."""
    tape = builder.tape
    share = part.rotary_dim / part.head_dim
    query_parts, key_parts = cut_heads(builder, query, share), cut_heads(builder, key, share)
    first = turned_whole(builder, query_parts[0], spread)
    with tape.alive(first):
        second = turned_whole(builder, key_parts[0], spread)
    with tape.alive(second):
        first = joined_heads(builder, query, first, query_parts[1])
        with tape.alive(first):
            return first, joined_heads(builder, key, second, key_parts[1])


def _looked_up(builder: Builder, query: Value, key: Value, part: Attention) -> tuple[Value, Value, tuple[Value, ...]]:
    """Return both turned by rows of the layer's table, and all that attention has names for until it returns.

    The table is copied before, and a row's number for each entry.
    """
    # Source: ``GPTJAttention.forward`` in transformers/models/gptj/modeling_gptj.py (5.23.0).
    tape, rotated = builder.tape, part.rotary_dim
    table = tape.make("repeat table", builder.constant(part.position_rows * rotated, 4))
    positions = builder.settings.table_rows
    numbers = tape.make("repeat positions", tape.value(positions, rotated, 8), table)
    rows = tape.make("gather", tape.value(positions, rotated, 4), table, numbers)
    with tape.alive(table, numbers):
        rows = (
            rows
            if key.element_bytes == 4 or builder.settings.code.wide_rotary
            else _cast_rows(builder, rows, key.element_bytes)
        )

    with tape.alive(table, numbers, rows):
        whole, joined, named = _in_turn(builder, query, key, part, rows.element_bytes)
        return whole, joined, (table, numbers, rows, *named)


def _in_turn(
    builder: Builder, query: Value, key: Value, part: Attention, element_bytes: int
) -> tuple[Value, Value, tuple[Value, ...]]:
    """Return both turned, the key first, and all that attention has names for until it returns: each looks at every entry twice, in copies of its own."""
    # Source: ``GPTJAttention.forward`` in transformers/models/gptj/modeling_gptj.py (5.24.0).
    tape = builder.tape

    def turned(x: Value) -> Value:
        spread = [_spread(builder, part, element_bytes) for _ in ("sin", "cos")]
        with tape.alive(*spread):
            return turned_whole(builder, builder.sliced(x, x.width // part.head_dim * part.rotary_dim), spread)

    other = turned(key)
    with tape.alive(other):
        first = turned(query)
        with tape.alive(first):
            joined = joined_heads(builder, key, other)
            with tape.alive(joined):
                whole = joined_heads(builder, query, first)
                whole.apart = joined.apart = True  # heads are joined between tokens
                return whole, joined, (query, key, first, other)


def _cast_rows(builder: Builder, rows: Value, element_bytes: int) -> Value:
    narrow = builder.tape.value(rows.quantity, rows.width, element_bytes)
    return builder.tape.make("cast rows", narrow, rows)


def _turned_by_wide(builder: Builder, query: Value, key: Value, _: Attention, spread: list[Value]) -> Turned:
    """Return both turned by tables in fp32, to which each factor is cast by itself."""
    first = _by_wide_tables(builder, query, spread)
    with builder.tape.alive(first):
        return _narrowed(builder, (first, _by_wide_tables(builder, key, spread)), (query, key))


def _by_wide_tables(builder: Builder, x: Value, spread: list[Value]) -> Value:
    tape = builder.tape
    by_cos = by_table(builder, "mul cos", builder.cast(x, 4), 4, spread[:1])
    with tape.alive(by_cos):
        first, second = builder.sliced(x, x.width // 2), builder.sliced(x, x.width // 2)
        negative = builder.pointwise("neg", second)
        ways = [(negative, SAME), (first, SAME)]
        turned = tape.apply("cat", ways, builder.fresh(x), traits=SAVES_NOTHING)
        by_sin = by_table(builder, "mul sin", builder.cast(turned, 4), 4, spread[1:])
        return tape.apply("add", [(by_cos, SAME), (by_sin, SAME)], builder.fresh(by_cos), traits=SAVES_NOTHING)
