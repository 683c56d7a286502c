"""What distillation compares of a student and its teacher, on a tape: whole logits, or hidden states whose logits are formed tile by tile."""

from collections.abc import Sequence

from memplan.catalog.config_keys.method_keys import Divergence
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.losses.cross_entropy import TILES, sums_in_fp32
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.tape import Tape
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Sizes, Traits, Value, Weight, summed_as_stored

MASK_BYTES = 1
"""Of a token: whether it counts."""


def whole_divergence(builder: Builder, logits: Value, kind: Divergence, cached: Sequence[tuple[int, int]]) -> Value:
    """Record the divergence of a student's logits from its teacher's, of all tokens but each row's last; return the loss.

    Args:
        logits: The student's, as its model returns them.
        kind: What they are compared by.
        cached: Quantities, and the bytes for each unit of them of keys and values that the teacher returns beside its own.

    Formula:
        ``kl_div(input, target) = exp(target) * (target - input)``, of log-softmaxes of logits that are divided by the temperature.

    Source:
        ``compute_loss`` and ``generalized_jsd_loss`` in trl/experimental/gkd/gkd_trainer.py (1.16.0); ``kl_div`` in
        aten/src/ATen/native/Loss.cpp and ``logsumexp`` in ReduceOps.cpp (v2.13.0).
    """
    tape, tokens, predicted = builder.tape, Quantity.TOKENS, Quantity.PREDICTED_TOKENS
    width, size = logits.width, logits.element_bytes
    with tape.alive(logits):
        teachers = tape.make("teacher's logits", tape.value(tokens, width, size, part=Part.LOGITS))
        named = "teacher's keys and values"
        cache = [tape.make(named, tape.value(Quantity(quantity), bytes_, 1)) for quantity, bytes_ in cached]
        with tape.alive(teachers, *cache):
            rows = Value(logits.storage, predicted, logits.coefficient, size)
            tape.apply("slice", [(logits, NEW)], rows, traits=SAVES_NOTHING)

            def new(times: int = 1) -> Value:
                return tape.value(predicted, times * width, size, part=Part.LOGITS)

            own = tape.apply("divide", [(rows, NEW)], new(), traits=SAVES_NOTHING)
            others = tape.make("divide", new(), teachers)
            with tape.alive(own, others):
                logs = new()
                tape.apply("log_softmax", [(own, NEW)], logs, [logs])
                theirs = tape.make("log_softmax", new(), others)
                with tape.alive(logs, theirs):
                    return _compared(builder, logs, theirs, kind)


def _compared(builder: Builder, logs: Value, theirs: Value, kind: Divergence) -> Value:
    """Record the loss of two log-softmaxes; return it."""
    tape = builder.tape
    if kind == "forward-kl":
        return _mean(tape, _kl_to_teacher(builder, logs, theirs))
    if kind == "reverse-kl":
        return _mean(tape, _kl_of_student(builder, theirs, logs))
    mixture = _mixture(builder, logs, theirs)
    with tape.alive(mixture):
        of_teacher = _kl_to_teacher(builder, mixture, theirs)
        with tape.alive(of_teacher):
            of_student = _kl_of_student(builder, mixture, logs)
            with tape.alive(of_student):
                parts = [builder.pointwise("weigh", part) for part in (of_teacher, of_student)]
                total = builder.fresh(logs)
                tape.apply("add", [(part, SAME) for part in parts], total, traits=SAVES_NOTHING)
                return _mean(tape, total)


def _mixture(builder: Builder, logs: Value, theirs: Value) -> Value:
    """Record the log of a mixture of both distributions; return it."""
    tape, size = builder.tape, logs.element_bytes
    own, other = builder.pointwise("add", logs), builder.fresh(logs)
    with tape.alive(own):
        tape.make("add", other, theirs)
        both = tape.value(logs.quantity, 2 * logs.width, size, part=Part.LOGITS)
        tape.apply("stack", [(own, SAME)], both, traits=SAVES_NOTHING)
        tape.touch(other)
    mixture, whole = builder.fresh(logs), (both.quantity, both.coefficient)
    # backward: differences from the result and their exponentials, beside the gradient that it forms of them
    traits = Traits(workspace=[whole, whole])
    return tape.apply("logsumexp", [(both, NEW)], mixture, [both, mixture], traits=traits)


def _kl_to_teacher(builder: Builder, logs: Value, theirs: Value) -> Value:
    """Record the divergence of the teacher's distribution, whose exponentials are saved, from one that is learnt."""
    tape = builder.tape
    shares = tape.make("exp", builder.fresh(logs), theirs)
    with tape.alive(shares):
        gap = builder.pointwise("sub", logs)
        return builder.pointwise("mul", gap, (shares,))


def _kl_of_student(builder: Builder, other: Value, logs: Value) -> Value:
    """Record the divergence of the student's own distribution from another."""
    tape, shares, gap, result = builder.tape, *(builder.fresh(logs) for _ in range(3))
    tape.apply("exp", [(logs, NEW)], shares, [shares])
    tape.apply("sub", [(logs, SAME), (other, NEW)], gap, traits=SAVES_NOTHING)
    return tape.apply("mul", [(shares, NEW), (gap, NEW)], result, [shares, gap])


