"""Cross-entropy on a tape: over logits, or by one function that forms logits tile by tile and keeps none."""

from collections.abc import Sequence

from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import TILE_TOKENS, Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Sizes, Traits, Value, Weight, summed_as_stored

TILE_COLUMNS = 32_768
"""Columns of the vocabulary in a tile of logits; its rows are :data:`Quantity.TILE_TOKENS`.

Source: ``_CHUNKED_LOGPROB_CHUNK_SIZE`` in trl/trainer/utils.py (1.16.0).
"""

TILES = "tiles of logits"
"""What the function is called that forms logits tile by tile, with the loss."""
STATISTICS_BYTES, RESULTS_BYTES = 7 * 4, 4 + 4 + 1
"""Of a token: what the tiles are folded into, and log-probability, entropy and whether the target came first."""


def cross_entropy(
    builder: Builder, logits: Value, *, shifted: bool, cut: bool = False, padded: bool = False, loss_bytes: int
) -> Value:
    """Record cross-entropy over whole logits; return the loss.

    Args:
        logits: In the dtype that the loss is formed in.
        shifted: Whether it is given a shifted copy of the labels, which is saved.
        cut: Whether it is given the logits without each row's last token; one row's labels are no copy then.
        padded: Whether the function that shifts labels pads them first, and names that copy to its end.
        loss_bytes: What the loss takes besides.
    """
    tape = builder.tape
    rows = _cut_logits(builder, logits) if cut else logits
    with tape.alive(*([rows] if cut else [])):
        copied = shifted and not (cut and builder.settings.regime.one_sequence)
        names = ("pad labels", "shift labels") if padded else ("shift labels",)
        labels = [tape.make(name, tape.value(rows.quantity, 1, 8)) for name in names] if copied else []
        with tape.alive(*labels):
            logs = builder.fresh(rows)
            tape.apply("log_softmax", [(rows, NEW)], logs, [logs])
            logs = builder.cast(logs, 4) if builder.settings.autocast else logs
            return _chosen_loss(builder, logs, labels[-1:], loss_bytes)


def _chosen_loss(builder: Builder, logs: Value, labels: Sequence[Value], loss_bytes: int) -> Value:
    """Record the mean over the log-probabilities of labels; return it."""
    tape = builder.tape
    loss = tape.value(ONE, 0, logs.element_bytes, part=Part.LOGITS)
    total = tape.value(ONE, 1, logs.element_bytes)
    traits = Traits(scratch=[(ONE, loss_bytes)])
    return tape.apply("nll_loss", [(logs, NEW)], loss, [logs, total, *labels], traits=traits)


def _cut_logits(builder: Builder, logits: Value) -> Value:
    """Return whole logits without each row's last token, which are a copy where there are several rows."""
    # Source: ``ForCausalLMLoss`` in transformers/loss/loss_utils.py, lines 32 to 48 (4.48.3).
    predicted = Quantity.PREDICTED_TOKENS
    cut = Value(logits.storage, predicted, logits.coefficient, logits.element_bytes)
    builder.tape.apply("slice", [(logits, NEW)], cut, traits=SAVES_NOTHING)
    if builder.settings.regime.one_sequence:
        return cut
    rows = builder.tape.value(predicted, logits.width, logits.element_bytes, part=Part.LOGITS)
    return builder.tape.apply("copy", [(cut, SAME)], rows, traits=SAVES_NOTHING)


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


