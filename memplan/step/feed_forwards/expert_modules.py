"""Experts that are modules of linear layers on a tape: a loop gathers the rows of each, runs it, and adds what it returns to zeros in place.

Rows are spread evenly: each expert has ``ceil(b * t * k / experts)`` of them.

Source:
    ``MixtralSparseMoeBlock.forward`` in transformers/models/mixtral/modeling_mixtral.py, and those of qwen2_moe, qwen3_moe and
    olmoe, lines 86 to 134, 605 to 649, 226 to 264 and 585 to 621 of their files (4.57.6).
"""

from typing import NamedTuple

from memplan.model.spec import MixtureOfExperts
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import TOKENS, Builder, promoted
from memplan.step.feed_forwards.feed_forward import activated
from memplan.step.feed_forwards.mixture_of_experts import flattened, normalised, shared
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, VIEW, Traits, Value

ROWS = Quantity.EXPERT_ROWS
INDEX_BYTES = 8
TOLD_FIRST, TOLD_LAST = 2, 3
"""Experts at either end of a loop whose moments are told: each between them takes as much more than the last as any other. The first
leaves names to the next, and backward sums what the last two read into a new tensor."""


class _Routed(NamedTuple):
    """What the loop over experts reads."""

    hidden: Value  # Rows of all tokens
    share: Value  # Scores of each token's experts, in the dtype of these rows
    mask: Value  # Whether a token is an expert's, for each of its choices, in 64 bits
    hit: Value | None  # The numbers of the experts that have any row, where these are asked for


class _Names(NamedTuple):
    """What an expert's turn leaves names for, until the next one has its own."""

    places: Value
    rows: Value
    scaled: Value


def expert_modules(builder: Builder, x: Value, part: MixtureOfExperts, prefix: str) -> Value:
    """Return what routed experts, and shared ones after them, add to the residual stream."""
    names, tape = builder.settings.names, builder.tape
    hidden = flattened(builder, x)
    share, chosen = _shares(builder, hidden, part, f"{prefix}.{names.router}")
    total = tape.make("zeros", builder.fresh(hidden), hidden)
    mask = tape.make("one hot", _scratch(builder, INDEX_BYTES * part.experts_per_token * part.num_experts), chosen)
    routed = _Routed(hidden, share, mask, _hit(builder, mask, part))
    last: _Names | None = None
    for expert in range(part.num_experts):
        tape.between = TOLD_FIRST <= expert < part.num_experts - TOLD_LAST
        total, last = _turn(builder, routed, total, last, part, f"{prefix}.{names.experts}.{expert}")
    if part.shared_intermediate_size:
        with tape.alive(total):
            total = builder.add(total, shared(builder, hidden, part, prefix))
    tape.touch(x, share, chosen, mask, *(() if routed.hit is None else (routed.hit,)), *(last or ()))  # as its names go
    return total


def _scratch(builder: Builder, row_bytes: int) -> Value:
    return builder.tape.value(TOKENS, row_bytes, 1, part=Part.TEMPORARIES)


def _shares(builder: Builder, hidden: Value, part: MixtureOfExperts, name: str) -> tuple[Value, Value]:
    """Return scores of the chosen experts and their numbers; the layer has a name for the router's product until it ends."""
    tape, used = builder.tape, part.experts_per_token
    logits = linear(builder, hidden, name, part.num_experts)
    builder.named_values.append(logits)
    wide = builder.cast(logits, 4)
    scores, chosen = builder.fresh(wide), tape.value(TOKENS, used, INDEX_BYTES)
    traits = Traits(workspace=[(TOKENS, scores.coefficient)])
    tape.apply("scores of experts", [(wide, NEW)], scores, [scores], traits=traits)
    share = builder.fresh(scores, used)
    tape.apply("topk", [(scores, NEW)], (share, chosen), [chosen])
    chosen.needs_gradient = False
    if part.normalised:
        share = normalised(builder, share)
    return builder.cast(share, hidden.element_bytes, foreign=hidden.foreign), chosen


