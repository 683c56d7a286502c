"""Attention step by step on a tape, as models of transformers have it and torch's math kernel; from before Llama, with wide scores."""

from memplan.model.spec import Attention
from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.layers.attention_kernels import (
    BATCHED,
    Heads,
    in_order,
    own_mask,
    probabilities,
    repeated,
    scores_of,
    ungrouped,
    weighted_sum,
    window_added,
    with_sinks,
)
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value


def stepwise_attention(builder: Builder, given: Heads, part: Attention | None) -> Value:
    """Return attention whose scores get an additive mask, and whose probabilities live until the layer ends."""
    tape, own, code = builder.tape, given.query.element_bytes, builder.settings.code
    if code.own_scores and builder.settings.autocast:
        own = 4  # Falcon asks for the dtype that its norm has formed
    late = code.own_scores and given.groups == 1 < given.number
    query, key, value, heads, _ = _key_repeated(builder, given) if late else ungrouped(builder, given, expands=True)
    with tape.alive(*given.tensors, query, key, value):
        rows, columns = builder.lowered(query), builder.lowered(key)
        scores = _scaled(builder, scores_of(builder, rows, columns, heads, rows.element_bytes))
        if part is not None and part.logit_softcap:
            bounded = builder.fresh(scores := builder.pointwise("scale", scores))
            tape.apply("tanh", [(scores, NEW)], bounded, [bounded])
            scores = builder.pointwise("scale", bounded)
        unmasked = [scores] if code.own_scores else []
        scores = masked_scores(builder, scores)
        named: tuple[Value, ...] = ()
        if part is not None and part.sinks:
            shifted, weights = with_sinks(builder, scores, heads)
            named = (shifted,)
            weights = builder.cast(weights, value.element_bytes, foreign=value.foreign)
            tape.touch(scores)
        else:
            with tape.alive(*unmasked):
                weights = _probabilities(builder, scores, own)
        with tape.alive(*named):
            weights = builder.dropped(weights, builder.settings.attention_dropout)
            name_weights(builder, weights, layer_returns=code.own_scores)
            read, value = builder.lowered(weights), builder.lowered(value)
            value = repeated(builder, value, heads, alone=True) if late else value
            return weighted_sum(builder, read, value, value.width, heads)


def capped_attention(builder: Builder, given: Heads, part: Attention | None) -> Value:
    """Return attention whose scores are bounded, with a mask that each layer makes, before all else where it is that of a window.

    Source:
        ``scaled_dot_product_attention`` and ``do_softcapping`` in litgpt/model.py (0.5.13).
    """
    tape, own = builder.tape, given.query.element_bytes
    within = builder.settings.code.by_groups and part is not None and part.windowed
    with tape.alive(*given.tensors):
        masks = [window_added(builder, own)] if within else []
    with tape.alive(*masks):
        query, key, value = (builder.lowered(x) for x in given.tensors)
    with tape.alive(*given.tensors, query, key, *masks, *(builder.named if within else ())):
        scores = builder.pointwise("scale", scores_of(builder, query, key, given.number, query.element_bytes))
        with tape.alive(scores):
            bounded = builder.fresh(divided := builder.pointwise("scale", scores))
            tape.apply("tanh", [(divided, NEW)], bounded, [bounded])
            scores = builder.pointwise("scale", bounded)
        with tape.alive(scores):
            mask = masks[0] if masks else own_mask(builder, own)
        with tape.alive(mask):
            weights = _probabilities(builder, masked_scores(builder, scores), own)
            with tape.alive(weights):
                return weighted_sum(builder, builder.lowered(weights), value, value.width, given.number)


