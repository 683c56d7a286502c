"""Mixtures of experts on a tape: routed experts as grouped products over sorted rows, and shared ones beside them."""

from memplan.model.inventory import inside
from memplan.model.parameter_tensors import LATENT
from memplan.model.spec import MixtureOfExperts, Mlp
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.blocks.fused_adapters import folded_weight, folding_factors
from memplan.step.blocks.projections import plain_linear
from memplan.step.feed_forwards.chosen_experts import chosen_scores, topk
from memplan.step.feed_forwards.feed_forward import activated, gated, mlp
from memplan.step.feed_forwards.grouped_products import grouped
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, VIEW, Traits, Value


def mixture(builder: Builder, x: Value, part: MixtureOfExperts, prefix: str) -> Value:
    """Return what routed and shared experts add to the residual stream."""
    names, tape, code = builder.settings.names, builder.tape, builder.settings.code
    x = flattened(builder, x) if code.flattens_rows else x
    with tape.alive(x):
        if code.shared_first and part.shared_intermediate_size:
            return _after_shared(builder, x, part, prefix)
        weights, chosen, logits = _routed(builder, x, part, inside(prefix, names.router))
        # Transformers' blocks, and our own, have names for these until they end.
        named = [weights, chosen] * (code.names_routers or code.flattens_rows) + [logits] * code.names_routers
        with tape.alive(weights, chosen, *named):
            given = linear(builder, x, inside(prefix, LATENT[0]), part.latent_size) if part.latent_size else x
            out = routed_experts(builder, given, weights, chosen, part, inside(prefix, names.experts))
            if part.latent_size:
                out = linear(builder, out, inside(prefix, LATENT[1]), builder.settings.hidden_size)
            if not part.shared_intermediate_size:
                return out
        builder.named_values += [out] if code.names_routed else []
        with tape.alive(out, *(() if code.names_routed else named)):
            return builder.add(out, shared(builder, x, part, prefix))


def flattened(builder: Builder, x: Value) -> Value:
    """Return the rows of all sequences, as one matrix."""
    rows = builder.tape.view(x)
    rows.flat = True
    return builder.tape.apply("view", [(x, SAME)], rows, traits=SAVES_NOTHING)


def _after_shared(builder: Builder, x: Value, part: MixtureOfExperts, prefix: str) -> Value:
    """Return the same where shared experts come first, and their gate last."""
    names, tape = builder.settings.names, builder.tape
    shared = mlp(builder, x, Mlp(part.shared_intermediate_size, part.activation), inside(prefix, names.shared_experts))
    with tape.alive(shared):
        weights, chosen, logits = _routed(builder, x, part, inside(prefix, names.router))
        with tape.alive(weights, chosen, *([logits] if builder.settings.code.names_routers else [])):
            out = routed_experts(builder, x, weights, chosen, part, inside(prefix, names.experts))
            with tape.alive(out):
                return builder.add(out, _gated_shared(builder, x, shared, part, prefix))


def shared(builder: Builder, x: Value, part: MixtureOfExperts, prefix: str) -> Value:
    """Return what shared experts add, scaled by a gate where there is one."""
    dense = Mlp(part.shared_intermediate_size, part.activation, part.gated, part.shared_fused)
    out = mlp(builder, x, dense, inside(prefix, builder.settings.names.shared_experts))
    return _gated_shared(builder, x, out, part, prefix)


def _gated_shared(builder: Builder, x: Value, shared: Value, part: MixtureOfExperts, prefix: str) -> Value:
    names, tape, hidden = builder.settings.names, builder.tape, builder.settings.hidden_size
    if not part.shared_gate:
        return shared
    with tape.alive(shared):
        gate = linear(builder, x, inside(prefix, names.shared_gate), 1)
        open_ = builder.fresh(gate)
        tape.apply("sigmoid", [(gate, NEW)], open_, [open_])
        full = [(TOKENS, hidden * builder.compute)]
        ways = [(open_, NEW), (shared, NEW)]
        saves = builder.factors(open_, shared)
        return tape.apply("mul", ways, builder.fresh(shared), saves, traits=Traits(workspace=full))


