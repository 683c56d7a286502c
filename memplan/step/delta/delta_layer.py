"""A gated delta network on a tape: projections, a convolution, the rule itself, a gated norm.

Source: ``Qwen3NextGatedDeltaNet.forward``, ``Qwen3_5GatedDeltaNet.forward``, ``causal_conv1d_fn`` and ``Qwen3NextRMSNormGated``
in transformers 5.23.0, models/qwen3_next/modeling_qwen3_next.py and models/qwen3_5/modeling_qwen3_5.py.
"""

from memplan.model.gated_delta_net import CHUNK_TOKENS, GatedDeltaNet
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.delta.delta_rule import DeltaInputs, chunked_rule
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Reduction, Traits, Value, Weight


def gated_delta_net(builder: Builder, x: Value, part: GatedDeltaNet, prefix: str) -> Value:
    """Return what a gated delta network adds to the residual stream."""
    tape = builder.tape
    with tape.alive(x):
        made = _projected(builder, x, part, prefix)
        named = made if part.joined else made[1:]
        with tape.alive(*named):
            mixed, gate, correction, decay = _taken_apart(builder, made, part) if part.joined else made
            with tape.alive(gate, correction, decay):
                mixed = _convolved(builder, mixed, part, prefix)
                with tape.alive(mixed):
                    return _attended(builder, mixed, gate, (correction, decay), part, prefix)


def _attended(
    builder: Builder, mixed: Value, gate: Value, numbers: tuple[Value, Value], part: GatedDeltaNet, prefix: str
) -> Value:
    """Return the projection of what the rule reads off its state, normalised and gated."""
    inputs = _rule_inputs(builder, mixed, *numbers, part, prefix)
    with builder.tape.alive(*inputs):
        rule = fused_rule if builder.profile.linear_attention == "fla" else chunked_rule
        read, last = rule(builder, inputs, part)
        with builder.tape.alive(*last):
            for state in last:
                builder.cache_state(part.value_size * part.key_head_dim, state, read)
            out = _gated_norm(builder, read, gate, part, prefix)
            with builder.tape.alive(out):
                return linear(builder, out, f"{prefix}.out_proj", builder.settings.hidden_size)


def _projected(builder: Builder, x: Value, part: GatedDeltaNet, prefix: str) -> tuple[Value, ...]:
    """Return the projections of the layer's input."""
    made: list[Value] = []
    for name, width in part.projections:
        with builder.tape.alive(*made):
            made.append(linear(builder, x, f"{prefix}.{name}", width))
    return tuple(made)


def _taken_apart(builder: Builder, made: tuple[Value, ...], part: GatedDeltaNet) -> tuple[Value, Value, Value, Value]:
    """Return the parts of joined projections, which lie apart key head by key head, and so are copied."""
    tape, heads, (both, numbers) = builder.tape, part.num_value_heads, made
    alone = part.num_key_heads == 1
    query_key, value, gate = (
        tape.view(both, 2 * part.key_size),
        tape.view(both, part.value_size),
        tape.view(both, part.value_size),
    )
    tape.apply("split", [(both, NEW)], (query_key, value, gate), traits=SAVES_NOTHING)
    correction, decay = tape.view(numbers, heads), tape.view(numbers, heads)
    tape.apply("split", [(numbers, NEW)], (correction, decay), traits=SAVES_NOTHING)
    value = builder.copied(value, moves=not alone)
    with tape.alive(value):
        gate = builder.copied(gate, moves=not alone)
        with tape.alive(gate):
            correction = builder.copied(correction, moves=not alone)
            with tape.alive(correction):
                decay = builder.copied(decay, moves=not alone)
                with tape.alive(decay):
                    query_key = builder.copied(query_key, moves=not alone)
                    mixed = builder.fresh(both, part.convolved_size)
                    ways = [(query_key, SAME), (value, SAME)]
                    return tape.apply("cat", ways, mixed, traits=SAVES_NOTHING), gate, correction, decay


