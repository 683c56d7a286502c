"""Attention step by step as models from before Llama have it: scores in fp32, or with a bias of their own."""

from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.layers.attention_kernels import BATCHED, Heads, in_order, probabilities, scores_of, weighted_sum
from memplan.step.layers.stepwise_attention import masked_scores, wide_probabilities
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, Value


def wide_attention(builder: Builder, given: Heads) -> Value:
    """Return attention of copies of query and key in fp32, whose probabilities the layer returns too: autocast narrows its products.

    Source:
        ``GPTNeoSelfAttention._attn``, ``GPTJAttention._attn`` in transformers/models/gpt_neo and gptj (5.23.0).
    """
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


def biased_attention(builder: Builder, given: Heads) -> Value:
    """Return attention whose scores are formed on top of a bias of each head and token, and named until attention returns.

    Heads are joined with sequences, which copies those that lie apart. Backward multiplies gradients by the factor of the
    scores when they are there.

    Source:
        ``BloomAttention.forward`` in transformers/models/bloom/modeling_bloom.py (5.23.0); ``baddbmm`` in derivatives.yaml (v2.13.0).
    """
    tape, settings, own = builder.tape, builder.settings, given.query
    with tape.alive(*given.tensors):
        query = in_order(builder, given.query, given.number)
        with tape.alive(query):
            key = in_order(builder, given.key, given.number)
            with tape.alive(key):
                value = in_order(builder, given.value, given.number)
    with tape.alive(query, key, value):
        rows, columns = builder.lowered(query), builder.lowered(key)
        biases = []
        if settings.autocast and settings.residual_bytes != rows.element_bytes:
            bias = tape.value(TOKENS, given.number, rows.element_bytes, part=Part.TEMPORARIES)
            biases = [tape.make("cast bias", bias)]
        scores = tape.value(Quantity.SCORES, given.number, rows.element_bytes)
        traits = BATCHED._replace(workspace=[(rows.quantity, rows.coefficient)])
        with tape.alive(*biases):
            tape.apply("scores", [(columns, NEW), (rows, NEW)], scores, builder.factors(rows, columns), traits=traits)
        masked = masked_scores(builder, scores)
        builder.named += [scores, masked]
        with tape.alive(scores, masked):
            weights = builder.cast(wide_probabilities(builder, masked), own.element_bytes, foreign=own.foreign)
            weights = builder.dropped(weights, settings.attention_dropout)
            builder.named.append(weights)
            builder.named_values.append(weights)
            tape.returned = weights
            return weighted_sum(builder, builder.lowered(weights), builder.lowered(value), value.width, given.number)
