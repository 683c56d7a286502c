"""Head and cross-entropy over chunks of a fixed number of tokens, each of which runs again in backward."""

from collections.abc import Sequence

from memplan.documents.frozen_values import dataclass
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAVES_NOTHING, Sizes, Traits, Value
from memplan.step.tapes.taped_weight import Weight, summed_as_stored

TOKEN_CHUNK = 256
"""Tokens of a chunk.

Source: ``_CHUNKED_LM_HEAD_CHUNK_SIZE`` in trl/trainer/sft_trainer.py (1.7.0 to 1.14.0).
"""

TOKEN_CHUNKS = ("token-chunks", "token-chunks-fp32")
"""Losses over such chunks: product in the dtype of the rows, or of copies in fp32."""

CHUNK = Quantity.CHUNK


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What one chunk takes at its widest moments."""

    product: Sizes  # Copies of its rows and of the head, and its logits
    entropy: Sizes  # Log-probabilities, their exponentials and the product of both, beside logits
    copies: Sizes  # Copies that the product's backward reads
    formed: int  # What else the head's gradient of one chunk takes until it has the weight's dtype
    formed_again: int  # The same beside the sum of those of other chunks


def token_chunk_cross_entropy(
    builder: Builder, x: Value, weights: Sequence[Weight], vocab_size: int, *, wide: bool, bounded: bool
) -> Value:
    """Record head and cross-entropy of the tokens that have a next one, chunk by chunk; return the loss.

    The rows of those tokens are copied out, as though each had a label. Backward computes a chunk again with its entropy,
    whose gradient nobody asks for, and adds the head's gradients of all chunks up.

    Args:
        weights: The head's weight, and its bias where it has one.
        vocab_size: Rows of the head.
        wide: Whether rows and head are copied in fp32 before autocast casts them, chunk by chunk.
        bounded: Whether a scaled tanh bounds the logits.

    Source:
        ``_chunk`` and ``_chunked_cross_entropy_loss`` in trl/trainer/sft_trainer.py: lines 101 to 230 of 1.12.0 (wide),
        100 to 233 of 1.14.0.
    """
    tape, predicted = builder.tape, Quantity.PREDICTED_TOKENS
    regime, own = builder.settings.regime, [summed_as_stored(weight) for weight in weights]
    chunk = _chunk(builder, x, weights, vocab_size, wide=wide, bounded=bounded)
    row = (predicted, x.width * x.element_bytes)
    summed = [row, (ONE, 0 if regime.one_chunk else sum(weight.formed_bytes for weight in own))]
    formed = chunk.formed if regime.one_chunk else chunk.formed_again
    with tape.alive(x):
        order = tape.make("order of labels", tape.value(predicted, 1, 8))
        labels = tape.make("choose labels", tape.value(predicted, 1, 8), order)
        rows = tape.value(predicted, x.width, x.element_bytes)
        cut = Value(x.storage, predicted, x.coefficient, x.element_bytes)
        tape.apply("slice", [(x, NEW)], cut, traits=SAVES_NOTHING)
        copied = Traits(scratch=[] if regime.one_sequence else [row])
        tape.apply("choose rows", [(cut, NEW)], rows, [order], traits=copied)
        with tape.alive(rows, labels):
            point = _step(builder, "head of a chunk", rows, chunk.product, [(ONE, formed)], (rows, labels), own)
            point = _step(builder, "loss of a chunk", point, chunk.entropy, [*chunk.copies, *chunk.entropy, *summed])
            point = _step(builder, "head of a chunk again", point, (), [*chunk.product, *summed])
    loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
    return tape.apply("mean", [(point, NEW)], loss, traits=SAVES_NOTHING)


def _step(
    builder: Builder,
    name: str,
    given: Value,
    scratch: Sizes,
    workspace: Sizes,
    saves: Sequence[Value] = (),
    weights: Sequence[Weight] = (),
) -> Value:
    """Record what every chunk does; return a point that the next step starts from, which has no bytes."""
    point = builder.tape.value(ONE, 0, 4, part=Part.LOGITS)
    traits = Traits(scratch=scratch, workspace=workspace, custom=True)
    return builder.tape.apply(name, [(given, NEW)], point, saves, weights, traits)


def _chunk(
    builder: Builder, x: Value, weights: Sequence[Weight], vocab_size: int, *, wide: bool, bounded: bool
) -> _Chunk:
    """Return what one chunk takes; a bias is in fp32, and so is the sum of logits and bias."""
    weight, *biases = weights
    first = 4 if wide else x.element_bytes
    compute = builder.compute if builder.settings.autocast else first
    elements = weight.rows * weight.columns
    head_copies = _copies(weight.element_bytes, first, compute)
    product = [
        *((CHUNK, x.width * size) for size in _copies(x.element_bytes, first, compute)),
        *((ONE, elements * size) for size in head_copies),
        (CHUNK, vocab_size * compute),
    ]
    logits = compute if wide and not biases else 4
    entropy = [(CHUNK, vocab_size * (logits * (2 if bounded else 1) + 4 + 4 + 4))]
    retained = [(ONE, elements * compute)] if head_copies else []
    if compute != x.element_bytes and weight.trainable:
        retained.append((CHUNK, x.width * compute))
    if not weight.trainable:
        return _Chunk(product, entropy, retained, 0, 0)
    # A product's gradient is that of the transposed head, which takes another tensor to add up where it is not cast.
    turned = weight.element_bytes == first
    cast = (compute + 4) * elements if head_copies else 0
    again = max(cast, (2 if turned else 1) * weight.own_bytes)
    return _Chunk(product, entropy, retained, max(cast - weight.own_bytes, 0), again)


def _copies(width: int, first: int, compute: int) -> list[int]:
    """Return the bytes of an element in each copy that is made of a tensor on its way to a product: to ``first``, then cast."""
    return [*([first] if first != width else []), *([compute] if compute != first else [])]