def distanced_attention(builder: Builder, given: Heads, bias: Value) -> Value:
    """Return attention whose scores get a bias added in place that layers share, and that has names for scores and probabilities until it returns.

    Source:
        ``MPNetSelfAttention.forward`` in transformers/models/mpnet/modeling_mpnet.py (5.24.0).
    """
    tape, own = builder.tape, given.query.element_bytes
    with tape.alive(*given.tensors):
        query, key = builder.lowered(given.query), builder.lowered(given.key)
        scores = builder.pointwise("scale", scores_of(builder, query, key, given.number, query.element_bytes))
        ways = [(scores, SAME), (bias, SAME if bias.element_bytes == scores.element_bytes else NEW)]
        masked = masked_scores(builder, tape.apply("add bias", ways, tape.view(scores), traits=SAVES_NOTHING))
        builder.named.append(masked)
        with tape.alive(masked):
            weights = builder.dropped(_probabilities(builder, masked, own), builder.settings.attention_dropout)
            builder.named.append(weights)
            read, value = builder.lowered(weights), builder.lowered(given.value)
            return weighted_sum(builder, read, value, value.width, given.number)


def masked_in_layer(builder: Builder, heads: Heads, part: Attention) -> Value:
    """Return attention whose query is scaled in place, and whose layer makes an fp32 mask that widens scores.

    In place on a view: backward copies the whole gradient, and the part that it multiplies (``CopySlices``, tensor.cpp).

    Source:
        ``Gemma2Attention.forward`` in torchtune/models/gemma2/_attention.py (0.6.1).
    """
    tape, (given, key, value) = builder.tape, heads.tensors
    key.apart = value.apart = True
    with tape.alive(given, key, value):
        traits = Traits(packs=False, workspace=[(given.quantity, 2 * given.coefficient)])
        query = tape.apply("scale", [(given, NEW)], tape.view(given), traits=traits)
        query.apart = True
        scores = scores_of(builder, query, key, heads.number, query.element_bytes)
        with tape.alive(scores):
            builder.named += _own_masks(builder, windowed=part.windowed)
        with tape.alive(query, *builder.named):
            bounded = builder.fresh(scores := builder.pointwise("scale", scores))
            tape.apply("tanh", [(scores, NEW)], bounded, [bounded])
            scores = builder.pointwise("scale", bounded)
            way = SAME if scores.element_bytes == 4 else NEW
            masked = builder.fresh(scores, element_bytes=4)
            tape.apply("add mask", [(scores, way)], masked, traits=SAVES_NOTHING)
            with tape.alive(masked):
                weights = builder.cast(probabilities(builder, masked), query.element_bytes)
            return weighted_sum(builder, weights, value, query.width, heads.number)


def _own_masks(builder: Builder, *, windowed: bool) -> tuple[Value, ...]:
    """Return a causal mask in fp32 and what a layer names of making it, one of a window besides."""
    tape = builder.tape

    def square(name: str, width: int, *reads: Value, scratch: int = 0) -> Value:
        made = tape.value(Quantity.SQUARE, 1, width, part=Part.TEMPORARIES)
        return tape.make(name, made, *reads, scratch=[(Quantity.SQUARE, scratch)] if scratch else [])

    flags = square("causal flags", 1, scratch=1)
    mask = square("mask", 4, flags, scratch=1)
    if not windowed:
        return (mask,)
    ones = square("ones", 4, mask)
    window = square("window", 4, ones, scratch=8)
    with tape.alive(ones):
        return ones, window, square("mask", 4, mask, window, scratch=1)


def window_masks(builder: Builder) -> tuple[Value, ...]:
    """Return the flags of what lies beyond a window, and the mask that a layer makes by them of its model's.

    Source:
        ``Gemma2DecoderLayer.forward`` in transformers/models/gemma2/modeling_gemma2.py, lines 290 to 312 (4.51.3).
    """
    tape = builder.tape
    ones, flags = (tape.value(Quantity.SCORES, 1, 1, part=Part.TEMPORARIES) for _ in ("ones", "flags"))
    mask = tape.value(Quantity.SCORES, 1, builder.settings.embedded_bytes, part=Part.TEMPORARIES)
    tape.make("window flags", flags, tape.make("ones", ones))
    return flags, tape.make("window mask", mask, flags)


def _key_repeated(builder: Builder, heads: Heads) -> Heads:
    """Return heads of which the one of the key stands for as many as the query has."""
    return heads._replace(key=repeated(builder, heads.key, heads.number, alone=True))


