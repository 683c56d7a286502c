"""Experts that are all given every token on a tape, times scores of which most are 0, in batched products.

Source: ``Llama4TextMoe.forward``, ``Llama4Router.forward`` and ``Llama4TextExperts.forward`` in
transformers/models/llama4/modeling_llama4.py (5.23.0).
"""

from memplan.model.spec import MixtureOfExperts, Mlp
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import Builder
from memplan.step.feed_forwards.feed_forward import activated, mlp
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value


def every_expert(builder: Builder, x: Value, part: MixtureOfExperts, prefix: str) -> Value:
    """Return what all experts add together with the shared one; a layer has a name for the router's product until it ends."""
    names, tape, count = builder.settings.names, builder.tape, part.num_experts
    with tape.alive(x):
        logits = linear(builder, x, f"{prefix}.{names.router}", count)
        builder.named_values.append(logits)
        with tape.alive(logits):
            scores = _scores(builder, logits, part)
        with tape.alive(scores, logits):
            rows = _scaled_rows(builder, x, scores, count)
            with tape.alive(rows):
                routed = _experts(builder, rows, part, f"{prefix}.{names.experts}")
                with tape.alive(routed):
                    dense = Mlp(part.shared_intermediate_size, part.activation)
                    shared = mlp(builder, x, dense, f"{prefix}.{names.shared_experts}")
                    with tape.alive(shared):
                        return _sum(builder, shared, routed)


def _scores(builder: Builder, logits: Value, part: MixtureOfExperts) -> Value:
    """Return the sigmoid, formed in fp32, of the chosen experts' logits, and of minus infinity for the others."""
    tape, used = builder.tape, part.experts_per_token
    top, indices = builder.fresh(logits, used), tape.value(Quantity.TOKENS, used, 8)
    tape.apply("topk", [(logits, NEW)], (top, indices), [indices])
    indices.needs_gradient = False
    with tape.alive(top, indices):
        filled = tape.make("full_like", builder.fresh(logits))
        scores = tape.apply("scatter", [(top, NEW)], tape.view(filled), [indices])
        with tape.alive(scores):
            wide = builder.cast(scores, 4)
            open_ = builder.fresh(wide)
            tape.apply("sigmoid", [(wide, NEW)], open_, [open_])
            return builder.cast(open_, logits.element_bytes, foreign=logits.foreign)


def _scaled_rows(builder: Builder, x: Value, scores: Value, count: int) -> Value:
    """Return each token once for every expert, times its score."""
    rows = builder.tape.apply("repeat", [(x, NEW)], builder.fresh(x, count * x.width), traits=SAVES_NOTHING)
    with builder.tape.alive(rows):
        turned = builder.copied(scores, moves=count > 1)
        full = [(rows.quantity, max(rows.coefficient, scores.element_bytes * rows.width))]
        ways = [(rows, NEW), (turned, NEW)]
        scaled = builder.fresh(rows, element_bytes=max(rows.element_bytes, scores.element_bytes))
        saves = builder.factors(rows, turned)
        return builder.tape.apply("mul", ways, scaled, saves, traits=Traits(workspace=full))


def _experts(builder: Builder, rows: Value, part: MixtureOfExperts, name: str) -> Value:
    """Return the rows behind each expert's two matrices."""
    tape, inner = builder.tape, part.num_experts * part.intermediate_size
    both = _batched(builder, rows, f"{name}.gate_up_proj", 2 * inner)
    gate, up = tape.view(both, inner), tape.view(both, inner)
    tape.apply("chunk", [(both, NEW)], (gate, up), traits=SAVES_NOTHING)
    with tape.alive(both):
        hidden = builder.multiply(up, activated(builder, gate, part.activation))
        return _batched(builder, hidden, f"{name}.down_proj", rows.width)


def _batched(builder: Builder, rows: Value, name: str, width: int) -> Value:
    """Return the product of each expert's rows and its matrix; autocast's copy of the matrices is saved."""
    weight = builder.weight(name)
    rows = builder.lowered(rows)
    with builder.tape.alive(rows):
        copy = builder.cast_weight(weight)
    saves = [rows] if weight.trainable else []
    if copy is not None and rows.needs_gradient:
        saves.append(copy)
    out = builder.fresh(rows, width)
    traits = Traits(product=True, batched=True)
    builder.tape.apply(f"experts {name}", [(rows, NEW)], out, saves, [weight], traits=traits)
    builder.tape.touch(*([copy] if copy is not None else []))
    return out


def _sum(builder: Builder, shared: Value, routed: Value) -> Value:
    """Return the shared expert's result, to which the sum of the others' is added in place; autocast sums in fp32."""
    width = 4 if builder.settings.under_autocast else routed.element_bytes
    total = builder.fresh(routed, shared.width, width)
    builder.tape.apply("sum over experts", [(routed, NEW)], total, traits=SAVES_NOTHING)
    ways = [(shared, SAME), (total, SAME if total.element_bytes == shared.element_bytes else NEW)]
    return builder.tape.apply("add in place", ways, builder.tape.view(shared), traits=SAVES_NOTHING)