def _hit(builder: Builder, mask: Value, part: MixtureOfExperts) -> Value | None:
    """Return the numbers of the experts that have rows, where the loop is over these and not over all."""
    if not builder.settings.code.loops_over_hit:
        return None
    counts = builder.tape.make("sum", builder.constant(part.num_experts, INDEX_BYTES), mask)
    some = builder.tape.make("greater", builder.constant(part.num_experts, 1), counts)
    return builder.tape.make("nonzero", builder.constant(part.num_experts, INDEX_BYTES), some)


def _turn(
    builder: Builder, routed: _Routed, total: Value, last: _Names | None, part: MixtureOfExperts, name: str
) -> tuple[Value, _Names]:
    """Return the sum with what an expert adds to its rows, and what its turn has names for."""
    tape, hidden = builder.tape, routed.hidden
    places = _places(builder, routed, part)
    tape.touch(*((last.places,) if last else ()))
    rows = _of_rows(builder, hidden.width, hidden)
    tape.apply("gather rows", [(hidden, VIEW)], rows, [places])
    tape.touch(*((last.rows,) if last else ()))
    with tape.alive(rows, places):
        out = _expert(builder, rows, part, name)
        with tape.alive(out):
            taken = _of_rows(builder, 1, routed.share)
            tape.apply("gather weights", [(routed.share, VIEW)], taken, [places])
            scaled = _weighted(builder, out, taken)
        tape.touch(*((last.scaled,) if last else ()))
        with tape.alive(scaled):
            narrow = builder.cast(scaled, hidden.element_bytes, foreign=hidden.foreign)
            added = tape.view(total)
            # derivatives.yaml (v2.13.0): the gradient of what is added is expanded to that
            tape.apply("index add", [(total, SAME), (narrow, NEW)], added, [places, narrow])
    return added, _Names(places, rows, scaled)


def _places(builder: Builder, routed: _Routed, part: MixtureOfExperts) -> Value:
    """Return which tokens are an expert's, and as which of their choices: one tensor of indices that both look at."""
    tape, reads = builder.tape, [routed.mask]
    if routed.hit is not None:  # indexed by a tensor, which copies
        reads = [tape.make("index", _scratch(builder, INDEX_BYTES * part.experts_per_token), routed.mask)]
    return tape.make("nonzero", tape.value(ROWS, 2, INDEX_BYTES), *reads)


def _of_rows(builder: Builder, width: int, like: Value) -> Value:
    """Return a tensor with ``width`` elements for each row of an expert, in the dtype of another."""
    rows = builder.tape.value(ROWS, width, like.element_bytes)
    rows.foreign, rows.flat = like.foreign, True
    return rows


def _expert(builder: Builder, rows: Value, part: MixtureOfExperts, name: str) -> Value:
    """Return what one expert makes of its rows."""
    names, inner = builder.settings.names, part.intermediate_size
    gate = activated(builder, linear(builder, rows, f"{name}.{names.gate}", inner), part.activation)
    with builder.tape.alive(rows):
        hidden = builder.multiply(gate, linear(builder, rows, f"{name}.{names.up}", inner))
        return linear(builder, hidden, f"{name}.{names.down}", rows.width)


def _weighted(builder: Builder, out: Value, taken: Value) -> Value:
    """Return each row times its score, in the wider dtype; the gradient of a narrower factor is formed wide, and cast."""
    scaled = builder.fresh(out, element_bytes=promoted(out, taken))
    formed = [(ROWS, scaled.coefficient)] * (1 + (scaled.element_bytes != out.element_bytes))
    casts = [(ROWS, out.coefficient)] if scaled.element_bytes != out.element_bytes else []
    traits = Traits(workspace=formed, casts=casts, sums_last=bool(casts))
    return builder.tape.apply("mul", [(out, NEW), (taken, NEW)], scaled, [out, taken], traits=traits)
