"""The pooling of token embeddings to one embedding of each row, in the place of a head."""

from memplan.catalog.config_keys.method_keys import Pooling
from memplan.step.blocks.builder import Builder
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.moments import POOLED
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value

INDEX_BYTES = 8
"""Of a row: the place of the token that is taken."""


def pooled(builder: Builder, tokens: Value, pooling: Pooling) -> Value:
    """Record the pooling of token embeddings, which the features that a loop was given have a name for meanwhile; return the embeddings.

    Source:
        ``_forward_padded`` in sentence_transformers/sentence_transformer/modules/pooling.py (6.2.0).
    """
    builder.tape.phases[len(builder.tape.operations)] = POOLED
    with builder.tape.alive(tokens):
        return _mean(builder, tokens) if pooling == "mean" else _chosen(builder, tokens, masks=pooling == "last")


def _mean(builder: Builder, tokens: Value) -> Value:
    """Record the mean of a row's tokens, summed in fp32."""
    tape, width = builder.tape, tokens.element_bytes
    mask = tape.make("mask", tape.value(Quantity.TOKENS, 1, width))
    masked = builder.fresh(tokens)
    tape.apply("mul mask", [(tokens, NEW)], masked, [mask])
    total = tape.value(Quantity.SEQUENCES, tokens.width, 4)
    # the sum's gradient is seen by all tokens, and copied where it is narrower
    tape.apply("sum tokens", [(masked, SAME if width == 4 else NEW)], total, traits=SAVES_NOTHING)
    mean = builder.fresh(total)
    tape.apply("div", [(total, NEW)], mean, traits=Traits(packs=True))
    return builder.cast(mean, width)


def _chosen(builder: Builder, tokens: Value, *, masks: bool) -> Value:
    """Record the choice of one token of each row, of tokens that are masked before where ``masks``."""
    tape = builder.tape
    given = tokens
    if masks:
        mask = tape.make("mask", builder.fresh(tokens))
        given = builder.fresh(tokens)
        tape.apply("mul mask", [(tokens, NEW)], given, [mask])
    place = tape.make("place", tape.value(Quantity.SEQUENCES, 1, INDEX_BYTES))
    chosen = tape.value(Quantity.SEQUENCES, tokens.width, tokens.element_bytes)
    return tape.apply("gather", [(given, NEW)], chosen, [given, place])  # which backward asks for its size alone
