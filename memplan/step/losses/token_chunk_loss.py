"""Head and cross-entropy in pieces: over chunks of tokens that run again in backward, or LitGPT's stretches of logits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.losses.cross_entropy import PIECE_TOKENS, losses_of_rows
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.tape import Tape
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Sizes, Traits, Value, Weight, summed_as_stored
from memplan.units import ceil_div

STRETCH_TOKENS = 128
"""Tokens of a stretch, of each sequence (``lm_head_chunk_size`` in litgpt/finetune/lora.py, 0.5.13)."""


MOST_PIECES = {"fp32-pieces": 2**14, "fp32-stretches": 2**10}
"""More than these are not planned: operations of each are gone through, which takes seconds."""
IN_PIECES = tuple(MOST_PIECES)
"""Losses of LitGPT's, whose loops let go of the last logits when they have new ones."""


def pieces_of(loss: str, batch: int, length: int) -> int:
    """Return in how many pieces a loss of LitGPT's is formed; one of others.

    Raises:
        CannotAnswerError: They are more than are planned.
    """
    if loss not in MOST_PIECES:
        return 1
    stretched = loss == "fp32-stretches"
    pieces = ceil_div(length, STRETCH_TOKENS) if stretched else max(ceil_div(batch * (length - 1), PIECE_TOKENS), 1)
    if pieces > MOST_PIECES[loss]:
        raise CannotAnswerError(
            f"LitGPT forms the loss of so many tokens in {pieces:,} pieces; at most {MOST_PIECES[loss]:,} are planned"
        )
    return pieces


EMPTY = "stretch without labels"
"""The instant of what backward never comes to."""

Form = Callable[[Value], Value]
"""Records the logits of some tokens."""


def stretched_logits(builder: Builder, x: Value, head: str, form: Form) -> list[Value]:
    """Record the logits of each stretch of ``x`` in turn; return them.

    Backward comes to the last stretch first, which stores the gradients of an adapter; those of others are added.

    Args:
        head: The head's name.
        form: Records the logits of one stretch.
    """
    tape, regime, weights = builder.tape, builder.settings.regime, builder.weights
    quantities = [*[Quantity.ROW_CHUNK] * (regime.stretches - 1), Quantity.LAST_ROW_CHUNK]
    pieces = [Value(x.storage, quantity, x.coefficient, x.element_bytes) for quantity in quantities]
    first = regime.stretches - 1 - regime.empty_stretch
    added = {name: replace(w, shared=True) if name.startswith(f"{head}.") else w for name, w in weights.items()}
    logits = []
    with tape.alive(x):
        tape.apply("split", [(x, NEW)], pieces, traits=SAVES_NOTHING)
        for number, piece in enumerate(pieces):
            tape.instant, nodes, storages = "head backward", len(tape.nodes), len(tape.storages)
            builder.weights = weights if number == first else added
            logits.append(form(piece))
            for own, (_, quantity, size) in enumerate(tape.storages[storages:], storages):
                if quantity is piece.quantity and size >= logits[-1].coefficient:
                    tape.storages[own] = (Part.LOGITS, quantity, size)
            for node in tape.nodes[nodes:] if number != first else ():
                node.instant = EMPTY if number > first else "head backward"
    builder.weights = weights
    if regime.empty_stretch:
        tape.nodes[:0] = empty = [node for node in tape.nodes if node.instant == EMPTY]
        del tape.nodes[-len(empty) :]
    return logits


def stretched_cross_entropy(builder: Builder, logits: Sequence[Value]) -> tuple[Value, list[Value]]:
    """Record the losses of all stretches, cast to fp32; return their mean, and the casts.

    The loop has the names of the casts, and counts them: what is cut out of them is without bytes here.
    """
    tape, regime = builder.tape, builder.settings.regime
    tape.instant = "loss backward"
    cast = [builder.cast(x, 4) for x in logits]
    tape.touch(*reversed(logits), *reversed(cast))  # lists, which let go of their last items first
    several, counted = not regime.one_sequence, cast[: len(cast) - regime.empty_stretch]
    named = [_named(builder, x) for x in counted]
    rows = [*named[:-1], _without_last(builder, named[-1], several=several)] if not regime.empty_stretch else named
    with tape.alive(*rows):
        labels = [tape.make("rows of labels", tape.value(x.quantity, 1, 8)) for x in rows] if several else []
        with tape.alive(*labels):
            losses = [losses_of_rows(builder, x, labels[n : n + 1], cast[0].width) for n, x in enumerate(rows)]
            with tape.alive(*losses):
                joined = tape.value(Quantity.PREDICTED_TOKENS, 1, 4)
                tape.apply("cat", [(x, SAME) for x in losses], joined, traits=SAVES_NOTHING)
    loss = tape.value(ONE, 1, 4, part=Part.LOGITS)
    return tape.apply("sum", [(joined, NEW)], loss, traits=SAVES_NOTHING), cast


def left_by_stretch(tape: Tape) -> set[int]:
    """Return what the nodes of a stretch without labels have saved, and hold as long as its logits have a name; not what others have as attributes."""
    saved = {storage for node in tape.nodes if node.instant == EMPTY for storage in node.saved}
    return saved - {storage for node in tape.nodes for storage in node.attributes}


def _named(builder: Builder, x: Value) -> Value:
    """Return logits as the loop has them, without bytes; the gradient of these is that of what was cast."""
    view = builder.tape.value(x.quantity, 0, 4, part=Part.LOGITS)
    x.gradient_coefficient = view.gradient_coefficient = x.coefficient
    return builder.tape.apply("view", [(x, SAME)], view, traits=SAVES_NOTHING)


def _without_last(builder: Builder, x: Value, *, several: bool) -> Value:
    """Return logits without each sequence's last token, copied where there are several sequences."""
    tape, rows = builder.tape, Quantity.LAST_PREDICTED_ROWS
    cut = tape.value(rows, 0, 4, part=Part.LOGITS)
    cut.gradient_coefficient = x.gradient_coefficient
    tape.apply("slice", [(x, NEW)], cut, traits=SAVES_NOTHING)
    if not several:
        return cut
    copy = tape.value(rows, x.gradient_coefficient, 1, part=Part.LOGITS)
    return tape.apply("copy", [(cut, SAME)], copy, traits=SAVES_NOTHING)


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
