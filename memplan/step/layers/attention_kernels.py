"""Attention of query, key and value on a tape, by kernel or step by step."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memplan.model.spec import Attention
from memplan.step.blocks.builder import ONE, TOKENS, Builder, looked_at
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Sizes, Traits, Value
from memplan.units import round_up

RANDOM_STATES: Mapping[str, Sequence[int]] = {"flash": (16, 8), "cudnn": (8, 8), "efficient": (8, 8), "flex": ()}
"""Bytes of seed and offset of attention's dropout, returned in any case: both in one tensor and one unused by
flash, a tensor each by the others (native_functions.yaml, ``_scaled_dot_product_*_attention``)."""

RANDOM_STATE_BYTES = {kernel: sum(sizes) for kernel, sizes in RANDOM_STATES.items()}
"""All of them together."""

FLASH_ATTN_RANDOM_BYTES = 16
"""The same of the package flash-attn (csrc/flash_attn/flash_api.cpp, ``rng_state``)."""

BATCHED = Traits(product=True, batched=True)
"""A product of heads, one by one."""

FLASH_WIDTH_MULTIPLE = 8
"""Widths of a head that flash attention takes; others are padded (sdp_utils.cpp, attention.cpp ``pad_last_dim``)."""


class Heads(NamedTuple):
    """Query, key and value, and how many heads they have."""

    query: Value
    key: Value
    value: Value
    number: int  # Heads of the query
    groups: int  # Heads of key and value

    @property
    def tensors(self) -> tuple[Value, Value, Value]:
        """Query, key and value."""
        return self.query, self.key, self.value


def ungrouped(builder: Builder, heads: Heads, *, expands: bool = False) -> Heads:
    """Return heads whose keys and values are repeated, one for each head of the query; where it ``expands``, one is looked at."""
    if heads.groups == heads.number:
        return heads
    times, alone = heads.number // heads.groups, expands and heads.groups == 1
    key, value = (repeated(builder, x, times, alone=alone) for x in (heads.key, heads.value))
    return Heads(heads.query, key, value, heads.number, heads.number)


def attention_kernel(
    builder: Builder, heads: Heads, scratch: Sizes = (), forward: Sizes = (), masks: Sequence[Value] = ()
) -> Value:
    """Return attention by one kernel, which saves its inputs, its result and one number per row of scores.

    Args:
        heads: Query, key and value.
        scratch: What the kernel of backward allocates inside itself.
        masks: A mask that is added to scores, where one is given.
    """
    tape, kernel = builder.tape, builder.profile.attention
    out = builder.fresh(heads.query, heads.number * (heads.value.width // heads.groups))
    # The efficient kernel stores its statistics in rows of a multiple of 32 (kAlignLSE in mem_eff_attention).
    bucketed = heads.query.quantity is Quantity.BUCKETED_TOKENS
    rows = Quantity.ALIGNED_TOKENS if kernel == "efficient" else Quantity.BUCKETED_TOKENS if bucketed else TOKENS
    statistics = tape.value(rows, heads.number, 4)
    states = (FLASH_ATTN_RANDOM_BYTES,) if builder.settings.flash_attn else RANDOM_STATES[kernel]
    random = [tape.value(ONE, size, 1) for size in states]
    ways = [(x, NEW) for x in heads.tensors]
    query, key, value = heads.tensors
    saves = [*masks, key, query, value, statistics, out, *random]  # inputs, then results, each by name
    if builder.settings.flash_attn:
        saves = [*heads.tensors, out, statistics, *random]
    # The kernel of backward forms all three gradients, whichever of them are needed.
    unused = [(x.quantity, x.coefficient) for x in heads.tensors if not x.needs_gradient]
    traits = Traits(scratch=forward, workspace=(*unused, *scratch), product=True)
    with tape.alive(*heads.tensors):
        out = tape.apply("attention", ways, (out, statistics, *random), saves, traits=traits)
        tape.touch(*reversed(random), statistics)  # a tuple lets go of its last item first
        return out


def additive_mask(builder: Builder, like: Value) -> Value:
    """Return a mask of booleans as one that is added, in the dtype of the query, its rows padded for the efficient kernel.

    Source:
        ``convert_boolean_attn_mask`` and ``pad_bias`` in aten/src/ATen/native/transformers/attention.cpp (v2.13.0).
    """
    tape, width = builder.tape, like.element_bytes
    if builder.settings.code.by_groups:
        return _padded_square(builder, window_added(builder, width))
    if builder.settings.code.masks_layers:
        causal, window = own_mask(builder, width), tape.value(Quantity.SQUARE, 1, width)
        with tape.alive(causal):  # the causal one is replaced by that of a window
            return _padded_square(builder, tape.make("window mask", window))
    mask = tape.make("additive mask", tape.value(Quantity.SCORES, 1, width), scratch=[(Quantity.SCORES, 1)])
    if builder.profile.attention != "efficient" or not builder.settings.regime.pads_mask:
        return mask
    return tape.make("pad mask", tape.value(Quantity.PADDED_SCORES, 1, width), mask)


def own_mask(builder: Builder, width: int) -> Value:
    """Return a causal mask that a layer makes of floats, and of booleans of these.

    Source:
        ``CausalSelfAttention.forward`` in litgpt/model.py (0.5.13), lines 553 to 556.
    """
    tape, size = builder.tape, Quantity.SQUARE
    ones = tape.make("ones", tape.value(size, 1, width))
    mask = tape.make("mask", tape.value(size, 1, width), ones)
    tape.make("flags", tape.value(size, 1, 1), mask)
    return mask


def window_added(builder: Builder, width: int) -> Value:
    """Return a causal mask that a layer makes of floats, to which that of a window is added, which has a name until attention returns.

    Source:
        ``CausalSelfAttention.forward`` in litgpt/model.py (0.4.12), lines 284 to 289.
    """
    tape, size, mask = builder.tape, Quantity.SQUARE, own_mask(builder, width)
    with tape.alive(mask):
        ones = tape.make("ones", tape.value(size, 1, width))
        window = tape.make("window mask", tape.value(size, 1, width), ones)
        tape.make("flags", tape.value(size, 1, 1), window)
    builder.named.append(window)
    return mask


def _padded_square(builder: Builder, mask: Value) -> Value:
    """Return a square mask with its rows padded for the efficient kernel."""
    if builder.profile.attention != "efficient" or not builder.settings.regime.pads_mask:
        return mask
    return builder.tape.make("pad mask", builder.tape.value(Quantity.PADDED_SQUARE, 1, mask.element_bytes), mask)


def flex_attention(builder: Builder, heads: Heads) -> Value:
    """Return flex attention, which takes one number per row of scores: forward the highest, backward a sum.

    Source:
        torch/_inductor/kernel/flex/flex_attention.py (v2.13.0), ``max_scores`` and ``delta``.
    """
    rows = [(TOKENS, 4 * heads.number)]
    if builder.settings.context == 1:
        return attention_kernel(builder, heads, rows, rows)
    with builder.tape.alive(*heads.tensors):
        return attention_kernel(builder, _of_all_ranks(builder, heads), rows, rows)


def _of_all_ranks(builder: Builder, heads: Heads) -> Heads:
    """Return heads whose keys and values are those of the whole sequence, of which a rank has a part.

    For each of a rank's tokens there are as many heads of them, then, as all ranks together have.
    """
    # Source: ``apply_cp_to_forward`` in torchtitan/distributed/context_parallel/api.py (0.3.0); ``flex_cp_allgather``
    # in torch/distributed/tensor/experimental/_context_parallel/_cp_custom_ops.py (v2.13.0).
    ranks, (query, key, value) = builder.settings.context, heads.tensors
    keys, values = (builder.fresh(x, x.width * ranks) for x in (key, value))
    copy = [(TOKENS, values.coefficient)]
    joined = [] if builder.settings.regime.one_sequence else copy
    traits = Traits(packs=False, scratch=joined, workspace=copy)
    builder.tape.apply("gather keys and values", [(key, NEW), (value, NEW)], (keys, values), traits=traits)
    return Heads(query, keys, values, heads.number, heads.groups * ranks)


def flash_attention(builder: Builder, heads: Heads) -> Value:
    """Return flash attention, which wants heads of one width, a multiple of 8."""
    counts = (heads.number, heads.groups, heads.groups)
    widths = [x.width // count for x, count in zip(heads.tensors, counts, strict=True)]
    padded = round_up(max(widths), FLASH_WIDTH_MULTIPLE)
    query, key, value = (
        x if width == padded else _padded(builder, x, count * padded)
        for x, count, width in zip(heads.tensors, counts, widths, strict=True)
    )
    scratch = flash_workspace(heads.number, heads.groups, padded, builder.compute)
    out = attention_kernel(builder, Heads(query, key, value, heads.number, heads.groups), scratch)
    builder.tape.touch(query, key, value)
    return out if padded == widths[2] else builder.sliced(out, heads.number * widths[2])


def bucketed_attention(builder: Builder, heads: Heads) -> Value:
    """Return attention by cuDNN of sequences that are padded by 1 to 128 tokens, whose results are cut off again.

    Source:
        ``_cudnn_length_bucketed_sdpa`` in unsloth/utils/attention_dispatch.py (2026.10.9).
    """
    tape, bucketed = builder.tape, Quantity.BUCKETED_TOKENS
    padded: list[Value] = []
    for x in heads.tensors:
        with tape.alive(*heads.tensors, *padded):
            longer = tape.value(bucketed, x.width, x.element_bytes)
            padded.append(tape.apply("pad", [(x, NEW)], longer, traits=SAVES_NOTHING))
    with tape.alive(*heads.tensors):
        query, key, value = padded
        out = attention_kernel(builder, Heads(query, key, value, heads.number, heads.groups))
        cut = Value(out.storage, TOKENS, out.coefficient, out.element_bytes, out.needs_gradient, out.foreign)
        return tape.apply("cut", [(out, NEW)], cut, traits=SAVES_NOTHING)


def _padded(builder: Builder, x: Value, width: int) -> Value:
    return builder.tape.apply("pad", [(x, NEW)], builder.fresh(x, width), traits=SAVES_NOTHING)


def flash_workspace(heads: int, groups: int, width: int, element_bytes: int) -> Sizes:
    """Return what flash attention's backward allocates inside itself, of heads as wide as ``width``.

    Source:
        flash_api.cpp, ``mha_bwd``: softmax_d and dq_accum in fp32 over lengths rounded to
        128, dk and dv for every query head where heads are grouped.
    """
    rounded = round_up(width, 32 if width <= 128 else 64)
    sums, query = (Quantity.PADDED_TOKENS, 4 * heads), (Quantity.PADDED_TOKENS, 4 * heads * rounded)
    repeated = (TOKENS, element_bytes * heads * width)
    return (sums, query) if groups == heads else (sums, query, repeated, repeated)


def eager_attention(builder: Builder, given: Heads, part: Attention) -> Value:
    """Return attention step by step, as soft caps and sinks need it (transformers' eager_attention_forward)."""
    tape = builder.tape
    query, key, value, heads, _ = ungrouped(builder, given)
    with tape.alive(query, key, value):
        scores = scores_of(builder, query, key, heads, builder.compute)
        scores = builder.pointwise("scale", scores)
        if part.logit_softcap:
            bounded = builder.fresh(scores := builder.pointwise("scale", scores))
            tape.apply("tanh", [(scores, NEW)], bounded, [bounded])
            scores = builder.pointwise("scale", bounded)
        scores = builder.pointwise("mask", scores, packs=True)
        if part.sinks:
            scores, weights = with_sinks(builder, scores, heads)
        else:
            with tape.alive(scores):
                weights = _softmax(builder, scores)
        with tape.alive(scores):
            with tape.alive(weights):
                weights = builder.dropped(weights, builder.settings.attention_dropout)
            return weighted_sum(builder, weights, value, query.width, heads)


def scores_of(builder: Builder, query: Value, key: Value, heads: int, width: int) -> Value:
    """Return query times key; heads of several sequences that lie apart are copied together first."""
    tape = builder.tape
    with tape.alive(query, key):
        query = in_order(builder, query, heads)
        key = in_order(builder, key, heads)
        scores = tape.value(Quantity.SCORES, heads, width)
        with tape.alive(key, query):  # a product's second copy goes first
            saves = builder.factors(query, key)
            return tape.apply("scores", [(key, NEW), (query, NEW)], scores, saves, traits=BATCHED)


def weighted_sum(builder: Builder, weights: Value, value: Value, width: int, heads: int) -> Value:
    """Return probabilities times value, whose gradient comes back with tokens before heads."""
    tape = builder.tape
    value = in_order(builder, value, heads)
    out = tape.value(TOKENS, width, value.element_bytes)
    with tape.alive(weights, value):
        ways = [(value, NEW), (weights, NEW)]
        tape.apply("weighted sum", ways, out, builder.factors(weights, value), traits=BATCHED)
        return looked_at(builder, out) if heads_lie_apart(builder, heads) else out


def in_order(builder: Builder, x: Value, heads: int) -> Value:
    """Return a copy of heads that lie between tokens, as a product of matrices reads them."""
    return builder.copied(x, moves=x.apart and heads_lie_apart(builder, heads))


def heads_lie_apart(builder: Builder, heads: int) -> bool:
    """Tell whether heads of tensors that have tokens before them cannot be stacked without a copy."""
    return heads > 1 and not builder.settings.regime.one_sequence and not builder.settings.regime.one_token


def _softmax(builder: Builder, scores: Value) -> Value:
    """Return probabilities, formed in fp32 and cast."""
    return builder.cast(probabilities(builder, builder.cast(scores, 4)), builder.compute)


def probabilities(builder: Builder, scores: Value) -> Value:
    """Return the softmax, whose backward forms the product of gradient and result inside itself (SoftMax.cu)."""
    softmax = builder.fresh(scores)
    traits = Traits(workspace=[(scores.quantity, scores.coefficient)])
    return builder.tape.apply("softmax", [(scores, NEW)], softmax, [softmax], traits=traits)


def with_sinks(builder: Builder, scores: Value, heads: int) -> tuple[Value, Value]:
    """Return scores less the highest, and probabilities over them and one learned sink per head, without it (gpt-oss)."""
    tape = builder.tape
    sinks = builder.weights[f"{builder.settings.names.attention}.{builder.settings.names.sinks}"]
    joined = tape.value(Quantity.SCORES_AND_SINK, heads, scores.element_bytes)
    tape.apply("cat sinks", [(scores, SAME)], joined, weights=[sinks], traits=SAVES_NOTHING)
    with tape.alive(joined):
        top, places = tape.value(TOKENS, heads, scores.element_bytes), tape.value(TOKENS, heads, 8)
        tape.apply("max", [(joined, NEW)], top, [places])
        full = [(joined.quantity, joined.coefficient)]
        ways = [(joined, SAME), (top, NEW)]
        shifted = tape.apply("sub", ways, builder.fresh(joined), traits=Traits(workspace=full, packs=False))
    with tape.alive(shifted):
        softmax = probabilities(builder, shifted)
    cut = Value(softmax.storage, scores.quantity, scores.coefficient, scores.element_bytes)
    return shifted, tape.apply("slice", [(softmax, NEW)], cut, traits=SAVES_NOTHING)


def repeated(builder: Builder, x: Value, times: int, *, alone: bool = False) -> Value:
    """Return every head of ``x`` repeated; a head that is alone may be looked at as often, and copied by none."""
    with builder.tape.alive(x):
        if alone:
            view = builder.tape.view(x, x.width * times)
            view.apart = True
            return builder.tape.apply("expand", [(x, NEW)], view, traits=SAVES_NOTHING)
        copy = builder.fresh(x, x.width * times)
        copy.apart = False
        return builder.tape.apply("repeat", [(x, NEW)], copy, traits=SAVES_NOTHING)


def chosen_heads(builder: Builder, fused: Value, part: Attention) -> tuple[Value, Value, Value]:
    """Return query, key and value out of one tensor: keys and values by lists of one number, which copies, and repeated where groups have one each."""
    # Source: ``_split_heads`` in transformers/models/falcon/modeling_falcon.py (5.24.0)
    tape, times = builder.tape, part.num_heads // part.num_key_value_heads
    query = tape.view(fused, part.query_size)
    tape.apply("slice", [(fused, NEW)], query, traits=SAVES_NOTHING)
    with tape.alive(fused, query):
        key, value = builder.fresh(fused, part.key_value_size), builder.fresh(fused, part.key_value_size)
        tape.apply("index", [(fused, NEW)], key, traits=SAVES_NOTHING)
        with tape.alive(key):
            tape.apply("index", [(fused, NEW)], value, traits=SAVES_NOTHING)
        if part.num_key_value_heads == 1:
            return query, key, value
        with tape.alive(key, value):
            query = builder.copied(query)
            with tape.alive(query):
                key = repeated(builder, key, times)
                with tape.alive(key):
                    return query, key, repeated(builder, value, times)