def _routed(builder: Builder, x: Value, part: MixtureOfExperts, name: str) -> tuple[Value, Value, Value]:
    """Return scores and numbers of the chosen experts, the scores in fp32 or the compute dtype, and what all are formed of."""
    tape, used = builder.tape, part.experts_per_token
    indices = tape.value(TOKENS, used, 8)
    logits = _router_logits(builder, x, part, name)
    with tape.alive(logits, indices):
        if part.softmax_of_chosen:
            wide = builder.cast(logits, 4) if part.fp32_choice else logits
            with tape.alive(wide):
                top = topk(builder, wide, indices, used)
                with tape.alive(top):
                    share, scratch = builder.fresh(top), [(TOKENS, top.coefficient)]
                    tape.apply("softmax", [(top, NEW)], share, [share], traits=Traits(workspace=scratch))
                    return builder.cast(share, x.element_bytes) if part.fp32_choice else share, indices, logits
        narrow = part.score_correction and builder.settings.under_autocast and builder.settings.code.casts_routers
        narrow = narrow or (part.scores_as_routed and not builder.settings.autocast)
        share = chosen_scores(builder, logits if narrow else builder.cast(logits, 4), indices, part)
        if part.normalised:
            share = normalised(builder, share)  # by a sum that autocast forms in fp32
            share = builder.cast(share, 4) if part.scores_as_routed and builder.settings.under_autocast else share
        if part.score_scale != 1.0:
            share = builder.pointwise("scale", share)
        own = part.fp32_scores or part.scores_as_routed
        return share if own else builder.cast(share, builder.compute), indices, logits


def _router_logits(builder: Builder, x: Value, part: MixtureOfExperts, name: str) -> Value:
    """Return the router's product; in fp32 it reads copies of its input and of its weight, and saves both."""
    tape, weight = builder.tape, builder.weight(f"{name}.weight")
    if f"{name}.lora_A.weight" in builder.weights:
        with tape.alive(x):
            copies = folding_factors(builder, name, weight)
            with tape.alive(*copies):
                folded = folded_weight(builder, name, weight, copies)
        logits = tape.value(TOKENS, part.num_experts, builder.compute)
        return tape.apply(
            f"linear {name}", [(x, NEW), (folded, NEW)], logits, [x, folded], [weight], Traits(product=True)
        )
    if not part.fp32_router or builder.settings.under_autocast or weight.coded:
        recast = part.fp32_router and builder.settings.code.casts_routers and weight.element_bytes == 2
        copies = (
            [tape.make("cast weight", builder.constant(weight.rows * weight.columns, builder.compute))]
            if recast
            else []
        )
        if part.fp32_router and builder.settings.code.casts_routers:  # cast to fp32, and back by autocast
            x = builder.lowered(builder.cast(x, 4))
        with tape.alive(*copies):
            logits = plain_linear(builder, x, name, part.num_experts)
        if copies and x.needs_gradient:  # autocast casts the wide copy back, and backward reads that
            node = tape.nodes[-1]
            node.saved = (*node.saved, copies[0].storage)
        return logits
    wide = builder.cast(x, 4)
    saves = [wide] if weight.trainable else []
    copies = []
    if weight.element_bytes < 4:
        copies = [tape.make("cast weight", builder.constant(part.num_experts * builder.settings.hidden_size, 4))]
    saves += copies if wide.needs_gradient else []
    out = tape.value(TOKENS, part.num_experts, 4)
    packs = wide.needs_gradient or weight.trainable
    tape.apply(f"linear {name}", [(wide, VIEW)], out, saves, [weight], traits=Traits(packs=packs, product=True))
    tape.touch(*copies)
    return out


