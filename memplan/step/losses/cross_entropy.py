"""Cross-entropy on a tape: over logits, or by one function that forms logits tile by tile and keeps none."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import TILE_TOKENS, Part, Quantity
from memplan.step.tapes.taped_operations import NEW, OVER, SAME, SAVES_NOTHING, Sizes, Traits, Value
from memplan.step.tapes.taped_weight import Weight, summed_as_stored

TILE_COLUMNS = 32_768
"""Columns of the vocabulary in a tile of logits; its rows are :data:`Quantity.TILE_TOKENS`.

Source: ``_CHUNKED_LOGPROB_CHUNK_SIZE`` in trl/trainer/utils.py (1.16.0).
"""

STATISTICS_BYTES, RESULTS_BYTES = 7 * 4, 4 + 4 + 1
"""Of a token: what the tiles are folded into, and log-probability, entropy and whether the target came first."""


def cross_entropy(builder: Builder, logits: Value, *, shifted: bool, loss_bytes: int) -> Value:
    """Record cross-entropy over whole logits; return the loss.

    Args:
        logits: In the dtype that the loss is formed in.
        shifted: Whether it is given a shifted copy of the labels, which is saved.
        loss_bytes: What the loss takes besides.
    """
    tape = builder.tape
    labels = [tape.make("shift labels", tape.value(logits.quantity, 1, 8))] if shifted else []
    logs = builder.fresh(logits)
    tape.apply("log_softmax", [(logits, NEW)], logs, [logs])
    logs = builder.cast(logs, 4) if builder.settings.autocast else logs
    loss = tape.value(ONE, 0, logs.element_bytes, part=Part.LOGITS)
    total = tape.value(ONE, 1, logs.element_bytes)
    traits = Traits(scratch=[(ONE, loss_bytes)])
    return tape.apply("nll_loss", [(logs, NEW)], loss, [logs, total, *labels], traits=traits)


COMPILED = "compiled loss"
"""What cross-entropy is called that torch compiles by itself."""


def compiled_cross_entropy(builder: Builder, logits: Value, *, named: bool) -> Value:
    """Record cross-entropy that torch compiles by itself; return the loss.

    It saves the logits as they are and two numbers of each row, its highest and the log of its sum; backward writes their
    gradient in their dtype.

    Args:
        named: Whether the loop has a name for the logits throughout, and counts them.

    Source:
        ``memplan trace MODEL --stack torchtitan --set compile=layers``: the programs that Inductor writes for it (torch 2.13.0).
    """
    tape = builder.tape
    loss, rows = tape.value(ONE, 1, 4, part=Part.LOGITS), tape.value(logits.quantity, 2, 4)
    return tape.apply(COMPILED, [(logits, NEW)], (loss, rows), [*(() if named else (logits,)), rows])


PIECE_TOKENS = 128
"""Tokens whose loss is formed together (``chunk_size`` of ``chunked_cross_entropy`` in litgpt/utils.py, 0.5.13)."""


def cross_entropy_in_pieces(builder: Builder, logits: Value) -> Value:
    """Record cross-entropy over logits without each sequence's last token, piece by piece of rows; return the loss.

    Backward forms a piece's gradient beside what its softmax has saved, which is let go then; those of all pieces are joined.

    The loop that forms it has the name of the logits, and counts them; what is cut out of them is without bytes here.

    Args:
        logits: In fp32, as the model returns them.

    Source:
        ``chunked_cross_entropy`` in litgpt/utils.py, lines 302 to 351, and its call in finetune/full.py, line 284 (0.5.13).
    """
    tape, predicted, several = builder.tape, Quantity.PREDICTED_TOKENS, not builder.settings.regime.one_sequence
    piece = (Quantity.CHUNK, 2 * logits.width * 4)
    returned, cut = (tape.value(quantity, 0, 4, part=Part.LOGITS) for quantity in (logits.quantity, predicted))
    returned.gradient_coefficient = cut.gradient_coefficient = logits.coefficient
    tape.apply("return logits", [(logits, SAME)], returned, traits=SAVES_NOTHING)
    rows = tape.apply("slice", [(returned, NEW)], cut, traits=SAVES_NOTHING)
    if several:
        rows = tape.value(predicted, logits.width, 4, part=Part.LOGITS)
        tape.apply("copy", [(cut, SAME)], rows, traits=SAVES_NOTHING)
    labels = tape.make("rows of labels", tape.value(predicted, 1, 8, part=Part.ACTIVATIONS))
    parts = Value(rows.storage, predicted, logits.coefficient, 4)
    with tape.alive(rows):
        tape.apply("split", [(rows, NEW)], parts, traits=SAVES_NOTHING)
        logs, losses = tape.value(predicted, logits.width, 4, part=Part.LOGITS), tape.value(predicted, 1, 4)
        traits = Traits(workspace=[piece], made=(logs,))
        tape.apply(
            "losses of pieces", [(parts, OVER)], (losses, logs), [logs, *([labels] if several else [])], traits=traits
        )
        with tape.alive(losses):
            joined = tape.apply("cat", [(losses, SAME)], builder.fresh(losses), traits=SAVES_NOTHING)
    loss = tape.value(ONE, 1, 4, part=Part.LOGITS)
    return tape.apply("sum", [(joined, NEW)], loss, traits=SAVES_NOTHING)


def tiled_cross_entropy(
    builder: Builder, x: Value, weights: Sequence[Weight], vocab_size: int, *, answers: bool
) -> Value:
    """Record head and cross-entropy of the tokens that have a next one, tile by tile; return the loss.

    Those tokens are copied out by a mask, as though each had a label. Backward forms each tile again and adds up
    gradients in fp32, which are cast at its end.

    Args:
        weights: The head's weight, and its bias where it has one.
        vocab_size: Rows of the head.
        answers: Whether only the tokens that were generated have labels, whose log-probabilities a policy's loss compares.

    Source:
        ``add_fused_lm_head`` in trl/trainer/utils.py and ``ChunkedLogProbFunction`` in trl/kernels/chunked_logprob.py
        (1.16.0).
    """
    tape, compute = builder.tape, builder.compute if builder.settings.autocast else x.element_bytes
    tokens = Quantity.PREDICTED_TOKENS
    predicted = Quantity.ANSWER_TOKENS if answers else tokens
    with tape.alive(x):
        cut = Value(x.storage, tokens, x.coefficient, x.element_bytes)
        tape.apply("slice", [(x, NEW)], cut, traits=SAVES_NOTHING)
        mask = tape.value(tokens, 1, 1)
        rows = tape.value(predicted, x.width, x.element_bytes)
        tape.apply("choose rows", [(cut, NEW)], (rows, mask), [mask])
        labels, sums = tape.make("choose labels", tape.value(predicted, 1, 8)), tape.value(predicted, 2, 4)
        several = builder.settings.regime.several_tiles
        tile, again = (
            _tile(x, weights[0], compute, vocab_size, several=several, backward=backward) for backward in (False, True)
        )
        wide = [(predicted, 4 * x.width)] if x.element_bytes != 4 else []
        traits = Traits(
            scratch=[*tile, (predicted, STATISTICS_BYTES)],
            workspace=[*wide, *_wide_weight(weights[0]), *again],
            custom=True,
            forms_last=bool(wide),
        )
        logs = tape.value(tokens, 0, 4, part=Part.LOGITS)
        logs.gradient_coefficient = 4
        own = [summed_as_stored(weight) for weight in weights]
        results = tape.value(tokens, RESULTS_BYTES, 1, part=Part.TEMPORARIES)
        tape.apply("tiles of logits", [(rows, NEW)], (logs, results), [rows, labels, sums], own, traits)
    loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
    return tape.apply("mean", [(logs, NEW)], loss, traits=SAVES_NOTHING)


def _tile(x: Value, weight: Weight, compute: int, vocab_size: int, *, several: bool, backward: bool) -> Sizes:
    """Return a tile of logits, and the copies that are made to form it of rows and of stretches of the head in another dtype.

    In backward a stretch has a name until the next one has been copied, and so has a tile's rows in either direction.

    Args:
        compute: Bytes of an element in products.
        vocab_size: Rows of the head.
        several: Whether there is a second tile of tokens, the first being full then.
        backward: Whether gradients are formed.
    """
    row, casts_rows = x.width * compute, x.element_bytes != compute
    sizes = [(Quantity.TILE_TOKENS, TILE_COLUMNS * compute)]
    if casts_rows:
        sizes.append((Quantity.TILE_TOKENS, row))
    if weight.element_bytes == compute:
        return [*sizes, (Quantity.NEXT_TILE_TOKENS, row)] if casts_rows and several else sizes
    if several and backward and vocab_size <= TILE_COLUMNS:  # one stretch, copied again for the next tile
        if not casts_rows:
            return [*sizes, (ONE, vocab_size * row), (ONE, vocab_size * row)]
        # Either the rows of both tiles beside the stretch, or those of the second beside it twice.
        more = max(0, vocab_size - TILE_TOKENS)
        return [*sizes, (Quantity.NEXT_TILE_TOKENS, row), (ONE, vocab_size * row), (ONE, more * row)]
    starts = range(0, min((1 + backward) * TILE_COLUMNS, vocab_size), TILE_COLUMNS)
    return [*sizes, *((ONE, min(TILE_COLUMNS, vocab_size - start) * row) for start in starts)]


def _wide_weight(weight: Weight) -> Sizes:
    """Return the head's gradient in fp32 that another is cast from."""
    elements = weight.rows * weight.columns
    return [(ONE, 4 * elements)] if weight.trainable and weight.element_bytes != 4 else []


