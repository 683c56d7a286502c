"""Multi-head attention on a tape, by kernel or step by step."""

from __future__ import annotations

from memplan.model.spec import Attention
from memplan.step.blocks.builder import ONE, TOKENS, Operations
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.tape import NEW, SAME, Value
from memplan.units import round_up

RANDOM_STATE_BYTES = {"flash": 24, "cudnn": 16, "efficient": 16}
"""Seed and offset of attention's dropout, returned in any case: two numbers and one unused by
flash, two by the others (native_functions.yaml, ``_scaled_dot_product_*_attention``)."""

FLASH_WIDTH_MULTIPLE = 8
"""Widths of a head that flash attention takes; others are padded (sdp_utils.cpp, attention.cpp ``pad_last_dim``)."""


class AttentionOperations(Operations):
    """Rotary positions, attention kernels, and attention with grouped queries."""

    # -------------------------------------------------------------- rotary positions
    def rotary(self, x: Value, head_dim: int, rotary_dim: int) -> Value:
        """Return ``x`` with the first ``rotary_dim`` of every head's dimensions rotated."""
        if not rotary_dim:
            return x
        with self.tape.holding(x):
            if self.profile.rotary == "fused":
                return self.tape.apply("rotary", [(x, NEW)], self.fresh(x), packs=True, custom=True)
            if rotary_dim == head_dim:
                return self._rotated(x)
            part = x.width // head_dim * rotary_dim
            turned = self._sliced(x, part)
            kept = self._sliced(x, x.width - part)
            ways = [(self._rotated(turned), SAME), (kept, SAME)]
            joined = self.fresh(x)
            joined.apart = False
            return self.tape.apply("cat", ways, joined, packs=False)

    def _sliced(self, x: Value, width: int) -> Value:
        return self.tape.apply("slice", [(x, NEW)], self.tape.view(x, width), packs=False)

    def _rotated(self, x: Value) -> Value:
        """Return ``x * cos + cat(-second half, first half) * sin``."""
        tape, half = self.tape, x.width // 2
        negative = self.pointwise("neg", self._sliced(x, half))
        first = self._sliced(x, half)
        turned = tape.apply("cat", [(negative, SAME), (first, SAME)], self.fresh(x), packs=False)
        with tape.holding(x, turned):
            by_cos = self.pointwise("mul cos", x, packs=True)
            by_sin = self.pointwise("mul sin", turned, packs=True)
            return tape.apply("add", [(by_cos, SAME), (by_sin, SAME)], self.fresh(x), packs=False)

    # -------------------------------------------------------------- kernels
    def attend(
        self, query: Value, key: Value, value: Value, heads: int, groups: int, part: Attention | None = None
    ) -> Value:
        """Return attention; ``groups`` are the key and value heads."""
        query, key, value = self.lowered(query), self.lowered(key), self.lowered(value)
        with self.tape.holding(query, key, value):
            if part is not None and (part.sinks or part.logit_softcap):
                return self._eager_attention(query, key, value, part)
            if self.profile.attention == "math":
                return self._math_attention(query, key, value, heads, groups)
            if self.profile.attention == "flash":
                return self._flash_attention(query, key, value, heads, groups)
            if self.profile.attention == "efficient" and groups != heads:
                key, value = self._repeated(key, heads // groups), self._repeated(value, heads // groups)
                groups = heads
            return self._kernel(query, key, value, heads, groups)

    def _kernel(
        self,
        query: Value,
        key: Value,
        value: Value,
        heads: int,
        groups: int,
        scratch: tuple[tuple[Quantity, int], ...] = (),
    ) -> Value:
        """Return attention by one kernel, which keeps its inputs, its result and one number per row of scores."""
        tape = self.tape
        out = self.fresh(query, heads * (value.width // groups))
        # The efficient kernel keeps its statistics in rows of a multiple of 32 (kAlignLSE in mem_eff_attention).
        rows = Quantity.ALIGNED_TOKENS if self.profile.attention == "efficient" else TOKENS
        statistics = tape.value(rows, heads, 4)
        random = tape.value(ONE, RANDOM_STATE_BYTES[self.profile.attention], 1)
        ways = [(query, NEW), (key, NEW), (value, NEW)]
        saves = [query, key, value, out, statistics, random]
        # The kernel of backward forms all three gradients, whichever of them are needed.
        unused = tuple((v.quantity, v.coefficient) for v, _ in ways if not v.needs_gradient)
        scratch = (*scratch, *unused)
        with tape.holding(query, key, value):
            return tape.apply("attention", ways, (out, statistics, random), saves, workspace=scratch, product=True)

    def _flash_attention(self, query: Value, key: Value, value: Value, heads: int, groups: int) -> Value:
        """Return flash attention, which wants heads of one width, a multiple of 8."""
        tape = self.tape
        widths = query.width // heads, key.width // groups, value.width // groups
        padded = round_up(max(widths), FLASH_WIDTH_MULTIPLE)
        given = ((query, heads, widths[0]), (key, groups, widths[1]), (value, groups, widths[2]))
        query, key, value = (v if width == padded else self._padded(v, count * padded) for v, count, width in given)
        out = self._kernel(query, key, value, heads, groups, self._flash_workspace(heads, groups, padded))
        tape.touch(query, key, value)
        return out if padded == widths[2] else self._sliced(out, heads * widths[2])

    def _padded(self, x: Value, width: int) -> Value:
        return self.tape.apply("pad", [(x, NEW)], self.fresh(x, width), packs=False)

    def _flash_workspace(self, heads: int, groups: int, width: int) -> tuple[tuple[Quantity, int], ...]:
        """Return what flash attention's backward allocates inside itself.

        Source:
            flash_api.cpp, ``mha_bwd``: softmax_d and dq_accum in fp32 over lengths rounded to
            128, dk and dv for every query head where heads are grouped.
        """
        rounded = round_up(width, 32 if width <= 128 else 64)
        rows = (Quantity.PADDED_TOKENS, 4 * heads * (1 + rounded))
        return (rows,) if groups == heads else (rows, (TOKENS, 2 * self.compute * heads * width))

    # -------------------------------------------------------------- step by step
    def _eager_attention(self, query: Value, key: Value, value: Value, part: Attention) -> Value:
        """Return attention step by step, as soft caps and sinks need it (transformers' eager_attention_forward)."""
        tape, heads = self.tape, part.num_heads
        if part.num_key_value_heads != heads:
            times = heads // part.num_key_value_heads
            key, value = self._repeated(key, times), self._repeated(value, times)
        with tape.holding(query, key, value):
            scores = self._scores(query, key, heads, self.compute)
            scores = self.pointwise("scale", scores)
            if part.logit_softcap:
                bounded = self.fresh(scores := self.pointwise("scale", scores))
                tape.apply("tanh", [(scores, NEW)], bounded, [bounded])
                scores = self.pointwise("scale", bounded)
            scores = self.pointwise("mask", scores, packs=True)
            if part.sinks:
                scores, weights = self._with_sinks(scores, heads)
            else:
                with tape.holding(scores):
                    weights = self._softmax(scores)
            with tape.holding(scores):
                with tape.holding(weights):
                    weights = self.dropped(weights)
                return self._weighted_sum(weights, value, query.width, heads)

    def _scores(self, query: Value, key: Value, heads: int, width: int) -> Value:
        """Return query times key; heads of several sequences that lie apart are copied together first."""
        tape = self.tape
        with tape.holding(query, key):
            query = self.copied(query, moves=self._lies_apart(query, heads))
            key = self.copied(key, moves=self._lies_apart(key, heads))
            scores = tape.value(Quantity.SCORES, heads, width)
            with tape.holding(query, key):
                saves = self.factors(query, key)
                return tape.apply("scores", [(query, NEW), (key, NEW)], scores, saves, product=True)

    def _weighted_sum(self, weights: Value, value: Value, width: int, heads: int) -> Value:
        """Return probabilities times value."""
        tape = self.tape
        value = self.copied(value, moves=self._lies_apart(value, heads))
        out = tape.value(TOKENS, width, value.element_bytes)
        with tape.holding(weights, value):
            ways = [(weights, NEW), (value, NEW)]
            return tape.apply("weighted sum", ways, out, self.factors(weights, value), product=True)

    def _lies_apart(self, x: Value, heads: int) -> bool:
        """Whether a product of matrices copies heads that lie between tokens: not of one sequence, token or head."""
        return x.apart and heads > 1 and not self.settings.regime.one_sequence and not self.settings.regime.one_token

    def _softmax(self, scores: Value) -> Value:
        """Return probabilities, formed in fp32 and cast."""
        return self.cast(self._probabilities(self.cast(scores, 4)), self.compute)

    def _probabilities(self, scores: Value) -> Value:
        """Return the softmax, whose backward first forms the product of gradient and result (SoftMax.cu)."""
        softmax = self.fresh(scores)
        full = [(scores.quantity, scores.coefficient)]
        return self.tape.apply("softmax", [(scores, NEW)], softmax, [softmax], workspace=full)

    def _with_sinks(self, scores: Value, heads: int) -> tuple[Value, Value]:
        """Return scores less the highest, and probabilities over them and one learned sink per head, without it (gpt-oss)."""
        tape = self.tape
        sinks = self.weights[f"{self.settings.names.attention}.{self.settings.names.sinks}"]
        joined = tape.value(Quantity.SCORES_AND_SINK, heads, scores.element_bytes)
        tape.apply("cat sinks", [(scores, SAME)], joined, weights=[sinks], packs=False)
        with tape.holding(joined):
            top, places = tape.value(TOKENS, heads, scores.element_bytes), tape.value(TOKENS, heads, 8)
            tape.apply("max", [(joined, NEW)], top, [places])
            full = [(joined.quantity, joined.coefficient)]
            ways = [(joined, SAME), (top, NEW)]
            shifted = tape.apply("sub", ways, self.fresh(joined), workspace=full, packs=False)
        with tape.holding(shifted):
            softmax = self._probabilities(shifted)
        cut = Value(softmax.storage, scores.quantity, scores.coefficient, scores.element_bytes)
        return shifted, tape.apply("slice", [(softmax, NEW)], cut, packs=False)

    def _repeated(self, x: Value, times: int) -> Value:
        """Return every head of ``x`` repeated."""
        with self.tape.holding(x):
            found = self.fresh(x, x.width * times)
            found.apart = False
            return self.tape.apply("repeat", [(x, NEW)], found, packs=False)

    def _math_attention(self, query: Value, key: Value, value: Value, heads: int, groups: int) -> Value:
        """Return attention that keeps its probabilities, in fp32 (attention.cpp, _scaled_dot_product_attention_math)."""
        tape = self.tape
        out_bytes = query.element_bytes
        query, key, value = self.cast(query, 4), self.cast(key, 4), self.cast(value, 4)
        wide = (query, key, value)
        query = self.pointwise("scale", query)
        square = (Quantity.SQUARE, 1)
        flags = tape.make("mask", tape.value(*square, 1, part=Part.TEMPORARIES), scratch=[square])
        mask = tape.make("mask", tape.value(*square, 4, part=Part.TEMPORARIES), flags)
        if groups != heads:
            key, value = self._repeated(key, heads // groups), self._repeated(value, heads // groups)
        with tape.holding(*wide, query, key, value, mask):
            scores = self._scores(query, self.pointwise("scale", key), heads, 4)
            masked = tape.apply("mask", [(scores, SAME)], self.fresh(scores), packs=False)
            probabilities = self._probabilities(masked)
            with tape.holding(probabilities):
                probabilities = self.dropped(probabilities)
            results = [probabilities]
            if out_bytes != 4:
                results.append(tape.make("cast", tape.value(Quantity.SCORES, heads, out_bytes), probabilities))
            with tape.holding(*results):
                width = heads * (value.width // heads)
                out = self._weighted_sum(probabilities, value, width, heads)
                return self.cast(out, out_bytes)

    # -------------------------------------------------------------- the whole part
    def attention(self, x: Value, part: Attention, prefix: str) -> Value:
        """Return what multi-head attention adds to the residual stream."""
        with self.tape.holding(x):
            query, key, value = self._projections(x, part, prefix)
            query.apart = key.apart = value.apart = True
            if part.query_key_norm is not None:
                with self.tape.holding(query, key, value):
                    query, key = self._normed(query, key, part, prefix)
            with self.tape.holding(query, key, value):
                query = self.rotary(query, part.head_dim, part.rotary_dim)
            with self.tape.holding(query, key, value):
                key = self.rotary(key, part.head_dim, part.rotary_dim)
            with self.tape.holding(query, key, value):
                out = self.attend(query, key, value, part.num_heads, part.num_key_value_heads, part)
                with self.tape.holding(out):
                    out = self.copied(out, moves=self._keeps_heads_first(part))
                with self.tape.holding(out):
                    return self.linear(out, f"{prefix}.{self.settings.names.output}", self.settings.hidden_size)

    def _projections(self, x: Value, part: Attention, prefix: str) -> tuple[Value, Value, Value]:
        """Return query, key and value: results of their own, or views of one."""
        names, tape = self.settings.names, self.tape
        sizes = (part.query_size, part.key_value_size, part.key_value_size)
        if part.fused_qkv:
            fused = self.linear(x, f"{prefix}.{names.qkv}", sum(sizes))
            query, key, value = (tape.view(fused, size) for size in sizes)
            tape.apply("split", [(fused, NEW)], (query, key, value), packs=False)
            return query, key, value
        query = self.linear(x, f"{prefix}.{names.query}", sizes[0])
        with tape.holding(query):
            key = self.linear(x, f"{prefix}.{names.key}", sizes[1])
            with tape.holding(key):
                return query, key, self.linear(x, f"{prefix}.{names.value}", sizes[2])

    def _normed(self, query: Value, key: Value, part: Attention, prefix: str) -> tuple[Value, Value]:
        """Return query and key normalised, each head alone or all together."""
        names, norm = self.settings.names, part.query_key_norm
        assert norm is not None
        per_head = part.query_key_norm_scope == "head"
        sizes = (part.head_dim, part.head_dim) if per_head else (part.query_size, part.key_value_size)
        first = self.norm(query, norm, f"{prefix}.{names.query_norm}", sizes[0])
        with self.tape.holding(first):
            return first, self.norm(key, norm, f"{prefix}.{names.key_norm}", sizes[1])

    def _keeps_heads_first(self, part: Attention) -> bool:
        """Whether attention's result has heads before tokens, so that joining the heads copies it.

        Products of matrices put it out so. Flash and cuDNN allocate it like the query, which is so where it was
        concatenated; what is cut out of padded heads lies apart in any case. With one head, and but for padding
        with one token, the two are the same.
        """
        if part.num_heads == 1:
            return False
        eager = part.sinks or part.logit_softcap > 0
        if not eager and self.profile.attention == "flash" and part.head_dim % FLASH_WIDTH_MULTIPLE:
            return True
        partial = 0 < part.rotary_dim < part.head_dim and self.profile.rotary == "composite"
        first = eager or self.profile.attention == "math" or (partial and self.profile.attention in ("flash", "cudnn"))
        return first and not self.settings.regime.one_token
