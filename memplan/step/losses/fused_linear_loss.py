"""Head and cross-entropy as one function: over chunks of tokens with gradients made in forward, or over blocks that no tensor holds."""

from collections.abc import Sequence
from dataclasses import replace

from memplan.model.spec import ModelSpec
from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.kernels.loss_pieces import TILE_WORDS
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, OVER, SAME, SAVES_NOTHING, Sizes, Traits, Value, Weight
from memplan.units import ceil_div, round_up

PLACE_BYTES = 8
"""Of a label's place, a sum of whole numbers, which torch forms in 64 bits."""

LOCKED_COLUMNS = 64
"""Columns of a gradient that share a lock in ``cce_backward_kernel``."""


def linear_chunk(tokens: int, spec: ModelSpec) -> int:
    """Return the tokens whose logits are formed together, so that these take about as much as the head's input.

    Formula:
        the next power of two of ``ceil(n / ceil(V / h))``, at most ``n``.

    Args:
        tokens: All of them, ``n``.
        spec: The model, whose vocabulary is ``V`` and whose residual stream is ``h`` wide.

    Source:
        ``fused_linear_cross_entropy_forward`` in liger_kernel/ops/fused_linear_cross_entropy.py (0.8.5).
    """
    share = ceil_div(tokens, ceil_div(spec.vocab_size, spec.hidden_size))
    return min(1 << (share - 1).bit_length(), tokens)


def linear_cross_entropy(builder: Builder, x: Value, weights: Sequence[Weight], vocab_size: int) -> Value:
    """Record head and cross-entropy of all tokens, chunk by chunk; return the loss.

    Args:
        weights: The head's weight, and its bias where it has one.
        vocab_size: Rows of the head.

    Source:
        ``LigerForCausalLMLoss`` in liger_kernel/transformers/model/loss_utils.py, ``LigerFusedLinearCrossEntropyFunction``
        in liger_kernel/ops/fused_linear_cross_entropy.py (0.8.5), as it runs on CUDA from compute capability 8.0 on.
    """
    tape, own = builder.tape, [_as_stored(weight) for weight in weights]
    with tape.alive(x):
        padded = tape.make("pad labels", tape.value(TOKENS, 1, 8))
        shifted = tape.make("shift labels", tape.value(TOKENS, 1, 8), padded)
        losses = tape.make("losses", tape.value(TOKENS, 1 + 4, 1, part=Part.LOGITS))  # and which are no padding
        if weights[0].trainable and weights[0].element_bytes == 4:
            builder.cast_weight(weights[0])  # autocast keeps that of the weight itself, not that of its transpose
        over_input = tape.value(TOKENS, x.width, x.element_bytes, part=Part.TEMPORARIES)
        over = [tape.value(ONE, weight.own_bytes, 1, part=Part.GRADIENTS) for weight in own if weight.trainable]
        made = (over_input, *over)
        traits = Traits(packs=True, scratch=_chunk(builder, x, weights[0], vocab_size), custom=True, made=made)
        total = tape.value(ONE, 1, 4, part=Part.LOGITS)
        tape.apply("fused linear loss", [(x, OVER)], (total, *made), made, own, traits)
        tape.touch(padded, shifted, losses)
    loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
    return tape.apply("mean", [(total, SAME)], loss, traits=SAVES_NOTHING)


def cut_cross_entropy(builder: Builder, x: Value, weights: Sequence[Weight], vocab_size: int) -> Value:
    """Record head and cross-entropy whose logits are formed block by block inside of kernels; return the loss.

    The places of labels stay as long as the loss (memplan.step.head_instants.root_form), and for backward one statistic per token and per row of the head, in fp32. Backward orders the
    head's rows by theirs and forms both gradients as they are stored, each with locks, 4 bytes for each token and row.

    Args:
        x: What the head is given, in 16 bits like the head's weight.
        weights: The head's weight, and its bias where it has one.
        vocab_size: Rows of the head.

    Source:
        ``LinearCrossEntropyFunction`` in cut_cross_entropy/cce.py, ``_build_flat_valids`` in utils.py, ``cce_lse_forward_kernel``
        and ``cce_backward_kernel`` (25.1.1). The fork that axolotl 0.21.0 asks for (axolotl-ai-cloud/ml-cross-entropy 100a077)
        allocates the same but locks, h / 2048 bytes for each token and row.
    """
    tape, predicted = builder.tape, Quantity.PREDICTED_TOKENS
    if x.element_bytes != weights[0].element_bytes:
        x = builder.cast(x, weights[0].element_bytes)
    own = [_as_stored(weight) for weight in weights]
    locks = ceil_div(x.width, LOCKED_COLUMNS)
    with tape.alive(x):
        places = tape.make("labels that count", tape.value(predicted, 2, 8), scratch=[(predicted, 1)])
        narrow = tape.make("places in 32 bits", tape.value(predicted, 2, 4), places)
        flat = tape.make("places of labels", tape.value(predicted, 1, PLACE_BYTES), narrow)
        sums = tape.value(predicted, 1, 4, part=Part.LOGITS)
        means = tape.value(ONE, vocab_size, 4, part=Part.LOGITS)
        ordered = 4 * vocab_size
        workspace = [(predicted, 4), (ONE, ordered + 4 * locks * ceil_div(vocab_size, locks))]
        traits = Traits(scratch=[(predicted, 4)], workspace=workspace, custom=True)
        point, total = (tape.value(ONE, width, 4, part=Part.LOGITS) for width in (0, 1))
        tape.apply("cut cross-entropy", [(x, NEW)], point, [x, sums, means], own, traits)
        tape.apply("order of rows", [(point, NEW)], total, traits=Traits(packs=False, workspace=[(ONE, 3 * ordered)]))
        tape.touch(flat)
    loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
    return tape.apply("mean", [(total, SAME)], loss, traits=SAVES_NOTHING)


def _chunk(builder: Builder, x: Value, weight: Weight, vocab_size: int) -> Sizes:
    """Return what one chunk takes: its logits; copies of its rows and of the head where autocast casts; the head's gradient in fp32.

    A gradient in 16 bits, or of logits in 16 bits, is added to where it is.
    """
    compute = builder.compute if builder.settings.autocast else x.element_bytes
    logits = [(Quantity.CHUNK, vocab_size * compute)]
    if x.element_bytes == weight.element_bytes == compute:
        again = weight.own_bytes if weight.trainable and compute == 4 else 0
        return [*logits, (ONE, again)]
    cast = weight.rows * weight.columns * compute if weight.element_bytes != compute else 0
    return [*logits, (Quantity.CHUNK, x.width * compute), (ONE, cast)]


def _as_stored(weight: Weight) -> Weight:
    """Return a weight whose gradient is formed in its own dtype."""
    formed = weight.own_bytes if weight.trainable else 0
    return replace(
        weight, copy_bytes=0, copy_saved=False, formed_bytes=formed, converted=weight.gradient_bytes != formed
    )


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
        traits = Traits(scratch=sizes, custom=True)
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