STRETCH_TOKENS = 128
"""Tokens of a stretch (``lm_head_chunk_size`` in litgpt/finetune/lora.py, 0.5.13)."""

STRETCH = Quantity.ROW_CHUNK
"""Tokens of a stretch, of all sequences."""


def stretched_logits(builder: Builder, x: Value, name: str, vocab_size: int) -> Value:
    """Return the logits of all stretches of ``x``, which is split, in the dtype of products.

    What all stretches have at once is on the tape whole; what one of them takes for itself, the first that backward
    reaches, is scratch memory.

    Source:
        ``GPT.forward`` with ``lm_head_chunk_size`` in litgpt/model.py; ``LoRALinear.forward`` in litgpt/lora.py (0.5.13).
    """
    tape, weight = builder.tape, builder.weight(f"{name}.weight")
    piece = Value(x.storage, STRETCH, x.coefficient, x.element_bytes)
    rest = [(Quantity.TOKENS, x.coefficient), (STRETCH, -x.coefficient)]
    with tape.alive(x):
        tape.apply("split", [(x, NEW)], piece, traits=Traits(packs=False, workspace=rest))
        logits = tape.value(x.quantity, vocab_size, builder.compute, part=Part.LOGITS)
        biases = [builder.weights[f"{name}.bias"]] if f"{name}.bias" in builder.weights else []
        read = builder.lowered(piece)
        saves = _copies(builder, weight) if read.needs_gradient else []
        if weight.coded:  # the last stretch's product decodes the weight beside the logits of all others
            saved = _saved_width(builder, x) if f"{name}.lora_A.weight" in builder.weights else 0
            others = logits.coefficient + saved
            decoding = [(quantity, size) for _, quantity, size in weight.decoding_again]
            scratch = [
                (Quantity.TOKENS, others),
                (Quantity.LAST_ROW_CHUNK, -others),
                (ONE, weight.copy_bytes),
                *decoding,
            ]
            tape.make("decode", builder.constant(0, 1), x, scratch=scratch)
        traits = Traits(custom=weight.coded, product=True, packs=not weight.coded)
        base = tape.view(logits)
        tape.apply(f"linear {name}", [(read, NEW)], base, saves, [weight, *biases], traits)
        if f"{name}.lora_A.weight" not in builder.weights:
            return base
        low, up = _low_rank(builder, piece, x, name), builder.weight(f"{name}.lora_B.weight")
        added, one = tape.value(x.quantity, 0, logits.element_bytes, part=Part.LOGITS), (STRETCH, logits.coefficient)
        traits = Traits(workspace=[one], product=True)
        tape.apply(f"linear {name}.lora_B", [(low, NEW)], added, [low, *_copies(builder, up)], [up], traits)
        traits = Traits(packs=False, scratch=[one, one])
        return tape.apply("stretches", [(base, SAME), (added, SAME)], tape.view(logits), traits=traits)


