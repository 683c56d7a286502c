"""Multi-head attention on a tape, by kernel or step by step."""

from __future__ import annotations

from memplan.blocks.base import ONE, TOKENS, Operations
from memplan.forms import Quantity
from memplan.model.spec import Attention
from memplan.tape import NEW, SAME, Value
from memplan.units import round_up

RANDOM_STATE_BYTES = {"flash": 24, "cudnn": 16, "efficient": 16}
"""Seed and offset of attention's dropout, returned in any case: two numbers and one unused by
flash, two by the others (native_functions.yaml, ``_scaled_dot_product_*_attention``)."""


class AttentionOperations(Operations):
    """Rotary positions, attention kernels, and attention with grouped queries."""

    def rotary(self, x: Value, head_dim: int, rotary_dim: int) -> Value:
        """Return ``x`` with the first ``rotary_dim`` of every head's dimensions rotated."""
        if not rotary_dim:
            return x
        if self.profile.rotary == "fused":
            return self.pointwise("rotary", x)
        if rotary_dim == head_dim:
            return self._rotated(x)
        part = x.width // head_dim * rotary_dim
        turned = self.tape.apply("slice", [(x, NEW)], self.tape.view(x, part))
        kept = self.tape.apply("slice", [(x, NEW)], self.tape.view(x, x.width - part))
        return self.tape.apply("cat", [(self._rotated(turned), SAME), (kept, SAME)], self.fresh(x))

    def _rotated(self, x: Value) -> Value:
        """Return ``x * cos + cat(-second half, first half) * sin``."""
        tape, half = self.tape, x.width // 2
        second = tape.apply("slice", [(x, NEW)], tape.view(x, half))
        negative = self.pointwise("neg", second)
        first = tape.apply("slice", [(x, NEW)], tape.view(x, half))
        turned = tape.apply("cat", [(negative, SAME), (first, SAME)], self.fresh(x))
        by_cos = self.pointwise("mul cos", x)
        by_sin = self.pointwise("mul sin", turned)
        return tape.apply("add", [(by_cos, SAME), (by_sin, SAME)], self.fresh(x))

    def attend(
        self, query: Value, key: Value, value: Value, heads: int, groups: int, width: int, part: Attention | None = None
    ) -> Value:
        """Return attention; ``width`` is that of a head, ``groups`` the key and value heads."""
        query, key, value = self.lowered(query), self.lowered(key), self.lowered(value)
        kernel = self.profile.attention
        if part is not None and (part.sinks or part.logit_softcap):
            return self._eager_attention(query, key, value, part)
        if kernel == "math":
            return self._math_attention(query, key, value, heads, groups)
        if kernel == "efficient" and groups != heads:
            key, value = self._repeated(key, heads // groups), self._repeated(value, heads // groups)
        out = self.fresh(query, heads * (value.width // (groups if kernel != "efficient" else heads)))
        statistics = self.tape.value(TOKENS, heads, 4)
        saves = [query, key, value, out, statistics, self.tape.value(ONE, RANDOM_STATE_BYTES[kernel], 1)]
        scratch = self._flash_workspace(heads, groups, width) if kernel == "flash" else []
        return self.tape.apply("attention", [(query, NEW), (key, NEW), (value, NEW)], out, saves, workspace=scratch)

    def _flash_workspace(self, heads: int, groups: int, width: int) -> list[tuple[Quantity, int]]:
        """Return what flash attention's backward allocates inside itself.

        Source:
            flash_api.cpp, ``mha_bwd``: softmax_d and dq_accum in fp32 over lengths rounded to
            128, dk and dv for every query head where heads are grouped.
        """
        rounded = round_up(width, 32 if width <= 128 else 64)
        scratch = [(Quantity.PADDED_TOKENS, 4 * heads * (1 + rounded))]
        if groups != heads:
            scratch.append((TOKENS, 2 * self.compute * heads * width))
        return scratch

    def _eager_attention(self, query: Value, key: Value, value: Value, part: Attention) -> Value:
        """Return attention step by step, as soft caps and sinks need it (transformers' eager_attention_forward)."""
        tape, heads = self.tape, part.num_heads
        if part.num_key_value_heads != heads:
            times = heads // part.num_key_value_heads
            key, value = self._repeated(key, times), self._repeated(value, times)
        scores = tape.value(Quantity.SCORES, heads, self.compute)
        tape.apply("scores", [(query, NEW), (key, NEW)], scores, [query, key])
        scores = self.pointwise("scale", scores)
        if part.logit_softcap:
            bounded = self.fresh(scores := self.pointwise("scale", scores))
            tape.apply("tanh", [(scores, NEW)], bounded, [bounded])
            scores = self.pointwise("scale", bounded)
        scores = self.pointwise("mask", scores)
        weights = self._with_sinks(scores, heads) if part.sinks else self._softmax(scores)
        weights = self.dropped(weights)
        out = self.fresh(query)
        return tape.apply("weighted sum", [(weights, NEW), (value, NEW)], out, [weights, value])

    def _softmax(self, scores: Value) -> Value:
        """Return probabilities, formed in fp32 and cast."""
        wide = self.cast(scores, 4)
        return self.cast(self._probabilities(wide), self.compute)

    def _probabilities(self, scores: Value) -> Value:
        """Return the softmax, whose backward first forms the product of gradient and result (SoftMax.cu)."""
        softmax = self.fresh(scores)
        full = [(scores.quantity, scores.coefficient)]
        return self.tape.apply("softmax", [(scores, NEW)], softmax, [softmax], workspace=full)

    def _with_sinks(self, scores: Value, heads: int) -> Value:
        """Return probabilities of scores and one learned sink per head, less the sink's (gpt-oss)."""
        tape = self.tape
        sinks = self.weights[f"{self.spec.names.attention}.{self.spec.names.sinks}"]
        joined = tape.value(Quantity.SCORES_AND_SINK, heads, scores.element_bytes)
        tape.apply("cat sinks", [(scores, SAME)], joined, weights=[sinks])
        top, places = tape.value(TOKENS, heads, scores.element_bytes), tape.value(TOKENS, heads, 8)
        tape.apply("max", [(joined, NEW)], top, [places])
        full = [(joined.quantity, joined.coefficient)]
        shifted = tape.apply("sub", [(joined, SAME), (top, NEW)], self.fresh(joined), workspace=full)
        softmax = self._probabilities(shifted)
        cut = Value(softmax.storage, scores.quantity, scores.coefficient, scores.element_bytes)
        return tape.apply("slice", [(softmax, NEW)], cut)

    def _repeated(self, x: Value, times: int) -> Value:
        """Return every head of ``x`` repeated."""
        return self.tape.apply("repeat", [(x, NEW)], self.fresh(x, x.width * times))

    def _math_attention(self, query: Value, key: Value, value: Value, heads: int, groups: int) -> Value:
        """Return attention that keeps its probabilities, in fp32 (attention.cpp, _scaled_dot_product_attention_math)."""
        tape = self.tape
        out_bytes = query.element_bytes
        query, key, value = self.cast(query, 4), self.cast(key, 4), self.cast(value, 4)
        if groups != heads:
            key, value = self._repeated(key, heads // groups), self._repeated(value, heads // groups)
        query, key = self.pointwise("scale", query), self.pointwise("scale", key)
        scores = tape.value(Quantity.SCORES, heads, 4)
        tape.apply("scores", [(query, NEW), (key, NEW)], scores, [query, key])
        masked = tape.apply("mask", [(scores, SAME)], self.fresh(scores))
        probabilities = self.dropped(self._probabilities(masked))
        out = self.fresh(query, heads * (value.width // heads))
        tape.apply("weighted sum", [(probabilities, NEW), (value, NEW)], out, [probabilities, value])
        return self.cast(out, out_bytes)

    def attention(self, x: Value, part: Attention, prefix: str) -> Value:
        """Return what multi-head attention adds to the residual stream."""
        names, tape = self.spec.names, self.tape
        if part.fused_qkv:
            fused = self.linear(x, f"{prefix}.{names.qkv}", part.query_size + 2 * part.key_value_size)
            views = [tape.view(fused, w) for w in (part.query_size, part.key_value_size, part.key_value_size)]
            tape.apply("split", [(fused, NEW)], views)
            query, key, value = views
        else:
            query = self.linear(x, f"{prefix}.{names.query}", part.query_size)
            key = self.linear(x, f"{prefix}.{names.key}", part.key_value_size)
            value = self.linear(x, f"{prefix}.{names.value}", part.key_value_size)
        if part.query_key_norm is not None:
            per_head = part.query_key_norm_scope == "head"
            query = self.norm(
                query,
                part.query_key_norm,
                f"{prefix}.{names.query_norm}",
                part.head_dim if per_head else part.query_size,
            )
            key = self.norm(
                key,
                part.query_key_norm,
                f"{prefix}.{names.key_norm}",
                part.head_dim if per_head else part.key_value_size,
            )
        query = self.rotary(query, part.head_dim, part.rotary_dim)
        key = self.rotary(key, part.head_dim, part.rotary_dim)
        out = self.attend(query, key, value, part.num_heads, part.num_key_value_heads, part.head_dim, part)
        if 0 < part.rotary_dim < part.head_dim and self._keeps_heads_first(part):
            out = tape.apply("copy", [(out, SAME)], self.fresh(out))
        return self.linear(out, f"{prefix}.{names.output}", self.spec.hidden_size)

    def _keeps_heads_first(self, part: Attention | None = None) -> bool:
        """Whether attention's result has the layout of a query that was concatenated, heads before tokens.

        Flash and cuDNN allocate the result like the query; joining the heads copies it then.
        """
        eager = part is not None and (part.sinks or part.logit_softcap > 0)
        composite = part is None or self.profile.rotary == "composite"
        return composite and not eager and self.profile.attention in ("flash", "cudnn")