def _convolved(builder: Builder, x: Value, part: GatedDeltaNet, prefix: str) -> Value:
    """Return the convolution over tokens and its activation; the result has ``kernel_size - 1`` tokens more, which are cut off."""
    builder.cache_state(part.convolved_size * part.kernel_size, x)
    if builder.profile.linear_attention == "fla":
        return builder.last_tokens(fused_convolution(builder, x, builder.weight(f"{prefix}.conv1d.weight")))
    tape, weight, own = builder.tape, builder.weight(f"{prefix}.conv1d.weight"), x.element_bytes
    with tape.alive(x):
        x = builder.lowered(builder.cast(x, weight.element_bytes, foreign=weight.foreign))
        elements = weight.rows * weight.columns
        narrow = builder.settings.autocast and weight.element_bytes != builder.compute
        copies = [tape.make("cast weight", builder.constant(elements, builder.compute))] if narrow else []
        whole = builder.fresh(x)
        beyond = tape.value(Quantity.SEQUENCES, (part.kernel_size - 1) * part.convolved_size, x.element_bytes)
        with tape.alive(x, *copies):
            tape.apply("conv1d", [(x, NEW)], (whole, beyond), [x, *copies], [weight])
        cut = tape.apply("slice", [(whole, NEW)], tape.view(whole), traits=SAVES_NOTHING)
        out = builder.pointwise("activation", cut, (cut, beyond))
        return builder.last_tokens(builder.cast(out, own))


def _rule_inputs(
    builder: Builder, mixed: Value, correction: Value, decay: Value, part: GatedDeltaNet, prefix: str
) -> DeltaInputs:
    """Return query, key, value, the logarithm of the decay and the correction of each token."""
    tape, heads = builder.tape, part.num_value_heads
    query, key, value = (tape.view(mixed, width) for width in (part.key_size, part.key_size, part.value_size))
    tape.apply("split", [(mixed, NEW)], (query, key, value), traits=SAVES_NOTHING)
    fla = builder.profile.linear_attention == "fla"
    if heads > 1 and not fla and not builder.settings.regime.one_token:
        copied = (query, key, value) if part.num_key_heads == heads else (value,)
        views = [tape.apply("heads", [(x, NEW)], tape.view(x), traits=SAVES_NOTHING) for x in copied]
        query, key, value = views if len(views) > 1 else (query, key, *views)
    beta = builder.fresh(correction)
    tape.apply("sigmoid", [(correction, NEW)], beta, [beta])
    with tape.alive(beta):
        rate, bias = builder.weight(f"{prefix}.A_log"), builder.weight(f"{prefix}.dt_bias")
        power, factor = (tape.value(ONE, heads, 4, part=Part.ACTIVATIONS) for _ in range(2))
        tape.apply("exp", [], power, [power], [rate])
        tape.apply("neg", [(power, NEW)], factor, traits=SAVES_NOTHING)
        with tape.alive(factor):
            wide = builder.cast(decay, 4)
            shifted = builder.fresh(wide)
            reduces = Reduction(wide.quantity, 1, heads) if bias.trainable else None
            tape.apply("add", [(wide, SAME)], shifted, weights=[bias], traits=Traits(packs=False, reduces=reduces))
            soft = builder.pointwise("softplus", shifted, (shifted,))
            log = builder.fresh(soft)
            saves = [*([factor] if soft.needs_gradient else []), *([soft] if factor.needs_gradient else [])]
            full = [(soft.quantity, soft.coefficient)] if factor.needs_gradient else []
            tape.apply("mul", [(factor, NEW), (soft, NEW)], log, saves, traits=Traits(workspace=full))
    return DeltaInputs(query, key, value, log, beta)


def _gated_norm(builder: Builder, x: Value, gate: Value, part: GatedDeltaNet, prefix: str) -> Value:
    """Return ``weight * norm(x) * silu(gate)``, the norm of each head in fp32, the gate too."""
    tape, weight = builder.tape, builder.weight(f"{prefix}.norm.weight")
    rows, own = part.num_value_heads, x.element_bytes
    with tape.alive(x, gate):
        x = builder.copied(x, moves=own == 4 and rows > 1 and not builder.settings.regime.one_token)
        wide = builder.cast(x, 4)
        twice = [(wide.quantity, 2 * wide.coefficient)]
        with tape.alive(wide):
            squares = tape.apply("pow", [(wide, NEW)], builder.fresh(wide), [wide], traits=Traits(workspace=twice))
            means = tape.apply("mean", [(squares, NEW)], tape.value(wide.quantity, rows, 4), traits=SAVES_NOTHING)
            inverse = builder.fresh(means)
            tape.apply("rsqrt", [(means, NEW)], inverse, [inverse])
            full = [(wide.quantity, wide.coefficient)]
            ways = [(wide, NEW), (inverse, NEW)]
            normal = tape.apply("mul", ways, builder.fresh(wide), [wide, inverse], traits=Traits(workspace=full))
        normal = builder.cast(normal, own)
        with tape.alive(means, normal):
            scaled = builder.fresh(normal, element_bytes=max(own, weight.element_bytes))
            scratch = [(normal.quantity, scaled.coefficient)] if weight.trainable else []
            reduces = Reduction(normal.quantity, rows, part.value_head_dim)
            traits = Traits(workspace=scratch, reduces=reduces)
            tape.apply(
                "mul weight", [(normal, NEW)], scaled, [normal] if weight.trainable else [], [weight], traits=traits
            )
        with tape.alive(scaled):
            open_ = builder.cast(gate, 4)
            open_ = builder.pointwise("silu", open_, (open_,))
            return builder.cast(builder.product(scaled, open_), own)