def normalised(builder: Builder, share: Value, *, shifted: bool = False) -> Value:
    """Return the scores of a token's experts divided by their sum, to which a little is added where it is shifted."""
    tape = builder.tape
    with tape.alive(share):
        total = tape.apply("sum", [(share, SAME)], builder.fresh(share, 1), traits=SAVES_NOTHING)
        if shifted:
            total = tape.apply("add", [(total, SAME)], builder.fresh(total), traits=SAVES_NOTHING)
        ways, scratch = [(share, NEW), (total, NEW)], [(TOKENS, share.coefficient)]
        return tape.apply("div", ways, builder.fresh(share), [share, total], traits=Traits(workspace=scratch))


def routed_experts(
    builder: Builder, x: Value, weights: Value, chosen: Value, part: MixtureOfExperts, name: str
) -> Value:
    """Return the weighted sum of the chosen experts; what their adapters are read as is there until it is formed."""
    folded, copies = dict[str, list[Value]](), list[Value]()
    for own in (f"{name}.down_proj", f"{name}.{_first_projection(part)}"):
        if f"{own}.lora_A.weight" in builder.weights:
            with builder.tape.alive(*copies):
                folded[own] = folding_factors(builder, own, builder.weight(own))
            copies += folded[own]
    with builder.tape.alive(*copies):
        result = _sorted_by_expert(builder, (x, weights, chosen), part, name, folded)
    builder.tape.touch(*[value for values in reversed(folded.values()) for value in values])
    return result


def _first_projection(part: MixtureOfExperts) -> str:
    return f"{'gate_up' if part.gated else 'up'}_proj"


def _sorted_by_expert(
    builder: Builder,
    given: tuple[Value, Value, Value],
    part: MixtureOfExperts,
    name: str,
    resident: dict[str, list[Value]],
) -> Value:
    """Return the same: rows sorted by expert, grouped products; weights with what adapters fold into them are added to ``resident``."""
    tape, used, inner = builder.tape, part.experts_per_token, part.intermediate_size
    x, weights, chosen = given
    experts, order = _indices(builder, used), _indices(builder, used)
    tape.make("sort", experts, chosen)
    tape.make("sort", order, chosen)
    x = x if builder.settings.code.grouped_uncast else builder.lowered(x)
    row_order = tape.make("order // used", _indices(builder, used), order)
    with tape.alive(row_order):
        rows = tape.apply("gather rows", [(x, NEW)], builder.fresh(x, x.width * used), [row_order])
    ahead = builder.settings.code.gathers_ahead
    early = [_taken(builder, weights, order)] if ahead else []
    with tape.alive(rows, experts, order, *early):
        offsets = _offsets(builder, experts, part)
        width, first = (2 if part.gated else 1) * inner * used, f"{name}.{_first_projection(part)}"
        biases = _gathered_biases(builder, f"{first}_bias", width, experts)
        both = grouped(builder, rows, first, width, experts, offsets, resident, direct=part.transposed)
        with tape.alive(offsets, *(() if ahead else (both,))):
            with tape.alive(both):
                hidden = _activated(builder, both, inner * used, part)
            with tape.alive(hidden, *biases):
                biases = _gathered_biases(builder, f"{name}.down_proj_bias", x.width * used, experts)
            with tape.alive(*biases, *(() if ahead else (hidden,))):
                with tape.alive(hidden):
                    down = f"{name}.down_proj"
                    out = grouped(
                        builder, hidden, down, x.width * used, experts, offsets, resident, direct=part.transposed
                    )
                with tape.alive(out):
                    taken = early[0] if early else _taken(builder, weights, order)
                return _combined(builder, out, taken, order, x)


def _activated(builder: Builder, up: Value, width: int, part: MixtureOfExperts) -> Value:
    """Return what experts' second products are given, of a ``width``, of what their first ones yield."""
    if not part.gated:
        return activated(builder, up, part.activation)
    gate, other = builder.tape.view(up, width), builder.tape.view(up, width)
    if part.activation != "clamped-swiglu":
        builder.tape.apply("split", [(up, NEW)], [gate, other], traits=SAVES_NOTHING)
        return gated(builder, gate, other)
    for half in (gate, other):  # every second number, whose gradient is written among zeros
        builder.tape.apply("slice", [(up, NEW)], half, traits=SAVES_NOTHING)
    return _clamped(builder, gate, other) if builder.profile.activation == "composite" else gated(builder, gate, other)


