"""Embedding and cross-entropy whose vocabulary several GPUs share, on the tape of one of them.

Source:
    ``Embedding.forward`` in torchtitan/models/common/embedding.py; ``_LossParallelCrossEntropy`` in
    torchtitan/components/loss.py (0.3.0).
"""

from __future__ import annotations

from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value
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


def whole_rows(builder: Builder, x: Value) -> Value:
    """Return ``x`` as each rank's columns are multiplied with it: gathered along the sequence; its gradient is summed over ranks."""
    tape, settings = builder.tape, builder.settings
    if not settings.divided:
        return x
    if not settings.sequence:
        return tape.apply("all-reduce", [(x, NEW)], tape.view(x), traits=SAVES_NOTHING)
    rows = tape.value(TOKENS, x.width, x.element_bytes)
    copy = [(TOKENS, rows.coefficient)]
    gathered = [] if settings.regime.one_sequence else copy
    return tape.apply("all-gather", [(x, NEW)], rows, traits=Traits(packs=False, scratch=gathered, workspace=copy))


def row_product(builder: Builder, x: Value, name: str, rows: int) -> Value:
    """Return a projection of ``x``, of which each rank has a share of the columns: the sum over ranks, or a rank's part of it."""
    if not builder.settings.divided:
        return linear(builder, x, name, rows)
    with builder.tape.alive(x):
        return summed(builder, linear(builder, x, name, rows))


def summed(builder: Builder, x: Value) -> Value:
    """Return the sum of what ranks have, or a rank's part of the sequence of it."""
    tape, settings = builder.tape, builder.settings
    if not settings.sequence:
        return tape.apply("all-reduce", [(x, SAME)], builder.fresh(x), traits=SAVES_NOTHING)
    out = tape.value(settings.stream, x.width, x.element_bytes)
    copy = [(TOKENS, x.coefficient)]
    gathered = [] if settings.regime.one_sequence else copy
    traits = Traits(packs=False, scratch=copy, workspace=gathered, product=True)
    return tape.apply("reduce-scatter", [(x, NEW)], out, traits=traits)
