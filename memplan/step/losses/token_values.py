"""A head of values on a tape: one number of each token."""

from __future__ import annotations

from memplan.step.blocks.builder import Builder
from memplan.step.blocks.projections import plain_linear
from memplan.step.tapes.taped_operations import Value
from memplan.training.adapted_ends import VALUE_HEAD

DROPOUT = 0.1
"""Probability that a model's config says nothing of (``summary_dropout_prob``)."""


def token_values(builder: Builder, hidden: Value) -> Value:
    """Record dropout, a cast to the head's fp32 and its product; return a value of each token.

    Source:
        ``ValueHead`` in trl/models/modeling_value_head.py (0.24.0).
    """
    dropped = builder.dropped(hidden, DROPOUT)
    return plain_linear(builder, builder.cast(dropped, 4), VALUE_HEAD, 1)