def _mean(tape: Tape, losses: Value) -> Value:
    """Record the mean over those that a mask chooses, as though each had a label; return it."""
    predicted = losses.quantity
    mask = tape.make("mask", tape.value(predicted, 1, MASK_BYTES))
    chosen = tape.value(predicted, losses.width, losses.element_bytes, part=Part.LOGITS)
    seen = tape.value(predicted, 0, losses.element_bytes)  # its gradient is one number, looked at for each element
    tape.apply("choose rows", [(losses, NEW)], (seen, chosen), [mask], traits=Traits(scratch=[(predicted, 16)]))
    with tape.alive(chosen):
        loss = tape.value(ONE, 0, losses.element_bytes, part=Part.LOGITS)
        return tape.apply("sum", [(seen, SAME)], loss, traits=SAVES_NOTHING)


# -------------------------------------------------------------------- hidden states, tile by tile
TILE_COLUMNS = 32_768
"""Columns of the vocabulary in a tile of either's logits in fp32 (``VOCAB_CHUNK_SIZE`` in trl/kernels/chunked_divergence.py, 1.16.0)."""
STATISTICS_BYTES = 11 * 4
"""Of a token: what tiles of both are folded into, which goes when the loss has been formed of it."""
SAVED_BYTES = 3 * 4
"""Of a token: the logs of both sums of exponentials, and the divergence that its gradient is formed with."""


def tiled_divergence(
    builder: Builder, x: Value, weights: Sequence[Weight], vocab_size: int, compared: tuple[int, int]
) -> Value:
    """Record both heads and the divergence of the tokens that were generated, tile by tile; return the loss.

    Rows of those tokens are copied out by a mask, where there are several sequences from copies that lie in order. Backward forms
    tiles of both again, those of the student in fp32, then cast, and adds up gradients in fp32, which are cast at its end.

    Args:
        weights: The student's head, and its bias where it has one.
        vocab_size: Rows of either head.
        compared: Width of the teacher's hidden states, and bytes of an element of them.

    Source:
        ``_compute_loss`` and ``_chunked_divergence_loss`` in trl/trainer/distillation_trainer.py, ``ChunkedDivergenceFunction`` in
        trl/kernels/chunked_divergence.py (1.16.0).
    """
    tape, answers, (width, size) = builder.tape, Quantity.ANSWER_TOKENS, compared
    theirs = tape.make("teacher's hidden states", tape.value(Quantity.TOKENS, width, size))
    with tape.alive(x, theirs):
        rows = Value(x.storage, answers, x.coefficient, x.element_bytes)
        tape.apply("slice", [(x, NEW)], rows, traits=SAVES_NOTHING)
        mask, copies = tape.make("mask", tape.value(answers, 1, MASK_BYTES)), []
        if not builder.settings.regime.one_sequence:
            cut, rows = rows, tape.value(answers, x.width, x.element_bytes)
            tape.apply("copy", [(cut, NEW)], rows, traits=SAVES_NOTHING)
            copies = [rows, tape.make("copy", tape.value(answers, width, size))]
        chosen = tape.value(answers, x.width, x.element_bytes)
        with tape.alive(mask, *copies):
            tape.apply("choose rows", [(rows, NEW)], chosen, [mask])
            others = tape.make("choose rows", tape.value(answers, width, size))
        with tape.alive(mask, others):
            divergence = _of_tiles(builder, chosen, others, weights, vocab_size)
    loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
    return tape.apply("mean", [(divergence, NEW)], loss, traits=SAVES_NOTHING)


def _of_tiles(builder: Builder, rows: Value, others: Value, weights: Sequence[Weight], vocab_size: int) -> Value:
    """Record the divergence of chosen rows, whose tiles of logits are there in neither direction all at once; return it."""
    tape, answers = builder.tape, Quantity.ANSWER_TOKENS
    both = (Quantity.TILE_TOKENS, 2 * 4 * TILE_COLUMNS)
    cast, gone = _cast_tiles(rows.element_bytes, vocab_size, several=builder.settings.regime.several_tiles)
    wide, stay = sums_in_fp32(rows, answers, weights)
    traits = Traits(
        scratch=[both, (answers, STATISTICS_BYTES)],
        workspace=[*wide, both, (answers, 4), *cast],
        custom=True,
        forms_last=bool(wide),
        gone=[*gone, *stay] if wide else [],
    )
    if not wide:
        traits = traits._replace(workspace=[*traits.workspace, *gone])
    divergence, saved = tape.value(answers, 1, 4, part=Part.LOGITS), tape.value(answers, SAVED_BYTES, 1)
    own = [summed_as_stored(weight) for weight in weights]
    tape.apply(TILES, [(rows, NEW)], (divergence, saved), [rows, others, saved], own, traits)
    return divergence


def _cast_tiles(size: int, vocab_size: int, *, several: bool) -> tuple[Sizes, Sizes]:
    """Return the last cast of a tile of gradients, and what there has been besides: one has its name until the next is there.

    Args:
        size: Bytes of an element of what is cast to; fp32 is not cast.
        several: Whether there is a second tile of tokens, the first being full then.
    """
    if size == 4:
        return [], []
    tile, last = Quantity.TILE_TOKENS, ((vocab_size - 1) % TILE_COLUMNS + 1) * size
    if not several:
        return [(tile, last)], [(tile, min(vocab_size, 2 * TILE_COLUMNS) * size - last)]
    following = Quantity.NEXT_TILE_TOKENS
    if vocab_size <= TILE_COLUMNS:
        return [(following, last)], [(tile, last)]
    return [(following, last)], [(tile, min(vocab_size, 2 * TILE_COLUMNS) * size), (following, -last)]