def cross_entropy_in_pieces(builder: Builder, logits: Value, pieces: int) -> Value:
    """Record cross-entropy over logits without each sequence's last token, piece by piece of rows; return the loss.

    Backward forms a piece's gradient and lets go of what its softmax has saved; those of all pieces are joined.

    The loop that forms it has the name of the logits, and counts them; what is cut out of them is without bytes here.

    Args:
        logits: In fp32, as the model returns them.
        pieces: How many there are.

    Source:
        ``chunked_cross_entropy`` in litgpt/utils.py, lines 302 to 351, and its call in finetune/full.py, line 284 (0.5.13).
    """
    tape, predicted, several = builder.tape, Quantity.PREDICTED_TOKENS, not builder.settings.regime.one_sequence
    returned, cut = (tape.value(quantity, 0, 4, part=Part.LOGITS) for quantity in (logits.quantity, predicted))
    returned.gradient_coefficient = cut.gradient_coefficient = logits.coefficient
    tape.apply("return logits", [(logits, SAME)], returned, traits=SAVES_NOTHING)
    rows = tape.apply("slice", [(returned, NEW)], cut, traits=SAVES_NOTHING)
    if several:
        rows = tape.value(predicted, logits.width, 4, part=Part.LOGITS)
        tape.apply("copy", [(cut, SAME)], rows, traits=SAVES_NOTHING)
    labels = [tape.make("rows of labels", tape.value(predicted, 1, 8, part=Part.ACTIVATIONS))] if several else []
    with tape.alive(rows, *labels):
        quantities = [*[Quantity.CHUNK] * (pieces - 1), Quantity.LAST_CHUNK] if pieces > 1 else [predicted]
        parts = [Value(rows.storage, quantity, logits.coefficient, 4) for quantity in quantities]
        if pieces > 1:
            tape.apply("split", [(rows, NEW)], parts, traits=SAVES_NOTHING)
        losses = [losses_of_rows(builder, part, labels, logits.width) for part in (parts if pieces > 1 else [rows])]
        with tape.alive(*losses):
            joined = tape.value(predicted, 1, 4)
            tape.apply("cat", [(x, SAME) for x in losses], joined, traits=SAVES_NOTHING)
    loss = tape.value(ONE, 1, 4, part=Part.LOGITS)
    return tape.apply("sum", [(joined, NEW)], loss, traits=SAVES_NOTHING)


def losses_of_rows(builder: Builder, rows: Value, labels: Sequence[Value], vocab_size: int) -> Value:
    """Record the loss of each row of fp32 logits; return them.

    Args:
        labels: Those of the rows, where they were copied.
    """
    tape = builder.tape
    logs, losses = tape.value(rows.quantity, vocab_size, 4, part=Part.LOGITS), tape.value(rows.quantity, 1, 4)
    tape.apply("log_softmax", [(rows, NEW)], logs, [logs])
    return tape.apply("nll_loss", [(logs, NEW)], losses, [logs, *labels])


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
    tape, compute = builder.tape, builder.compute if builder.settings.under_autocast else x.element_bytes
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
        wide, stay = sums_in_fp32(x, predicted, weights)
        again, gone = _when_cast(again, vocab_size, x.width * compute) if wide else (again, [])
        traits = Traits(
            scratch=[*tile, (predicted, STATISTICS_BYTES)],
            workspace=[*wide, *again],
            custom=True,
            forms_last=bool(wide),
            gone=[*gone, *stay] if gone else [],
        )
        logs = tape.value(tokens, 0, 4, part=Part.LOGITS)
        logs.gradient_coefficient = 4
        own = [summed_as_stored(weight) for weight in weights]
        results = tape.value(tokens, RESULTS_BYTES, 1, part=Part.TEMPORARIES)
        tape.apply(TILES, [(rows, NEW)], (logs, results), [rows, labels, sums], own, traits)
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


def _when_cast(sizes: Sizes, vocab_size: int, row: int) -> tuple[Sizes, Sizes]:
    """Return what of a backward's copies is there when it casts gradients, and what has gone: of rows and stretches the last have a name still."""
    copies = [item for item in sizes if item[0] is ONE]
    rows = [(Quantity.TILE_TOKENS, row)] if any(item[0] is Quantity.NEXT_TILE_TOKENS for item in sizes) else []
    others = [item for item in sizes[: len(sizes) - len(copies)] if item not in rows or item is sizes[0]]
    stretches = sum(size for _, size in copies)
    last = min(stretches, ((vocab_size - 1) % TILE_COLUMNS + 1) * row)
    passed = [(ONE, stretches - last)] if last < stretches else []
    return [*others, *([(ONE, last)] if last else [])], [*rows, *passed]


def sums_in_fp32(x: Value, rows: Quantity, weights: Sequence[Weight]) -> tuple[Sizes, Sizes]:
    """Return the gradients in fp32 that a backward casts at its end, those of a head's weight and bias too, and those that it returns as they are."""
    trained = [weight for weight in weights if weight.trainable]
    sums = [(x.element_bytes, (rows, 4 * x.width))]
    sums += [(weight.element_bytes, (ONE, weight.own_bytes // weight.element_bytes * 4)) for weight in trained]
    return [size for width, size in sums if width != 4], [size for width, size in sums if width == 4]
