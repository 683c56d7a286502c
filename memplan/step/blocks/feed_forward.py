"""Dense feed-forward parts and mixtures of experts on a tape."""

from __future__ import annotations

from memplan.model.spec import MixtureOfExperts, Mlp
from memplan.step.blocks.builder import ONE, TOKENS, Operations
from memplan.step.tapes.linear_forms import Part
from memplan.step.tapes.tape import NEW, SAME, VIEW, Value
from memplan.units import round_up

GROUPED_ROW_BYTES = 16
"""Rows of a grouped product's result begin at multiples of this."""


class DenseOperations(Operations):
    """Gated and plain feed-forward parts."""

    def mlp(self, x: Value, part: Mlp, prefix: str) -> Value:
        """Return what a dense feed-forward part adds to the residual stream."""
        names, inner, tape = self.settings.names, part.intermediate_size, self.tape
        with tape.holding(x):
            if not part.gated:
                hidden = self.activated(self.linear(x, f"{prefix}.{names.up}", inner))
            elif part.fused_gate_up:
                both = self.linear(x, f"{prefix}.{names.gate_up}", 2 * inner)
                gate, up = tape.view(both, inner), tape.view(both, inner)
                tape.apply("split", [(both, NEW)], [gate, up], packs=False)
                with tape.holding(both):
                    hidden = self.gated(gate, up)
                    return self.linear(hidden, f"{prefix}.{names.down}", self.settings.hidden_size)
            elif self.profile.activation == "fused":
                gate = self.linear(x, f"{prefix}.{names.gate}", inner)
                with tape.holding(gate):
                    hidden = self.gated(gate, self.linear(x, f"{prefix}.{names.up}", inner))
            else:
                gate = self.activated(self.linear(x, f"{prefix}.{names.gate}", inner))
                with tape.holding(gate):
                    hidden = self.multiply(gate, self.linear(x, f"{prefix}.{names.up}", inner))
            return self.linear(hidden, f"{prefix}.{names.down}", self.settings.hidden_size)

    def activated(self, x: Value) -> Value:
        """Return the activation of ``x``, which keeps its input."""
        return self.pointwise("activation", x, (x,))

    def gated(self, gate: Value, up: Value) -> Value:
        """Return ``activation(gate) * up``: in one kernel, which keeps both inputs, or step by step."""
        with self.tape.holding(gate, up):
            if self.profile.activation == "fused":
                ways = [(gate, NEW), (up, NEW)]
                return self.tape.apply("gated activation", ways, self.fresh(up), [gate, up], custom=True)
            return self.multiply(self.activated(gate), up)


