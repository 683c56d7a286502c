"""The choice of experts on a tape: scores of all, of the groups that take part where there are some, and the highest of them."""

from memplan.model.spec import MixtureOfExperts
from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, Traits, Value


def topk(builder: Builder, scores: Value, indices: Value, used: int) -> Value:
    """Return the highest scores of each token, whose numbers are ``indices``."""
    top = builder.fresh(scores, used)
    builder.tape.apply("topk", [(scores, NEW)], (top, indices), [indices])
    indices.needs_gradient = False
    return top


def chosen_scores(builder: Builder, logits: Value, indices: Value, part: MixtureOfExperts) -> Value:
    """Return the scores of the chosen experts; experts of groups that take no part are masked."""
    tape, used, scores = builder.tape, part.experts_per_token, builder.fresh(logits)
    with tape.alive(logits):
        # Softmax's backward multiplies by its result first (``softmax_backward_cuda_out`` in aten/src/ATen/native/cuda/SoftMax.cu, v2.13.0).
        scratch = [] if part.score_correction or part.scores_as_routed else [(TOKENS, scores.coefficient)]
        tape.apply("scores of experts", [(logits, NEW)], scores, [scores], traits=Traits(workspace=scratch))
        if not part.score_correction and not part.scores_as_routed:
            if part.groups > 1:
                shut = _shut_groups(builder, scores, part)
                with tape.alive(scores, shut):
                    scores = builder.pointwise("groups that take part", scores, (shut,))
            with tape.alive(scores):
                return topk(builder, scores, indices, used)
        with tape.alive(scores):
            width = scores.element_bytes if part.scores_as_routed else 4
            choice = scores
            if part.score_correction:
                choice = tape.make("add", tape.value(TOKENS, part.num_experts, width, part=Part.TEMPORARIES), scores)
            others: tuple[Value, ...] = ()
            if part.groups > 1 or not part.score_correction:
                others = (_shut_groups(builder, choice, part),) if _looks_for_groups(builder, part) else ()
                masked = tape.value(TOKENS, part.num_experts, width, part=Part.TEMPORARIES)
                choice = tape.make("groups that take part", masked, choice, *others)
            values = tape.value(TOKENS, used, width, part=Part.TEMPORARIES)
            tape.make("topk", values, choice)
            tape.make("topk", indices, choice)
            with tape.alive(choice, *others):
                return tape.apply("gather", [(scores, NEW)], builder.fresh(scores, used), [indices])


def _looks_for_groups(builder: Builder, part: MixtureOfExperts) -> bool:
    """Tell whether what finds groups is told one by one: as memplan's own models do it."""
    code = builder.settings.code
    return part.groups > 1 and code.flattens_rows and not code.names_routers


def _shut_groups(builder: Builder, scores: Value, part: MixtureOfExperts) -> Value:
    """Return which experts are of groups that take no part; its tensors are small, and may lie in large blocks that are free.

    Source:
        ``Router._open_groups`` in memplan/trace/reference/mixture.py.
    """
    if not _looks_for_groups(builder, part):
        return builder.fresh(scores, element_bytes=1)
    tape, groups, best = builder.tape, part.groups, 2 if part.score_correction else 1

    def made(name: str, width: int, size: int, *reads: Value) -> Value:
        return tape.make(name, tape.value(TOKENS, width, size, part=Part.TEMPORARIES), *reads)

    with tape.alive(scores):
        highest, ranks = made("topk", groups * best, 4, scores), made("topk", groups * best, 8, scores)
        with tape.alive(ranks):
            total = made("sum of a group", groups, 4, highest)
        tops = made("topk", part.groups_per_token, 4, total)
        with tape.alive(tops, ranks):  # which the nodes behind the highest scores have, until these go
            chosen = made("topk", part.groups_per_token, 8, total)
        zeros = made("zeros", groups, 4)
        with tape.alive(chosen):
            open_ = made("scatter", groups, 4, zeros, chosen)
            with tape.alive(open_):
                spread = made("expand", part.num_experts, 1, made("bool", groups, 1, open_))
        return made("not", part.num_experts, 1, spread)
