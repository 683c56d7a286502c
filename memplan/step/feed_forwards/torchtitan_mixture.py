"""torchtitan's mixtures of experts on a tape: a router in fp32, rows sorted by expert, grouped products, rows added up in place.

Stacked experts have a tensor for gate, up and down each. Selective checkpointing keeps what the choice of experts returns, and
neither the router's product nor grouped ones.

Source:
    ``TokenChoiceTopKRouter``, ``GroupedExperts``, ``RoutedExperts`` and ``MoE`` in torchtitan/models/common/moe.py,
    ``LocalTokenDispatcher`` in token_dispatcher.py, ``SelectiveAC`` in distributed/activation_checkpoint.py (0.3.0).
"""

from memplan.model.spec import MixtureOfExperts
from memplan.step.blocks.builder import ONE, Builder
from memplan.step.divided.shared_ends_and_rows import dispatched, returned
from memplan.step.feed_forwards.feed_forward import activated
from memplan.step.feed_forwards.grouped_products import aligned, row_bytes
from memplan.step.feed_forwards.mixture_of_experts import normalised
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, SAVES_NOTHING, VIEW, Traits, Value


def torchtitan_mixture(builder: Builder, x: Value, part: MixtureOfExperts, prefix: str) -> Value:
    """Return what routed experts add to the residual stream, as ``MoE.forward`` does."""
    names, tape = builder.settings.names, builder.tape
    with tape.alive(x):
        scores, share, chosen = _routed(builder, x, part, f"{prefix}.{names.router}")
        with tape.alive(scores, share, chosen):
            places = tape.make("routing map", tape.value(builder.settings.stream, part.num_experts, 1), scores, chosen)
            counts = tape.make("tokens per expert", builder.constant(part.num_experts, 8), places)
            with tape.alive(places, counts):
                return _experts(builder, x, share, chosen, counts, part, f"{prefix}.{names.experts}")


def _routed(builder: Builder, x: Value, part: MixtureOfExperts, name: str) -> tuple[Value, Value, Value]:
    """Return all scores in fp32, those of the chosen experts, and their numbers."""
    tape, used = builder.tape, part.experts_per_token
    logits = _logits(builder, x, part.num_experts, name)
    scores = builder.fresh(logits)
    tape.apply("scores of experts", [(logits, NEW)], scores, [scores])
    with tape.alive(scores):
        choice = tape.make(
            "add bias", tape.value(builder.settings.stream, part.num_experts, 4, part=Part.TEMPORARIES), scores
        )
        best, chosen = tape.value(builder.settings.stream, used, 4, part=Part.TEMPORARIES), _indices(builder, used)
        tape.make("topk", best, choice, product=True)
        tape.make("topk", chosen, choice, product=True)
        with tape.alive(choice, best, chosen):
            share = tape.apply("gather", [(scores, NEW)], builder.fresh(scores, used), [chosen])
            if part.normalised:
                share = normalised(builder, share, shifted=True)
            return scores, builder.pointwise("scale", share), chosen


def _logits(builder: Builder, x: Value, experts: int, name: str) -> Value:
    """Return the router's product, which a region of autocast to fp32 forms of copies that it saves."""
    tape, weight = builder.tape, builder.weight(f"{name}.weight")
    wide = builder.cast(x, 4)
    copies = []
    if weight.element_bytes < 4:
        copies = [tape.make("cast weight", builder.constant(experts * builder.settings.hidden_size, 4))]
    out = tape.value(builder.settings.stream, experts, 4)
    tape.apply(f"linear {name}", [(wide, VIEW)], out, [wide, *copies], [weight])
    tape.touch(*copies)
    return out


def _indices(builder: Builder, width: int) -> Value:
    return builder.tape.value(builder.settings.stream, width, 8)


def _experts(
    builder: Builder, x: Value, share: Value, chosen: Value, counts: Value, part: MixtureOfExperts, name: str
) -> Value:
    """Return the weighted sum of the chosen experts, as ``RoutedExperts.forward`` does."""
    tape, used = builder.tape, part.experts_per_token
    order = tape.make("sort", _indices(builder, used), chosen, scratch=[(builder.settings.stream, chosen.coefficient)])
    taken = tape.apply("gather weights", [(share, NEW)], builder.fresh(share), [order])
    places = tape.make("order // used", _indices(builder, used), order)
    rows = tape.apply("gather rows", [(x, NEW)], builder.fresh(x, x.width * used), [places])
    with tape.alive(taken, places):
        if part.ranks == 1:
            with tape.alive(rows):
                out = _inner(builder, rows, counts, part, name)
                with tape.alive(out):
                    return _combined(builder, out, taken, places, x)
        rows, came_from, counts = dispatched(builder, rows, counts, part)
        with tape.alive(rows, came_from, counts):
            out = _inner(builder, rows, counts, part, name)
            with tape.alive(out):
                return _combined(builder, returned(builder, out, came_from, part), taken, places, x)


def _inner(builder: Builder, rows: Value, counts: Value, part: MixtureOfExperts, name: str) -> Value:
    """Return what the experts make of their rows, as ``GroupedExperts.forward`` does."""
    tape, used = builder.tape, part.rows_per_token
    offsets = tape.make("cumsum", tape.value(ONE, part.own_experts, 4), counts)
    with tape.alive(offsets):
        inner = part.intermediate_size * used
        hidden = activated(builder, _grouped(builder, rows, f"{name}.gate_proj", inner, used, offsets))
        with tape.alive(hidden):
            up = _grouped(builder, rows, f"{name}.up_proj", inner, used, offsets)
            hidden = builder.multiply(hidden, up)
        with tape.alive(hidden):
            return _grouped(builder, hidden, f"{name}.down_proj", rows.width, used, offsets)


def _grouped(builder: Builder, rows: Value, name: str, width: int, used: int, offsets: Value) -> Value:
    """Return each row times the matrix of its expert."""
    tape, weight = builder.tape, builder.weight(name)
    out = aligned(builder, tape.value(builder.settings.stream, width, builder.compute), used)
    rows.gradient_coefficient = used * row_bytes(rows, used)
    return tape.apply(f"grouped {name}", [(rows, NEW)], out, [offsets, rows], [weight])


def _combined(builder: Builder, out: Value, taken: Value, places: Value, x: Value) -> Value:
    """Return the experts' rows, weighted in fp32 and cast back, added to zeros: a function written in Python.

    It adds in a fixed order, for which CUDA sorts the rows' numbers and no more, since one number stands for a whole row.
    """
    # Source: ``deterministic_scatter_add`` in torchtitan/ops/scatter_add.py (0.3.0); ``_scatter_via_index_put`` in
    # aten/src/ATen/native/TensorAdvancedIndexing.cpp (v2.13.0).
    tape = builder.tape
    zeros = tape.make("zeros", builder.fresh(x), x)
    with tape.alive(zeros):
        with tape.alive(out):
            wide = builder.cast(out, 4)
            scaled, spread = builder.fresh(wide), tape.view(taken)
            spread.gradient_coefficient = wide.coefficient
            tape.apply("expand", [(taken, NEW)], spread, traits=SAVES_NOTHING)
            tape.apply("mul", [(wide, NEW), (spread, NEW)], scaled, [wide, taken])
            narrow = builder.cast(scaled, out.element_bytes)
        with tape.alive(narrow):
            return tape.apply("scatter add", [(narrow, NEW)], builder.fresh(x), [places], traits=Traits(custom=True))