def _saved_width(builder: Builder, x: Value) -> int:
    """Return the bytes of a token that an adapter of the head saves of its input: a dropped copy and a mask, or nothing new."""
    return x.width * (x.element_bytes + 1) if builder.settings.adapter_dropout else 0


def _copies(builder: Builder, weight: Weight) -> list[Value]:
    """Return what autocast makes of a weight for each stretch: none is a parameter itself, or it is frozen."""
    if weight.coded or not weight.copy_bytes:
        return []
    return [builder.tape.make("cast weight", builder.tape.value(Quantity.ROW_CHUNKS, weight.copy_bytes, 1))]


def _low_rank(builder: Builder, piece: Value, x: Value, name: str) -> Value:
    """Return the product of dropped stretches and an adapter's first matrix, which saves what it is given of all."""
    tape, down, read = builder.tape, builder.weight(f"{name}.lora_A.weight"), piece
    if builder.settings.adapter_dropout:
        mask, retained = tape.value(x.quantity, x.width, 1), tape.value(x.quantity, x.width, x.element_bytes)
        read = Value(retained.storage, STRETCH, retained.coefficient, retained.element_bytes)
        tape.apply("dropout", [(piece, NEW)], (read, mask), [mask])
    if read.element_bytes != builder.compute and builder.settings.autocast:
        given, retained = read, tape.value(x.quantity, x.width, builder.compute)
        read = Value(retained.storage, STRETCH, retained.coefficient, retained.element_bytes)
        tape.apply("cast", [(given, NEW)], read, traits=SAVES_NOTHING)
    low = tape.value(x.quantity, down.rows, builder.compute)
    result = Value(low.storage, STRETCH, low.coefficient, low.element_bytes)
    saves = [read, *(_copies(builder, down) if read.needs_gradient else [])]
    return tape.apply(f"linear {name}.lora_A", [(read, NEW)], result, saves, [down], Traits(product=True))


