"""Dense feed-forward parts and mixtures of experts on a tape."""

from __future__ import annotations

from memplan.blocks.base import ONE, TOKENS, Operations
from memplan.forms import Part
from memplan.model.spec import MixtureOfExperts, Mlp
from memplan.tape import NEW, SAME, VIEW, Value


class DenseOperations(Operations):
    """Gated and plain feed-forward parts."""

    def mlp(self, x: Value, part: Mlp, prefix: str) -> Value:
        """Return what a dense feed-forward part adds to the residual stream."""
        names, inner, tape = self.spec.names, part.intermediate_size, self.tape
        fused = self.profile.activation == "fused"
        if not part.gated:
            hidden = self.activated(self.linear(x, f"{prefix}.{names.up}", inner))
        elif part.fused_gate_up:
            both = self.linear(x, f"{prefix}.{names.gate_up}", 2 * inner)
            gate, up = tape.view(both, inner), tape.view(both, inner)
            tape.apply("split", [(both, NEW)], [gate, up])
            hidden = self.gated(gate, up) if fused else self.multiply(self.activated(gate), up)
        elif fused:
            gate = self.linear(x, f"{prefix}.{names.gate}", inner)
            hidden = self.gated(gate, self.linear(x, f"{prefix}.{names.up}", inner))
        else:
            gate = self.activated(self.linear(x, f"{prefix}.{names.gate}", inner))
            hidden = self.multiply(gate, self.linear(x, f"{prefix}.{names.up}", inner))
        return self.linear(hidden, f"{prefix}.{names.down}", self.spec.hidden_size)

    def activated(self, x: Value) -> Value:
        """Return the activation of ``x``, which keeps its input."""
        return self.pointwise("activation", x, (x,))

    def gated(self, gate: Value, up: Value) -> Value:
        """Return ``activation(gate) * up`` in one kernel, which keeps both inputs."""
        return self.tape.apply("gated activation", [(gate, NEW), (up, NEW)], self.fresh(up), [gate, up])


