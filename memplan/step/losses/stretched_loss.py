"""LitGPT's loss with adapters: logits of one stretch of tokens after another, and then the losses of all stretches.

Source: ``GPT.forward`` with ``lm_head_chunk_size`` in litgpt/model.py, lines 170 to 181; lines 353 to 357 of litgpt/finetune/lora.py;
``chunked_cross_entropy`` in litgpt/utils.py, lines 313 to 331 (0.5.13).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memplan.errors import CannotAnswerError
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.losses.cross_entropy import PIECE_TOKENS, losses_of_rows
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Value
from memplan.units import ceil_div

STRETCH_TOKENS = 128
"""Tokens of a stretch, of each sequence (``lm_head_chunk_size`` in litgpt/finetune/lora.py, 0.5.13)."""


MOST_PIECES = {"fp32-pieces": 2**14, "fp32-stretches": 2**10}
"""More than these are not planned: operations of each are gone through, which takes seconds."""


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
    tape.touch(*logits, *cast)
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
