"""Multi-head latent attention on a tape."""

from __future__ import annotations

from memplan.model.spec import LatentAttention
from memplan.step.blocks.attention import FLASH_WIDTH_MULTIPLE, AttentionOperations
from memplan.step.tapes.tape import NEW, SAME, Value
from memplan.units import round_up


class LatentOperations(AttentionOperations):
    """Keys and values that rise from one narrow vector per token (DeepSeek)."""

    def latent_attention(self, x: Value, part: LatentAttention, prefix: str) -> Value:
        """Return what multi-head latent attention adds to the residual stream."""
        names, tape, heads = self.settings.names, self.tape, part.num_heads
        with tape.holding(x):
            risen_query = self._query(x, part, prefix)
            kept, turned = self._split(risen_query, heads * part.qk_nope_head_dim, heads * part.qk_rope_head_dim)
            with tape.holding(risen_query):
                down = self.linear(x, f"{prefix}.{names.key_value_down}", part.kv_lora_rank + part.qk_rope_head_dim)
                latent, key_turned = self._split(down, part.kv_lora_rank, part.qk_rope_head_dim)
                latent = self.norm(latent, part.norm, f"{prefix}.{names.key_value_down_norm}", part.kv_lora_rank)
                turned = self.rotary(turned, part.qk_rope_head_dim, part.qk_rope_head_dim)
                key_turned = self.rotary(key_turned, part.qk_rope_head_dim, part.qk_rope_head_dim)
                ways = [(kept, SAME), (turned, SAME)]
                query = tape.apply("cat", ways, self.fresh(kept, heads * part.qk_head_dim), packs=False)
                inner = heads * (part.qk_nope_head_dim + part.v_head_dim)
                risen = self.linear(latent, f"{prefix}.{names.key_value_up}", inner)
                key_kept, value = self._split(risen, heads * part.qk_nope_head_dim, heads * part.v_head_dim)
                ways = [(key_kept, SAME), (key_turned, NEW)]
                key = tape.apply("cat", ways, self.fresh(kept, heads * part.qk_head_dim), packs=False)
                value.apart = True
                with tape.holding(turned, latent, key_turned, query, risen, key):
                    return self._output(query, key, value, part, prefix)

    def _query(self, x: Value, part: LatentAttention, prefix: str) -> Value:
        """Return the query, compressed and risen again where the model does that."""
        names, queries = self.settings.names, part.num_heads * part.qk_head_dim
        if not part.q_lora_rank:
            return self.linear(x, f"{prefix}.{names.query}", queries)
        down = self.linear(x, f"{prefix}.{names.query_down}", part.q_lora_rank)
        normed = self.norm(down, part.norm, f"{prefix}.{names.query_down_norm}", part.q_lora_rank)
        return self.linear(normed, f"{prefix}.{names.query_up}", queries)

    def _split(self, x: Value, first: int, second: int) -> tuple[Value, Value]:
        """Return two views of ``x``, of these widths."""
        views = self.tape.view(x, first), self.tape.view(x, second)
        self.tape.apply("split", [(x, NEW)], views, packs=False)
        return views

    def _output(self, query: Value, key: Value, value: Value, part: LatentAttention, prefix: str) -> Value:
        """Return attention, whose heads lie before tokens since queries were concatenated, and its projection."""
        heads = part.num_heads
        out = self.attend(query, key, value, heads, heads)
        cut = self.profile.attention == "flash" and round_up(part.qk_head_dim, FLASH_WIDTH_MULTIPLE) != part.v_head_dim
        first = self.profile.attention in ("flash", "cudnn", "math") and not self.settings.regime.one_token
        with self.tape.holding(out):
            out = self.copied(out, moves=heads > 1 and (first or cut))
            with self.tape.holding(out):
                return self.linear(out, f"{prefix}.{self.settings.names.output}", self.settings.hidden_size)