def stretched_cross_entropy(builder: Builder, logits: Value) -> tuple[Value, Value]:
    """Record cross-entropy over logits cast to fp32, without each sequence's last token; return the loss, and the cast.

    The loop has the name of the cast, and counts it. Backward runs the losses of all stretches before it casts any gradient: half of what softmax has saved stands for the
    gradient in 16 bits that takes its place.

    Source:
        ``chunked_cross_entropy`` in litgpt/utils.py, lines 319 to 335; lines 353 to 357 of litgpt/finetune/lora.py (0.5.13).
    """
    tape, several, regime = builder.tape, not builder.settings.regime.one_sequence, builder.settings.regime
    predicted, width = Quantity.PREDICTED_TOKENS, logits.width
    wide = logits.element_bytes == 4
    returned = logits if wide else tape.make("cast", tape.value(logits.quantity, width, 4, part=Part.LOGITS), logits)
    cut = tape.value(predicted, 0, logits.element_bytes, part=Part.LOGITS)
    joins = Traits(packs=False, workspace=[(predicted, -4 * width)]) if wide else SAVES_NOTHING  # one after another
    tape.apply("stretches", [(logits, NEW)], cut, traits=joins)
    labels = tape.make("rows of labels", tape.value(predicted, 1, 8, part=Part.ACTIVATIONS))
    half, rest = (
        tape.value(predicted, width, size, part=Part.LOGITS)
        for size in (logits.element_bytes, 4 - logits.element_bytes)
    )
    losses = tape.value(predicted, 1, 4)
    one = (predicted if regime.one_chunk else STRETCH, 2 * width * 4)
    copies = [(Quantity.LAST_ROW_CHUNK, width * 4)] if several else []
    traits = Traits(workspace=[one], scratch=copies, made=(half,))
    saves = [half, rest, *([labels] if several else [])]
    tape.apply("losses of stretches", [(cut, OVER)], (losses, half, rest), saves, traits=traits)
    with tape.alive(losses):
        joined = tape.apply("cat", [(losses, SAME)], builder.fresh(losses), traits=SAVES_NOTHING)
    loss = tape.value(ONE, 1, 4, part=Part.LOGITS)
    return tape.apply("sum", [(joined, NEW)], loss, traits=SAVES_NOTHING), returned