def _gathered_biases(builder: Builder, name: str, width: int, experts: Value) -> list[Value]:
    """Return the biases of each row's expert, where the experts' function has a name for them."""
    bias = builder.weights.get(name)
    if bias is None or not builder.settings.code.gathers_ahead:
        return []
    return [builder.tape.make("gather bias", builder.tape.value(TOKENS, width, bias.element_bytes), experts)]


def _indices(builder: Builder, used: int) -> Value:
    return builder.tape.value(TOKENS, used, 8)


def _offsets(builder: Builder, experts: Value, part: MixtureOfExperts) -> Value:
    """Return where each expert's rows end."""
    tape = builder.tape
    narrow = tape.make("cast", tape.value(TOKENS, part.experts_per_token, 4, part=Part.TEMPORARIES), experts)
    counts = tape.make("histc", builder.constant(part.num_experts, 4), narrow)
    return tape.make("cumsum", tape.value(ONE, part.num_experts, 4), counts)


def _taken(builder: Builder, weights: Value, order: Value) -> Value:
    """Return each row's score."""
    return builder.tape.apply("gather weights", [(weights, NEW)], builder.fresh(weights), [order])


def _combined(builder: Builder, out: Value, taken: Value, order: Value, x: Value) -> Value:
    """Return the experts' results, weighted, in the order of the tokens, and summed for each, as wide as ``x``.

    Autocast sums in fp32 (``fp32_set_opt_dtype`` in aten/src/ATen/autocast_mode.h, v2.13.0).
    """
    code, tape = builder.settings.code, builder.tape
    like = x if code.grouped_uncast else out
    with tape.alive(out):
        scaled = builder.fresh(out, element_bytes=max(out.element_bytes, taken.element_bytes))
        # A wider product has wide gradients for both factors, and that of the rows is cast before the other is summed.
        size = scaled.coefficient
        scratch = [(TOKENS, size)] * (1 + (size != out.coefficient))
        casts = [] if size == out.coefficient else [(TOKENS, out.coefficient)]
        ways = [(out, NEW), (taken, NEW)]
        traits = Traits(workspace=scratch, casts=casts, sums_last=bool(casts), forms_last=not casts)
        tape.apply("mul", ways, scaled, [out, taken], traits=traits)
    back = _indices(builder, order.width)
    tape.make("back", back, order, scratch=[(TOKENS, order.coefficient)])
    with tape.alive(back, *((out, taken) if code.gathers_ahead else (scaled,))):
        ordered = tape.apply("gather back", [(scaled, NEW)], builder.fresh(scaled), [back])
        total = builder.fresh(ordered, x.width, 4 if code.grouped_uncast and builder.settings.under_autocast else None)
        # Backward looks at its gradient once for each expert of a token and copies that where they are several, or casts it.
        way = SAME if order.width == 1 and total.element_bytes == ordered.element_bytes else NEW
        tape.apply("sum over experts", [(ordered, way)], total, traits=SAVES_NOTHING)
        with tape.alive(*([ordered] if code.gathers_ahead else [])):
            return builder.cast(total, like.element_bytes)


def _clamped(builder: Builder, gate: Value, up: Value) -> Value:
    """Return gpt-oss's clamped SwiGLU: ``(up + 1) * (gate * sigmoid(gate * alpha))``, both clamped."""
    tape = builder.tape
    with tape.alive(gate, up):
        gate, up = builder.clamp(gate, 1), builder.clamp(up, 2)
        with tape.alive(gate, up):
            more = tape.apply("add one", [(up, SAME)], builder.fresh(up), traits=SAVES_NOTHING)
            with tape.alive(more):
                scaled = builder.pointwise("scale", gate)
                open_ = builder.fresh(scaled)
                tape.apply("sigmoid", [(scaled, NEW)], open_, [open_])
                return builder.multiply(more, builder.multiply(gate, open_))