class MixtureOperations(DenseOperations):
    """Routed experts as grouped products over sorted rows, and shared ones beside them."""

    def mixture(self, x: Value, part: MixtureOfExperts, prefix: str) -> Value:
        """Return what routed and shared experts add to the residual stream."""
        names, tape, hidden = self.spec.names, self.tape, self.spec.hidden_size
        chosen = self._routed(x, part, f"{prefix}.{names.router}")
        out = self._experts(x, chosen, part, f"{prefix}.{names.experts}")
        if part.shared_intermediate_size:
            shared = self.mlp(
                x, Mlp(part.shared_intermediate_size, part.activation), f"{prefix}.{names.shared_experts}"
            )
            if part.shared_gate:
                gate = self.linear(x, f"{prefix}.{names.shared_gate}", 1)
                open_ = self.fresh(gate)
                tape.apply("sigmoid", [(gate, NEW)], open_, [open_])
                full = [(TOKENS, hidden * self.compute)]
                shared = tape.apply(
                    "mul", [(open_, NEW), (shared, NEW)], self.fresh(shared), [shared, open_], workspace=full
                )
            out = self.add(out, shared)
        return out

    def _routed(self, x: Value, part: MixtureOfExperts, name: str) -> Value:
        """Return the scores of the chosen experts, in fp32 or the compute dtype."""
        tape, used = self.tape, part.experts_per_token
        indices = tape.value(TOKENS, used, 8, needs_gradient=False)
        logits = self._router_logits(x, part, name)
        if part.softmax_of_chosen:
            top = tape.apply("topk", [(logits, NEW)], self.fresh(logits, used), [indices])
            share = self.fresh(top)
            return tape.apply("softmax", [(top, NEW)], share, [share], workspace=[(TOKENS, top.coefficient)])
        logits = self.cast(logits, 4)
        scores = self.fresh(logits)
        tape.apply("scores of experts", [(logits, NEW)], scores, [scores])
        if part.groups > 1 and not part.score_correction:
            scores = self.pointwise("groups that take part", scores, (self.fresh(scores, element_bytes=1),))
        share = tape.apply("topk", [(scores, NEW)], self.fresh(scores, used), [indices])
        if part.normalised:
            total = tape.apply("sum", [(share, SAME)], self.fresh(share, 1))
            ways, scratch = [(share, NEW), (total, NEW)], [(TOKENS, share.coefficient)]
            share = tape.apply("div", ways, self.fresh(share), [share, total], workspace=scratch)
        if part.score_scale != 1.0:
            share = self.pointwise("scale", share)
        return share if part.fp32_scores else self.cast(share, self.compute)

    def _router_logits(self, x: Value, part: MixtureOfExperts, name: str) -> Value:
        """Return the router's product; in fp32 it reads copies of its input and of its weight, and keeps both."""
        weight = self.weight(f"{name}.weight")
        if not part.fp32_router or self.setup.autocast or weight.copy_bytes:
            return self.linear(x, name, part.num_experts)
        wide, tape = self.cast(x, 4), self.tape
        saves = [wide] if weight.trainable else []
        if weight.element_bytes < 4:
            saves.append(tape.value(ONE, 4 * part.num_experts * self.spec.hidden_size, 1, part=Part.TEMPORARIES))
        return tape.apply(f"linear {name}", [(wide, VIEW)], tape.value(TOKENS, part.num_experts, 4), saves, [weight])

    def _experts(self, x: Value, chosen: Value, part: MixtureOfExperts, name: str) -> Value:
        """Return the weighted sum of the chosen experts: rows sorted by expert, grouped products."""
        tape, used, inner = self.tape, part.experts_per_token, part.intermediate_size
        row_order = tape.value(TOKENS, used, 8, needs_gradient=False)
        order = tape.value(TOKENS, used, 8, needs_gradient=False)
        back = tape.value(TOKENS, used, 8, needs_gradient=False)
        experts = tape.value(TOKENS, used, 8, needs_gradient=False)
        offsets = tape.value(ONE, part.num_experts, 4, needs_gradient=False)
        x = self.lowered(x)
        rows = tape.apply("gather rows", [(x, NEW)], self.fresh(x, x.width * used), [row_order])
        both = self._grouped(rows, f"{name}.gate_up_proj", 2 * inner * used, experts, offsets)
        gate, up = tape.view(both, inner * used), tape.view(both, inner * used)
        tape.apply("split", [(both, NEW)], [gate, up])
        if self.profile.activation == "fused":
            hidden = self.gated(gate, up)
        elif part.activation == "clamped-swiglu":
            hidden = self._clamped(gate, up)
        else:
            hidden = self.multiply(self.activated(gate), up)
        out = self._grouped(hidden, f"{name}.down_proj", x.width * used, experts, offsets)
        weights = tape.apply("gather weights", [(chosen, NEW)], self.fresh(chosen), [order])
        scaled = self.fresh(out, element_bytes=max(out.element_bytes, chosen.element_bytes))
        # A wider product has a wider gradient for either factor before it is cast to the factor's dtype.
        wider = 2 if scaled.element_bytes > out.element_bytes else 1
        scratch = [(TOKENS, wider * scaled.coefficient)]
        tape.apply("mul", [(out, NEW), (weights, NEW)], scaled, [out, weights], workspace=scratch)
        ordered = tape.apply("gather back", [(scaled, NEW)], self.fresh(scaled), [back])
        summed = tape.apply("sum over experts", [(ordered, NEW)], self.fresh(ordered, x.width))
        return self.cast(summed, rows.element_bytes)

    def _grouped(self, rows: Value, name: str, width: int, experts: Value, offsets: Value) -> Value:
        """Return each row times the matrix of its expert."""
        tape, weight = self.tape, self.weight(name)
        saves = [offsets, *([rows] if weight.trainable else [])]
        if weight.copy_kept and weight.copy_bytes:
            saves.append(tape.value(ONE, weight.copy_bytes, 1, part=Part.TEMPORARIES))
        out = tape.apply(f"grouped {name}", [(rows, NEW)], tape.value(TOKENS, width, self.compute), saves, [weight])
        bias = self.weights.get(f"{name}_bias")
        if bias is None:
            return out
        in_place = self.setup.config.activation_checkpointing != "selective"
        biased = tape.view(out) if in_place else self.fresh(out)
        return tape.apply("add bias", [(out, SAME)], biased, [experts], [bias])

    def _clamped(self, gate: Value, up: Value) -> Value:
        """Return gpt-oss's clamped SwiGLU: ``(up + 1) * (gate * sigmoid(gate * alpha))``, both clamped."""
        tape = self.tape
        gate, up = self.pointwise("clamp", gate, (gate,)), self.pointwise("clamp", up, (up,))
        more = self.pointwise("add one", up)
        scaled = self.pointwise("scale", gate)
        open_ = self.fresh(scaled)
        tape.apply("sigmoid", [(scaled, NEW)], open_, [open_])
        return self.multiply(more, self.multiply(gate, open_))
