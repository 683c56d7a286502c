"""Head and cross-entropy as one function that has logits in fp32, of some tokens at a time, and forms the input's gradient in forward."""

from __future__ import annotations

from memplan.step.blocks.builder import Builder
from memplan.step.kernels.loss_pieces import TILE_WORDS
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Sizes, Traits, Value
from memplan.units import ceil_div, round_up

LISTS = 8
"""Statistics of each token and tile of words."""


def tiled_linear_cross_entropy(builder: Builder, x: Value, vocab_size: int) -> Value:
    """Record head and cross-entropy over a frozen head; return the loss, whose backward scales what forward has formed.

    Args:
        builder: Writes on the tape.
        x: What the head is given, in 16 bits.
        vocab_size: Rows of the head.
    """
    tape = builder.tape
    with tape.alive(x):
        formed = builder.fresh(x)
        total = tape.value(Quantity.ONE, 1, 4, part=Part.LOGITS)
        sizes = _pieces(x, vocab_size, whole=builder.settings.regime.all_words)
        traits = Traits(packs=True, scratch=sizes, custom=True)
        tape.apply("tiled linear loss", [(x, NEW)], (total, formed), [formed], traits=traits)
    loss = tape.value(Quantity.ONE, 0, 4, part=Part.LOGITS)
    return tape.apply("mean", [(total, SAME)], loss, traits=SAVES_NOTHING)


def _pieces(x: Value, vocab_size: int, *, whole: bool) -> Sizes:
    """Return what pieces take: logits in fp32; a copy of rows, their gradient in fp32 and, of all words, cast; labels, places."""
    row = x.width
    words = round_up(vocab_size, 8) if whole else TILE_WORDS
    statistics = 4 if whole else 12 + 4 * LISTS * ceil_div(vocab_size, TILE_WORDS)
    gradients = row * (4 + x.element_bytes) if whole else 4 * row
    return [
        (Quantity.CHUNK, 4 * words),
        (Quantity.CHUNK, gradients + row * x.element_bytes + statistics),
        (Quantity.NEXT_CHUNK, row * x.element_bytes),
        (Quantity.TOKENS, 8 + 8 + 1),
        (Quantity.PREDICTED_TOKENS, 8 + 4 + (0 if whole else 4)),
    ]
