"""What several GPUs share on the tape of one of them: embedding and cross-entropy over a part of the words, and experts' rows.

Source:
    ``Embedding.forward`` in torchtitan/models/common/embedding.py; ``_LossParallelCrossEntropy`` in
    torchtitan/components/loss.py; ``AllToAllTokenDispatcher`` in torchtitan/models/common/token_dispatcher.py (0.3.0).
"""

from memplan.model.spec import MixtureOfExperts
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value, Weight

INDEX_BYTES = 8


def dispatched(builder: Builder, rows: Value, counts: Value, part: MixtureOfExperts) -> tuple[Value, Value, Value]:
    """Return the rows of a rank's own experts, expert by expert, the places that they came in, and how many each has.

    Args:
        rows: The rank's own, sorted by expert.
        counts: How many each of all experts has.
    """
    tape, experts, width = builder.tape, part.num_experts, rows.width // part.experts_per_token
    with tape.alive(rows):
        each = tape.make("exchange of counts", _counts(builder, experts), counts, product=True)
        with tape.alive(each):
            received = tape.apply(
                "exchange of rows", [(rows, NEW)], builder.fresh(rows, width * part.rows_per_token), traits=_EXCHANGE
            )
            with tape.alive(received):
                places, own = _places(builder, each, part)
                arranged = tape.apply("rows by expert", [(received, NEW)], builder.fresh(received), [places])
                return arranged, places, own


def _places(builder: Builder, each: Value, part: MixtureOfExperts) -> tuple[Value, Value]:
    """Return where each row of the own experts lies in what was received, and how many rows each expert has."""
    tape, experts, used = builder.tape, part.num_experts, part.rows_per_token
    lengths = tape.make("lengths", _counts(builder, experts), each)
    starts = tape.make("starts", _counts(builder, experts), each, scratch=[(ONE, experts * INDEX_BYTES)])
    segments = tape.make(
        "segments", _indices(builder, used), lengths, scratch=[(builder.settings.stream, used * INDEX_BYTES)]
    )
    with tape.alive(lengths, starts, segments):
        ends = tape.make("ends", _counts(builder, experts), lengths)
        with tape.alive(ends):
            first = tape.make(
                "first", _indices(builder, used), starts, scratch=[(builder.settings.stream, 2 * used * INDEX_BYTES)]
            )
            with tape.alive(first):
                places = tape.make(
                    "places",
                    _indices(builder, used),
                    ends,
                    segments,
                    scratch=[(builder.settings.stream, used * INDEX_BYTES)],
                )
            own = tape.make("rows of each expert", _counts(builder, part.own_experts), each)
    return places, own


def returned(builder: Builder, out: Value, places: Value, part: MixtureOfExperts) -> Value:
    """Return what experts made of a rank's own rows, in the order in which they were sent."""
    tape = builder.tape
    rows = tape.apply("rows by rank", [(out, NEW)], builder.fresh(out), [places])
    own = builder.fresh(rows, rows.width // part.rows_per_token * part.experts_per_token)
    return tape.apply("exchange of results", [(rows, NEW)], own, traits=_EXCHANGE)


_EXCHANGE = Traits(packs=False, product=True, own_workspace=True)


def _counts(builder: Builder, number: int) -> Value:
    return builder.tape.value(ONE, number, INDEX_BYTES, part=Part.TEMPORARIES)


def _indices(builder: Builder, used: int) -> Value:
    return builder.tape.value(builder.settings.stream, used, INDEX_BYTES)


FORWARD_BYTES, BACKWARD_BYTES = 38, 33
"""Of a token, beside logits: maximum and sum, labels of this rank, which of them are none of its own, and its part of the loss."""


def divided_embedding(builder: Builder, weight: Weight, traits: Traits) -> Value:
    """Return rows of the embedding that a rank has, zeros for others, summed over ranks.

    Args:
        weight: The rank's rows.
    """
    tape, block = builder.tape, builder.settings
    mask = tape.make("mask", tape.value(TOKENS, 1, 1), scratch=[(TOKENS, 2)])
    rows = tape.make("rows of this rank", tape.value(TOKENS, 1, 8), scratch=[(TOKENS, 8)])
    with tape.alive(mask, rows):
        x = tape.value(TOKENS, block.hidden_size, block.residual_bytes)
        tape.apply("embedding", [], x, [rows], [weight], traits)
        with tape.alive(x):
            factor = tape.make("cast mask", tape.value(TOKENS, 1, block.residual_bytes), mask)
            x = tape.apply("mul mask", [(x, NEW)], builder.fresh(x), [factor])
    return summed(builder, x)


def divided_cross_entropy(builder: Builder, logits: Value, loss_bytes: int) -> Value:
    """Record cross-entropy over a rank's columns of the logits in fp32, by one function; return the loss.

    Args:
        logits: The rank's columns.
        loss_bytes: What the loss takes besides.
    """
    tape, size = builder.tape, logits.coefficient
    shifted = tape.make("shifted", builder.fresh(logits), logits, scratch=[(logits.quantity, size)])
    logs = builder.fresh(logits)
    loss = tape.value(ONE, 0, 4, part=Part.LOGITS)
    traits = Traits(
        scratch=[(logits.quantity, FORWARD_BYTES), (ONE, loss_bytes)],
        workspace=[(logits.quantity, size), (logits.quantity, size), (logits.quantity, BACKWARD_BYTES)],
        used_up=[(logits.quantity, size)],
        custom=True,
        forms_last=True,
    )
    with tape.alive(shifted):
        tape.apply("log_softmax", [(logits, NEW)], (loss, logs), [logs], traits=traits)
    return loss


def whole_rows(builder: Builder, x: Value) -> Value:
    """Return ``x`` as each rank's columns are multiplied with it: gathered along the sequence; its gradient is summed over ranks."""
    tape, settings = builder.tape, builder.settings
    if not settings.divided:
        return x
    if not settings.sequence:
        return tape.apply("all-reduce", [(x, NEW)], tape.view(x), traits=SAVES_NOTHING)
    rows = tape.value(TOKENS, x.width, x.element_bytes)
    copy = [(TOKENS, rows.coefficient)]
    gathered = [] if settings.regime.one_sequence else copy
    traits = Traits(packs=False, scratch=gathered, workspace=copy, makes_last=True, forms_last=True)
    return tape.apply("all-gather", [(x, NEW)], rows, traits=traits)


def row_product(builder: Builder, x: Value, name: str, rows: int) -> Value:
    """Return a projection of ``x``, of which each rank has a share of the columns: the sum over ranks, or a rank's part of it."""
    if not builder.settings.divided:
        return linear(builder, x, name, rows)
    with builder.tape.alive(x):
        return summed(builder, linear(builder, x, name, rows))


def summed(builder: Builder, x: Value) -> Value:
    """Return the sum of what ranks have, or a rank's part of the sequence of it."""
    tape, settings = builder.tape, builder.settings
    if not settings.sequence:
        return tape.apply("all-reduce", [(x, SAME)], builder.fresh(x), traits=SAVES_NOTHING)
    out = tape.value(settings.stream, x.width, x.element_bytes)
    copy = [(TOKENS, x.coefficient)]
    gathered = [] if settings.regime.one_sequence else copy
    traits = Traits(
        packs=False,
        scratch=copy,
        workspace=gathered,
        product=True,
        own_workspace=True,
        makes_last=True,
        forms_last=True,
    )
    return tape.apply("reduce-scatter", [(x, NEW)], out, traits=traits)
