"""Attention whose scores are formed in fp32 of copies of queries and keys, step by step, as models from before Llama have it.

Source: ``GPTNeoSelfAttention._attn`` and ``GPTJAttention._attn`` in transformers 5.23.0, models gpt_neo and gptj.
"""

from __future__ import annotations

from memplan.step.blocks.builder import Builder
from memplan.step.layers.attention_kernels import Heads, probabilities, scores_of, weighted_sum
from memplan.step.layers.stepwise_attention import masked_scores, wide_probabilities
from memplan.step.tapes.taped_operations import Value


def wide_attention(builder: Builder, given: Heads) -> Value:
    """Return attention, whose probabilities the layer returns too: autocast takes its products back to the narrow dtype."""
    tape, how, own = builder.tape, builder.settings.code.wide_scores, given.value
    with tape.alive(*given.tensors):
        query = builder.cast(given.query, 4)
        with tape.alive(query):
            key = builder.cast(given.key, 4)
        with tape.alive(query, key):
            scores = _scores(builder, query, key, given.number)
            if how == "masked":  # a mask of the module's own chooses between them and a number
                scores = builder.pointwise("where", scores, packs=True)
            if how == "divided":
                scores = builder.pointwise("divide", scores)
            scores = masked_scores(builder, scores)
            with tape.alive(scores):
                form = wide_probabilities if builder.settings.autocast else probabilities
                weights = form(builder, scores)
            weights = builder.cast(weights, own.element_bytes, foreign=own.foreign)
            weights = builder.dropped(weights, builder.settings.attention_dropout)
            builder.named_values.append(weights)
            tape.returned = weights
            read, value = builder.lowered(weights), builder.lowered(own)
            return weighted_sum(builder, read, value, value.width, given.number)


def _scores(builder: Builder, query: Value, key: Value, heads: int) -> Value:
    rows, columns = builder.lowered(query), builder.lowered(key)
    return scores_of(builder, rows, columns, heads, rows.element_bytes)
