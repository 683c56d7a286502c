"""Products whose matrix several GPUs share, on the tape of one of them, and what passes between them around these.

DTensor keeps the whole rows that columns' shares are multiplied with, also where ranks share the sequence; what row shares
yield is a sum still to be formed. Along the sequence, what is scattered is copied before, and what is gathered after, but of one
sequence alone: ranks lie one after another in a buffer, and not within each sequence.

Source:
    ``all_gather_single``, ``reduce_scatter_single`` and ``all_reduce`` in torch/distributed/_functional_collectives.py,
    ``_maybe_view_chunk_cat`` in torch/_utils.py (v2.13.0); what is divided how: torchtitan/models/common/decoder_sharding.py
    (0.3.0).
"""

from __future__ import annotations

from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value


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
    return tape.apply("all-gather", [(x, NEW)], rows, traits=Traits(packs=False, scratch=gathered, workspace=copy))


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
    traits = Traits(packs=False, scratch=copy, workspace=gathered, product=True)
    return tape.apply("reduce-scatter", [(x, NEW)], out, traits=traits)
