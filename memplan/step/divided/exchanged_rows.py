"""Rows that GPUs which share experts exchange, on the tape of one of them: to those that have a row's experts, and back.

Source:
    ``AllToAllTokenDispatcher`` in torchtitan/models/common/token_dispatcher.py (0.3.0).
"""

from __future__ import annotations

from memplan.model.spec import MixtureOfExperts
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, Traits, Value

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


_EXCHANGE = Traits(packs=False, product=True)


def _counts(builder: Builder, number: int) -> Value:
    return builder.tape.value(ONE, number, INDEX_BYTES, part=Part.TEMPORARIES)


def _indices(builder: Builder, used: int) -> Value:
    return builder.tape.value(builder.settings.stream, used, INDEX_BYTES)
