"""Gated delta networks by kernels: the convolution of causal-conv1d, the rule of flash-linear-attention.

Source: ``CausalConv1dFn`` in causal_conv1d/causal_conv1d_interface.py and ``causal_conv1d_bwd_function`` in cpp_functions.py
(1.7.0); ``ChunkGatedDeltaRuleFunction`` in fla/ops/gated_delta_rule/chunk.py, lines 249 to 390, and what it calls (fla-core 0.6.0).
"""

from __future__ import annotations

from memplan.model.gated_delta_net import CHUNK_TOKENS, GatedDeltaNet
from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.delta.delta_rule import DeltaInputs
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, Traits, Value
from memplan.step.tapes.taped_weight import Weight

KEY_TILES = 128
"""Widths of keys that one program of backward's kernel takes, on cards with the shared memory of compute capability 8.0 or 9.0, of
16 bits; each writes a gradient of the decay (``chunk_bwd_dqkwg`` in fla/ops/common/chunk_o.py, lines 728 to 755)."""


def fused_convolution(builder: Builder, x: Value, weight: Weight) -> Value:
    """Return the convolution and its activation by one kernel, which saves its input; the weight's gradient is summed in fp32."""
    out = builder.fresh(x)
    wide = [(Quantity.ONE, weight.rows * weight.columns * 4)] if weight.element_bytes < 4 and weight.trainable else []
    traits = Traits(packs=True, custom=True, workspace=wide)
    with builder.tape.alive(x):
        return builder.tape.apply("conv1d", [(x, NEW)], out, [x], [weight], traits=traits)


def fused_rule(builder: Builder, given: DeltaInputs, part: GatedDeltaNet) -> Value:
    """Return what the rule reads off its state for each token, in the dtype of the query.

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
    traits = Traits(
        scratch=[(TOKENS, forward), state],
        workspace=[(TOKENS, _backward_bytes(given, part, keys)), state, state],
        packs=True,
        custom=True,
    )
    with tape.alive(*given):
        ways = [(x, NEW) for x in given]
        return tape.apply("gated delta rule", ways, (out, *saves), saves, traits=traits)


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
