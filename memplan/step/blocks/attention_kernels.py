"""Attention of query, key and value on a tape, by kernel or step by step."""

from __future__ import annotations

from memplan.model.spec import Attention
from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.tape import NEW, SAME, Value
from memplan.units import round_up

RANDOM_STATE_BYTES = {"flash": 24, "cudnn": 16, "efficient": 16}
"""Seed and offset of attention's dropout, returned in any case: two numbers and one unused by
flash, two by the others (native_functions.yaml, ``_scaled_dot_product_*_attention``)."""

FLASH_WIDTH_MULTIPLE = 8
"""Widths of a head that flash attention takes; others are padded (sdp_utils.cpp, attention.cpp ``pad_last_dim``)."""


def attended(
    builder: Builder, query: Value, key: Value, value: Value, heads: int, groups: int, part: Attention | None = None
) -> Value:
    """Return attention; ``groups`` are the key and value heads."""
    query, key, value = builder.lowered(query), builder.lowered(key), builder.lowered(value)
    with builder.tape.alive(query, key, value):
        if part is not None and (part.sinks or part.logit_softcap):
            return _eager_attention(builder, query, key, value, part)
        if builder.profile.attention == "math":
            return _math_attention(builder, query, key, value, heads, groups)
        if builder.profile.attention == "flash":
            return _flash_attention(builder, query, key, value, heads, groups)
        if builder.profile.attention == "efficient" and groups != heads:
            key, value = _repeated(builder, key, heads // groups), _repeated(builder, value, heads // groups)
            groups = heads
        return _kernel(builder, query, key, value, heads, groups)


def _kernel(
    builder: Builder,
    query: Value,
    key: Value,
    value: Value,
    heads: int,
    groups: int,
    scratch: tuple[tuple[Quantity, int], ...] = (),
) -> Value:
    """Return attention by one kernel, which keeps its inputs, its result and one number per row of scores."""
    tape = builder.tape
    out = builder.fresh(query, heads * (value.width // groups))
    # The efficient kernel keeps its statistics in rows of a multiple of 32 (kAlignLSE in mem_eff_attention).
    rows = Quantity.ALIGNED_TOKENS if builder.profile.attention == "efficient" else TOKENS
    statistics = tape.value(rows, heads, 4)
    random = tape.value(ONE, RANDOM_STATE_BYTES[builder.profile.attention], 1)
    ways = [(query, NEW), (key, NEW), (value, NEW)]
    saves = [query, key, value, out, statistics, random]
    # The kernel of backward forms all three gradients, whichever of them are needed.
    unused = tuple((v.quantity, v.coefficient) for v, _ in ways if not v.needs_gradient)
    scratch = (*scratch, *unused)
    with tape.alive(query, key, value):
        return tape.apply("attention", ways, (out, statistics, random), saves, workspace=scratch, product=True)


def _flash_attention(builder: Builder, query: Value, key: Value, value: Value, heads: int, groups: int) -> Value:
    """Return flash attention, which wants heads of one width, a multiple of 8."""
    tape = builder.tape
    widths = query.width // heads, key.width // groups, value.width // groups
    padded = round_up(max(widths), FLASH_WIDTH_MULTIPLE)
    given = ((query, heads, widths[0]), (key, groups, widths[1]), (value, groups, widths[2]))
    query, key, value = (v if width == padded else _padded(builder, v, count * padded) for v, count, width in given)
    out = _kernel(builder, query, key, value, heads, groups, _flash_workspace(builder, heads, groups, padded))
    tape.touch(query, key, value)
    return out if padded == widths[2] else builder.sliced(out, heads * widths[2])


def _padded(builder: Builder, x: Value, width: int) -> Value:
    return builder.tape.apply("pad", [(x, NEW)], builder.fresh(x, width), packs=False)


def _flash_workspace(builder: Builder, heads: int, groups: int, width: int) -> tuple[tuple[Quantity, int], ...]:
    """Return what flash attention's backward allocates inside itbuilder.

    Source:
        flash_api.cpp, ``mha_bwd``: softmax_d and dq_accum in fp32 over lengths rounded to
        128, dk and dv for every query head where heads are grouped.
    """
    rounded = round_up(width, 32 if width <= 128 else 64)
    rows = (Quantity.PADDED_TOKENS, 4 * heads * (1 + rounded))
    return (rows,) if groups == heads else (rows, (TOKENS, 2 * builder.compute * heads * width))


def _eager_attention(builder: Builder, query: Value, key: Value, value: Value, part: Attention) -> Value:
    """Return attention step by step, as soft caps and sinks need it (transformers' eager_attention_forward)."""
    tape, heads = builder.tape, part.num_heads
    if part.num_key_value_heads != heads:
        times = heads // part.num_key_value_heads
        key, value = _repeated(builder, key, times), _repeated(builder, value, times)
    with tape.alive(query, key, value):
        scores = _scores(builder, query, key, heads, builder.compute)
        scores = builder.pointwise("scale", scores)
        if part.logit_softcap:
            bounded = builder.fresh(scores := builder.pointwise("scale", scores))
            tape.apply("tanh", [(scores, NEW)], bounded, [bounded])
            scores = builder.pointwise("scale", bounded)
        scores = builder.pointwise("mask", scores, packs=True)
        if part.sinks:
            scores, weights = _with_sinks(builder, scores, heads)
        else:
            with tape.alive(scores):
                weights = _softmax(builder, scores)
        with tape.alive(scores):
            with tape.alive(weights):
                weights = builder.dropped(weights)
            return _weighted_sum(builder, weights, value, query.width, heads)


def _scores(builder: Builder, query: Value, key: Value, heads: int, width: int) -> Value:
    """Return query times key; heads of several sequences that lie apart are copied together first."""
    tape = builder.tape
    with tape.alive(query, key):
        query = builder.copied(query, moves=_lies_apart(builder, query, heads))
        key = builder.copied(key, moves=_lies_apart(builder, key, heads))
        scores = tape.value(Quantity.SCORES, heads, width)
        with tape.alive(query, key):
            saves = builder.factors(query, key)
            return tape.apply("scores", [(query, NEW), (key, NEW)], scores, saves, product=True)


def _weighted_sum(builder: Builder, weights: Value, value: Value, width: int, heads: int) -> Value:
    """Return probabilities times value."""
    tape = builder.tape
    value = builder.copied(value, moves=_lies_apart(builder, value, heads))
    out = tape.value(TOKENS, width, value.element_bytes)
    with tape.alive(weights, value):
        ways = [(weights, NEW), (value, NEW)]
        return tape.apply("weighted sum", ways, out, builder.factors(weights, value), product=True)


def _lies_apart(builder: Builder, x: Value, heads: int) -> bool:
    """Whether a product of matrices copies heads that lie between tokens: not of one sequence, token or head."""
    return x.apart and heads > 1 and not builder.settings.regime.one_sequence and not builder.settings.regime.one_token


def _softmax(builder: Builder, scores: Value) -> Value:
    """Return probabilities, formed in fp32 and cast."""
    return builder.cast(_probabilities(builder, builder.cast(scores, 4)), builder.compute)


def _probabilities(builder: Builder, scores: Value) -> Value:
    """Return the softmax, whose backward first forms the product of gradient and result (SoftMax.cu)."""
    softmax = builder.fresh(scores)
    full = [(scores.quantity, scores.coefficient)]
    return builder.tape.apply("softmax", [(scores, NEW)], softmax, [softmax], workspace=full)


def _with_sinks(builder: Builder, scores: Value, heads: int) -> tuple[Value, Value]:
    """Return scores less the highest, and probabilities over them and one learned sink per head, without it (gpt-oss)."""
    tape = builder.tape
    sinks = builder.weights[f"{builder.settings.names.attention}.{builder.settings.names.sinks}"]
    joined = tape.value(Quantity.SCORES_AND_SINK, heads, scores.element_bytes)
    tape.apply("cat sinks", [(scores, SAME)], joined, weights=[sinks], packs=False)
    with tape.alive(joined):
        top, places = tape.value(TOKENS, heads, scores.element_bytes), tape.value(TOKENS, heads, 8)
        tape.apply("max", [(joined, NEW)], top, [places])
        full = [(joined.quantity, joined.coefficient)]
        ways = [(joined, SAME), (top, NEW)]
        shifted = tape.apply("sub", ways, builder.fresh(joined), workspace=full, packs=False)
    with tape.alive(shifted):
        softmax = _probabilities(builder, shifted)
    cut = Value(softmax.storage, scores.quantity, scores.coefficient, scores.element_bytes)
    return shifted, tape.apply("slice", [(softmax, NEW)], cut, packs=False)


def _repeated(builder: Builder, x: Value, times: int) -> Value:
    """Return every head of ``x`` repeated."""
    with builder.tape.alive(x):
        repeated = builder.fresh(x, x.width * times)
        repeated.apart = False
        return builder.tape.apply("repeat", [(x, NEW)], repeated, packs=False)


def _math_attention(builder: Builder, query: Value, key: Value, value: Value, heads: int, groups: int) -> Value:
    """Return attention that keeps its probabilities, in fp32 (attention.cpp, _scaled_dot_product_attention_math)."""
    tape = builder.tape
    out_bytes = query.element_bytes
    query, key, value = builder.cast(query, 4), builder.cast(key, 4), builder.cast(value, 4)
    wide = (query, key, value)
    query = builder.pointwise("scale", query)
    square = (Quantity.SQUARE, 1)
    flags = tape.make("mask", tape.value(*square, 1, part=Part.TEMPORARIES), scratch=[square])
    mask = tape.make("mask", tape.value(*square, 4, part=Part.TEMPORARIES), flags)
    if groups != heads:
        key, value = _repeated(builder, key, heads // groups), _repeated(builder, value, heads // groups)
    with tape.alive(*wide, query, key, value, mask):
        scores = _scores(builder, query, builder.pointwise("scale", key), heads, 4)
        masked = tape.apply("mask", [(scores, SAME)], builder.fresh(scores), packs=False)
        probabilities = _probabilities(builder, masked)
        with tape.alive(probabilities):
            probabilities = builder.dropped(probabilities)
        results = [probabilities]
        if out_bytes != 4:
            results.append(tape.make("cast", tape.value(Quantity.SCORES, heads, out_bytes), probabilities))
        with tape.alive(*results):
            width = heads * (value.width // heads)
            out = _weighted_sum(builder, probabilities, value, width, heads)
            return builder.cast(out, out_bytes)