class MixtureOperations(DenseOperations):
    """Routed experts as grouped products over sorted rows, and shared ones beside them."""

    def mixture(self, x: Value, part: MixtureOfExperts, prefix: str) -> Value:
        """Return what routed and shared experts add to the residual stream."""
        names, tape = self.settings.names, self.tape
        with tape.holding(x):
            weights, chosen = self._routed(x, part, f"{prefix}.{names.router}")
            with tape.holding(weights, chosen):
                out = self._experts(x, weights, chosen, part, f"{prefix}.{names.experts}")
                if not part.shared_intermediate_size:
                    return out
                with tape.holding(out):
                    return self.add(out, self._shared(x, part, prefix))

    def _shared(self, x: Value, part: MixtureOfExperts, prefix: str) -> Value:
        """Return what shared experts add, scaled by a gate where there is one."""
        names, tape, hidden = self.settings.names, self.tape, self.settings.hidden_size
        dense = Mlp(part.shared_intermediate_size, part.activation)
        shared = self.mlp(x, dense, f"{prefix}.{names.shared_experts}")
        if not part.shared_gate:
            return shared
        with tape.holding(shared):
            gate = self.linear(x, f"{prefix}.{names.shared_gate}", 1)
            open_ = self.fresh(gate)
            tape.apply("sigmoid", [(gate, NEW)], open_, [open_])
            full = [(TOKENS, hidden * self.compute)]
            ways = [(open_, NEW), (shared, NEW)]
            return tape.apply("mul", ways, self.fresh(shared), [shared, open_], workspace=full)

    def _routed(self, x: Value, part: MixtureOfExperts, name: str) -> tuple[Value, Value]:
        """Return scores and numbers of the chosen experts, the scores in fp32 or the compute dtype."""
        tape, used = self.tape, part.experts_per_token
        indices = tape.value(TOKENS, used, 8, needs_gradient=False)
        logits = self._router_logits(x, part, name)
        with tape.holding(logits, indices):
            if part.softmax_of_chosen:
                top = self._topk(logits, indices, used)
                with tape.holding(top):
                    share, scratch = self.fresh(top), [(TOKENS, top.coefficient)]
                    return tape.apply("softmax", [(top, NEW)], share, [share], workspace=scratch), indices
            share = self._chosen(self.cast(logits, 4), indices, part)
            if part.normalised:
                share = self._normalised(share)
            if part.score_scale != 1.0:
                share = self.pointwise("scale", share)
            return share if part.fp32_scores else self.cast(share, self.compute), indices

    def _router_logits(self, x: Value, part: MixtureOfExperts, name: str) -> Value:
        """Return the router's product; in fp32 it reads copies of its input and of its weight, and keeps both."""
        tape, weight = self.tape, self.weight(f"{name}.weight")
        if not part.fp32_router or self.settings.autocast or weight.coded:
            return self.plain_linear(x, name, part.num_experts)
        wide = self.cast(x, 4)
        saves = [wide] if weight.trainable else []
        copies = []
        if weight.element_bytes < 4:
            copies = [tape.make("cast weight", self.constant(part.num_experts * self.settings.hidden_size, 4))]
        saves += copies if wide.needs_gradient else []
        out = tape.value(TOKENS, part.num_experts, 4)
        packs = wide.needs_gradient or weight.trainable
        tape.apply(f"linear {name}", [(wide, VIEW)], out, saves, [weight], packs=packs, product=True)
        tape.touch(*copies)
        return out

    def _topk(self, scores: Value, indices: Value, used: int) -> Value:
        top = self.fresh(scores, used)
        self.tape.apply("topk", [(scores, NEW)], (top, indices), [indices])
        indices.needs_gradient = False
        return top

    def _chosen(self, logits: Value, indices: Value, part: MixtureOfExperts) -> Value:
        """Return the scores of the chosen experts; experts of groups that take no part are masked."""
        tape, used, scores = self.tape, part.experts_per_token, self.fresh(logits)
        with tape.holding(logits):
            tape.apply("scores of experts", [(logits, NEW)], scores, [scores])
            if not part.score_correction:
                if part.groups > 1:
                    mask = self.fresh(scores, element_bytes=1)
                    with tape.holding(scores):
                        scores = self.pointwise("groups that take part", scores, (mask,))
                with tape.holding(scores):
                    return self._topk(scores, indices, used)
            with tape.holding(scores):
                choice = tape.make("add", tape.value(TOKENS, part.num_experts, 4, part=Part.TEMPORARIES), scores)
                if part.groups > 1:
                    masked = tape.value(TOKENS, part.num_experts, 4, part=Part.TEMPORARIES)
                    choice = tape.make("groups that take part", masked, choice)
                values = tape.value(TOKENS, used, 4, part=Part.TEMPORARIES)
                tape.make("topk", values, choice)
                tape.make("topk", indices, choice)
                with tape.holding(choice):
                    return tape.apply("gather", [(scores, NEW)], self.fresh(scores, used), [indices])

    def _normalised(self, share: Value) -> Value:
        """Return the scores of a token's experts divided by their sum."""
        tape = self.tape
        with tape.holding(share):
            total = tape.apply("sum", [(share, SAME)], self.fresh(share, 1), packs=False)
            ways, scratch = [(share, NEW), (total, NEW)], [(TOKENS, share.coefficient)]
            return tape.apply("div", ways, self.fresh(share), [share, total], workspace=scratch)

    def _experts(self, x: Value, weights: Value, chosen: Value, part: MixtureOfExperts, name: str) -> Value:
        """Return the weighted sum of the chosen experts: rows sorted by expert, grouped products."""
        tape, used, inner = self.tape, part.experts_per_token, part.intermediate_size
        experts, order = self._indices(used), self._indices(used)
        tape.make("sort", experts, chosen)
        tape.make("sort", order, chosen)
        x = self.lowered(x)
        row_order = tape.make("order // used", self._indices(used), order)
        rows = tape.apply("gather rows", [(x, NEW)], self.fresh(x, x.width * used), [row_order])
        with tape.holding(rows, experts, order):
            offsets = self._offsets(experts, part)
            both = self._grouped(rows, f"{name}.gate_up_proj", 2 * inner * used, experts, offsets)
            gate, up = tape.view(both, inner * used), tape.view(both, inner * used)
            tape.apply("split", [(both, NEW)], [gate, up], packs=False)
            with tape.holding(both, offsets):
                clamped = part.activation == "clamped-swiglu" and self.profile.activation != "fused"
                hidden = self._clamped(gate, up) if clamped else self.gated(gate, up)
                with tape.holding(hidden):
                    out = self._grouped(hidden, f"{name}.down_proj", x.width * used, experts, offsets)
                    return self._combined(out, weights, order, x.width)

    def _indices(self, used: int) -> Value:
        return self.tape.value(TOKENS, used, 8, needs_gradient=False)

    def _offsets(self, experts: Value, part: MixtureOfExperts) -> Value:
        """Return where each expert's rows end."""
        tape = self.tape
        narrow = tape.make("cast", tape.value(TOKENS, part.experts_per_token, 4, part=Part.TEMPORARIES), experts)
        counts = tape.make("histc", self.constant(part.num_experts, 4), narrow)
        return tape.make("cumsum", tape.value(ONE, part.num_experts, 4, needs_gradient=False), counts)

    def _combined(self, out: Value, weights: Value, order: Value, width: int) -> Value:
        """Return the experts' results, weighted, in the order of the tokens, and summed for each."""
        tape = self.tape
        with tape.holding(out):
            taken = tape.apply("gather weights", [(weights, NEW)], self.fresh(weights), [order])
            scaled = self.fresh(out, element_bytes=max(out.element_bytes, taken.element_bytes))
            # A wider product has wide gradients for both factors, and that of the rows is cast before the other is summed.
            size = scaled.coefficient
            scratch = [(TOKENS, size if size == out.coefficient else 2 * size)]
            casts = [] if size == out.coefficient else [(TOKENS, out.coefficient)]
            ways = [(out, NEW), (taken, NEW)]
            tape.apply("mul", ways, scaled, [out, taken], workspace=scratch, casts=casts)
        back = self._indices(order.width)
        tape.make("back", back, order, scratch=[(TOKENS, order.coefficient)])
        with tape.holding(scaled, back):
            ordered = tape.apply("gather back", [(scaled, NEW)], self.fresh(scaled), [back])
            total = tape.apply("sum over experts", [(ordered, NEW)], self.fresh(ordered, width), packs=False)
            return self.cast(total, out.element_bytes)

    def _grouped(self, rows: Value, name: str, width: int, experts: Value, offsets: Value) -> Value:
        """Return each row times the matrix of its expert."""
        tape, weight = self.tape, self.weight(name)
        copy = self.cast_weight(weight)
        saves = [offsets, *([rows] if weight.trainable else [])]
        if copy is not None and rows.needs_gradient:
            saves.append(copy)
        if weight.coded and not weight.trainable:
            saves = []
        used = experts.width
        out = self._aligned(tape.value(TOKENS, width, self.compute), used)
        rows.gradient_coefficient = used * self._row_bytes(rows, used)
        tape.apply(f"grouped {name}", [(rows, NEW)], out, saves, [weight], custom=weight.coded, product=True)
        tape.touch(*([copy] if copy is not None else []))
        bias = self.weights.get(f"{name}_bias")
        if bias is None:
            return out
        with tape.holding(out):
            if self.settings.autocast:
                self.cast_weight(bias)
            in_place = not self.settings.selective
            biased = tape.view(out) if in_place else self.fresh(out)
            gathered = [(out.quantity, out.coefficient)]
            return tape.apply("add bias", [(out, SAME)], biased, [experts], [bias], scratch=gathered)

    def _aligned(self, rows: Value, used: int) -> Value:
        """Return the result of a grouped product, whose rows begin at multiples of 16 bytes.

        Source:
            ``create_grouped_gemm_output_tensor`` in aten/src/ATen/native/GroupedMMUtils.h (v2.13.0).
        """
        part, quantity, _ = self.tape.storages[rows.storage]
        self.tape.storages[rows.storage] = (part, quantity, used * self._row_bytes(rows, used))
        return rows

    def _row_bytes(self, rows: Value, used: int) -> int:
        return round_up(rows.coefficient // used, GROUPED_ROW_BYTES)

    def _clamped(self, gate: Value, up: Value) -> Value:
        """Return gpt-oss's clamped SwiGLU: ``(up + 1) * (gate * sigmoid(gate * alpha))``, both clamped."""
        tape = self.tape
        with tape.holding(gate, up):
            gate, up = self.pointwise("clamp", gate, (gate,)), self.pointwise("clamp", up, (up,))
            with tape.holding(gate, up):
                more = self.pointwise("add one", up)
                with tape.holding(more):
                    scaled = self.pointwise("scale", gate)
                    open_ = self.fresh(scaled)
                    tape.apply("sigmoid", [(scaled, NEW)], open_, [open_])
                    return self.multiply(more, self.multiply(gate, open_))