def _scaled(builder: Builder, scores: Value) -> Value:
    """Return scores with their factor."""
    if not builder.settings.code.own_scores:
        return builder.pointwise("scale", scores)
    return builder.tape.apply("scale", [(scores, NEW)], builder.tape.view(scores), traits=SAVES_NOTHING)


def name_weights(builder: Builder, weights: Value, *, layer_returns: bool) -> None:
    """Note how long there is a name for probabilities: until attention ends, or its layer, or the next one where that returns them too."""
    if not builder.settings.code.returns_weights:
        builder.named.append(weights)
        return
    builder.named_values.append(weights)
    if layer_returns:
        builder.tape.returned = weights


def masked_scores(builder: Builder, scores: Value) -> Value:
    """Return scores with a mask in the dtype of the residual stream added; as they are where every token sees all."""
    if builder.settings.sees_all and not builder.settings.regime.padded:
        return scores
    given = builder.settings.residual_bytes if builder.settings.sees_all else builder.settings.embedded_bytes
    width = max(scores.element_bytes, given)
    way = SAME if width == scores.element_bytes else NEW
    with builder.tape.alive(scores):
        masked = builder.fresh(scores, element_bytes=width)
        return builder.tape.apply("add mask", [(scores, way)], masked, traits=SAVES_NOTHING)


def _probabilities(builder: Builder, scores: Value, own: int) -> Value:
    """Return probabilities in the dtype of the query; of fp16 the fp32 ones are formed by one kernel (SoftMax.cpp)."""
    settings = builder.settings
    with builder.tape.alive(scores):
        if not settings.code.wide_softmax and not settings.autocast:
            return probabilities(builder, scores)
        wide = wide_probabilities(builder, scores)
        return wide if settings.code.wide_weights else builder.cast(wide, own)


def wide_probabilities(builder: Builder, scores: Value) -> Value:
    """Return probabilities in fp32, by one kernel of scores in fp16."""
    if not builder.settings.fp16 or scores.element_bytes != 2:
        return probabilities(builder, builder.cast(scores, 4))
    wide = builder.fresh(scores, element_bytes=4)
    traits = Traits(workspace=[(wide.quantity, wide.coefficient)])
    return builder.tape.apply("softmax", [(scores, NEW)], wide, [wide], traits=traits)


def wide_attention(builder: Builder, given: Heads) -> Value:
    """Return attention of copies of query and key in fp32, whose probabilities the layer returns too: autocast narrows its products.

    Source:
        ``GPTNeoSelfAttention._attn`` in transformers/models/gpt_neo (5.23.0); ``GPTJAttention._attn`` in models/gptj (5.23.0), and
        ``eager_attention_forward`` (5.24.0).
    """
    tape, how, own = builder.tape, builder.settings.code.wide_scores, given.value
    with tape.alive(*given.tensors):
        query = builder.cast(given.query, 4)
        with tape.alive(query):
            key = builder.cast(given.key, 4)
        with tape.alive(query, key):
            rows, columns = builder.lowered(query), builder.lowered(key)
            scores = scores_of(builder, rows, columns, given.number, rows.element_bytes)
        with tape.alive(*((query, key) if how != "unnamed" else ())):
            if how == "masked":  # a mask of the module's own chooses between them and a number
                scores = builder.pointwise("where", scores, packs=True)
            if how != "masked":
                scores = builder.pointwise("scale", scores)
            scores = masked_scores(builder, scores)
            with tape.alive(scores):
                form = wide_probabilities if builder.settings.autocast else probabilities
                weights = form(builder, scores)
            weights = builder.cast(weights, own.element_bytes, foreign=own.foreign)
            weights = builder.dropped(weights, builder.settings.attention_dropout)
            name_weights(builder, weights, layer_returns=how != "unnamed")
            read, value = builder.lowered(weights), builder.lowered(own)
            return weighted_sum(builder, read, value, value.width, given.number)


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
            name_weights(builder, weights, layer_returns=True)
            return weighted_sum(builder, builder.lowered(weights), builder.lowered(value), value.width, given.number)