KEY_TILES = 128
"""Widths of keys that one program of backward's kernel takes, on cards with the shared memory of compute capability 8.0 or 9.0, of
16 bits; each writes a gradient of the decay (``chunk_bwd_dqkwg`` in fla/ops/common/chunk_o.py, lines 728 to 755)."""


def fused_convolution(builder: Builder, x: Value, weight: Weight) -> Value:
    """Return the convolution and its activation by one kernel, which saves its input; the weight's gradient is summed in fp32."""
    out = builder.fresh(x)
    wide = [(Quantity.ONE, weight.rows * weight.columns * 4)] if weight.element_bytes < 4 and weight.trainable else []
    traits = Traits(custom=True, workspace=wide)
    with builder.tape.alive(x):
        return builder.tape.apply("conv1d", [(x, NEW)], out, [x], [weight], traits=traits)


def fused_rule(builder: Builder, given: DeltaInputs, part: GatedDeltaNet) -> tuple[Value, tuple[Value, ...]]:
    """Return what the rule reads off its state for each token, in the dtype of the query, and its last state where a cache is given it.

    Saved are query and key of unit length with the lengths, a copy of the value, the decay summed up within chunks, the correction
    and the solved system of each chunk. Backward forms again what forward let go of: values, keys and the states of all chunks.
    """
    tape, heads = builder.tape, part.num_value_heads
    query, key, value, decay, beta = given
    unit, lengths = builder.fresh(query), tape.value(TOKENS, part.num_key_heads, 4)
    unit_key, key_lengths = builder.fresh(key), tape.value(TOKENS, part.num_key_heads, 4)
    copy, total = builder.fresh(value), builder.fresh(decay)
    system = builder.fresh(value, heads * CHUNK_TOKENS)
    out = builder.fresh(value)
    saves = [unit, lengths, unit_key, key_lengths, copy, total, beta, system]
    state = (Quantity.DELTA_CHUNKS, heads * part.key_head_dim * part.value_head_dim * value.element_bytes)
    keys = heads * part.key_head_dim * value.element_bytes
    forward = query.coefficient + key.coefficient + keys + 2 * value.coefficient
    last, zeros = [], []
    if builder.settings.cache != "none":  # whose gradient is one of zeros
        last = [tape.value(Quantity.SEQUENCES, part.value_size * part.key_head_dim, 4)]
        zeros = [(last[0].quantity, last[0].coefficient)]
    traits = Traits(
        scratch=[(TOKENS, forward), state],
        workspace=[(TOKENS, _backward_bytes(given, part, keys)), state, state, *zeros],
        custom=True,
    )
    with tape.alive(*given):
        ways = [(x, NEW) for x in given]
        tape.apply("gated delta rule", ways, (out, *last, *saves), saves, traits=traits)
        return out, tuple(last)


def _backward_bytes(given: DeltaInputs, part: GatedDeltaNet, keys: int) -> int:
    """Return what backward allocates for each token besides the gradients it returns, at the fuller of its two fullest moments.

    Args:
        keys: Bytes of keys of all value heads.
    """
    value, decay, beta = given.value.coefficient, given.decay.coefficient, given.beta.coefficient
    shared = part.num_value_heads > part.num_key_heads
    own = given.query.coefficient  # of query or key, of their own heads
    tile = KEY_TILES if given.value.element_bytes == 2 else KEY_TILES // 2
    tiles = -(-part.key_head_dim // tile)
    both = keys + 3 * value  # keys and values of the system, new values, their gradient
    scores = 3 * keys + tiles * decay + (own if shared else 0)
    solved = 2 * own + keys + decay + keys + value + beta + decay + (own if shared else 0)
    returned = 2 * own + value + decay + beta
    return both + max(scores, solved) - returned
