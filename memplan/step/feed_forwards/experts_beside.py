"""Routed experts beside a dense feed-forward part on a tape.

Source: ``Gemma4TextDecoderLayer.forward`` and ``Gemma4TextRouter.forward`` in transformers/models/gemma4/modeling_gemma4.py (5.23.0).
"""

from memplan.model.parameter_tensors import EXPERT_NORMS
from memplan.model.spec import Layer, MixtureOfExperts, Norm
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import Builder
from memplan.step.blocks.norms import normalised, times_weight
from memplan.step.feed_forwards.mixture_of_experts import normalised as normalised_scores
from memplan.step.feed_forwards.mixture_of_experts import routed_experts
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, Traits, Value


def with_experts(builder: Builder, x: Value, fed: Value, layer: Layer, part: MixtureOfExperts) -> Value:
    """Return what the dense part has ``fed`` and what experts make of the residual stream ``x``, both normalised and added up.

    The layer has names for both, and for the router's scores, until it ends.
    """
    tape, hidden = builder.tape, builder.settings.hidden_size
    behind, before, after = EXPERT_NORMS
    with tape.alive(x, fed):
        first = normalised(builder, fed, layer.norm, behind, hidden)
        with tape.alive(first):
            weights, chosen, scores = _routed(builder, x, layer.norm, part)
            with tape.alive(weights, chosen, scores):
                given = normalised(builder, x, layer.norm, before, hidden)
                with tape.alive(given):
                    out = routed_experts(builder, given, weights, chosen, part, "experts")
                second = normalised(builder, out, layer.norm, after, hidden)
                with tape.alive(second):
                    total = builder.add(first, second)
    builder.named_values += [first, second, weights, chosen, scores]
    return total


def _routed(builder: Builder, x: Value, norm: Norm, part: MixtureOfExperts) -> tuple[Value, Value, Value]:
    """Return scores and numbers of the chosen experts, and the scores of all, in fp32."""
    tape, used = builder.tape, part.experts_per_token
    scale, each = builder.weight("router.scale"), builder.weight("router.per_expert_scale")
    alone = Norm(weight=False, epsilon=norm.epsilon)
    with tape.alive(x):
        rows = normalised(builder, x, alone, "router.norm", builder.settings.hidden_size)
        with tape.alive(rows):
            rows = builder.pointwise("scale", times_weight(builder, rows, [scale]))
        with tape.alive(rows):
            logits = linear(builder, rows, "router.proj", part.num_experts)
            with tape.alive(logits):
                wide = builder.cast(logits, 4)
                scores = builder.fresh(wide)
                tape.apply("softmax", [(wide, NEW)], scores, [scores])
            top, chosen = builder.fresh(scores, used), tape.value(Quantity.TOKENS, used, 8)
            tape.apply("topk", [(scores, NEW)], (top, chosen), [chosen])
            chosen.needs_gradient = False
            share = normalised_scores(builder, top)
            with tape.alive(share):
                taken = tape.value(Quantity.TOKENS, used, each.element_bytes)
                tape.apply("scale of each", [], taken, [chosen], [each])
                full = [(share.quantity, share.coefficient)]
                weights = builder.fresh(share)
                ways = [(share, NEW), (taken, NEW)]
                tape.apply("mul", ways, weights, [share, taken], traits=Traits(workspace=full))
    return weights, chosen, scores
