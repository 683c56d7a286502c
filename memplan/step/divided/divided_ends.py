"""Embedding and cross-entropy whose vocabulary several GPUs share, on the tape of one of them.

Source:
    ``Embedding.forward`` in torchtitan/models/common/embedding.py; ``_LossParallelCrossEntropy`` in
    torchtitan/components/loss.py (0.3.0).
"""

from __future__ import annotations

from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.divided.divided_products import summed
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, Traits, Value
from memplan.step.tapes.taped_weight import Weight

FORWARD_BYTES, BACKWARD_BYTES = 38, 33
"""Of a token, beside logits: maximum and sum, labels of this rank, which of them are none of its own, and its part of the loss."""


def divided_embedding(builder: Builder, weight: Weight, traits: Traits) -> Value:
    """Return rows of the embedding that a rank has, zeros for others, summed over ranks.

    Args:
        weight: The rank's rows.
    """
    tape, block = builder.tape, builder.settings
    mask = tape.make("mask", tape.value(TOKENS, 1, 1), scratch=[(TOKENS, 2)])
    rows = tape.make("rows of this rank", tape.value(TOKENS, 1, 8), scratch=[(TOKENS, 8)])
    with tape.alive(mask, rows):
        x = tape.value(TOKENS, block.hidden_size, block.residual_bytes)
        tape.apply("embedding", [], x, [rows], [weight], traits)
        with tape.alive(x):
            factor = tape.make("cast mask", tape.value(TOKENS, 1, block.residual_bytes), mask)
            x = tape.apply("mul mask", [(x, NEW)], builder.fresh(x), [factor])
    return summed(builder, x)


def divided_cross_entropy(builder: Builder, logits: Value, loss_bytes: int) -> Value:
    """Record cross-entropy over a rank's columns of the logits in fp32, by one function; return the loss.

    Args:
        logits: The rank's columns.
        loss_bytes: What the loss takes besides.
    """
    tape, size = builder.tape, logits.coefficient
    logs = builder.fresh(logits)
    loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
    traits = Traits(
        scratch=[(logits.quantity, size + FORWARD_BYTES), (ONE, loss_bytes)],
        workspace=[(logits.quantity, 2 * size + BACKWARD_BYTES)],
        custom=True,
    )
    return tape.apply("log_softmax", [(logits, NEW)], (loss, logs), [logs], traits=traits)
