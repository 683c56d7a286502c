"""Multi-head latent attention: keys and values rise from one narrow vector per token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memplan.model.spec import LatentAttention, ModelSpec
from memplan.trace.reference.operations import attention
from memplan.trace.reference.parts import Linear, NormPart, Tables, attach, rotary
from memplan.trace.reference.run_options import Runtime


class LatentPart(nn.Module):
    """Latent attention as DeepSeek's released code has it.

    Source:
        ``DeepseekV3Attention`` in transformers 5, ``models/deepseek_v3/modeling_deepseek_v3.py``.
    """

    def __init__(self, spec: ModelSpec, part: LatentAttention, run: Runtime, device: torch.device) -> None:
        super().__init__()
        self.part, self.run = part, run
        names, hidden = spec.names, spec.hidden_size

        def linear(name: str, rows: int, columns: int, bias: bool = False) -> nn.Module:
            return attach(self, name, Linear(rows, columns, run, device, bias=bias, transposed=spec.transposed_linear))

        def norm(name: str, size: int) -> nn.Module:
            return attach(self, name, NormPart(part.compressed_norm, size, run, device))

        queries, rank = part.num_heads * part.qk_head_dim, part.kv_lora_rank
        if part.q_lora_rank:
            self._query: tuple[nn.Module, ...] = (
                linear(names.query_down, part.q_lora_rank, hidden, part.bias),
                norm(names.query_down_norm, part.q_lora_rank),
                linear(names.query_up, queries, part.q_lora_rank),
            )
        else:
            self._query = (linear(names.query, queries, hidden),)
        self._down = (linear(names.key_value_down, rank + part.qk_rope_head_dim, hidden, part.bias),)
        self._norm = (norm(names.key_value_down_norm, rank),)
        self._up = (linear(names.key_value_up, part.num_heads * (part.qk_nope_head_dim + part.v_head_dim), rank),)
        self._output = (linear(names.output, hidden, part.num_heads * part.v_head_dim, part.bias),)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """Return what attention adds to the residual stream (batch, tokens, hidden)."""
        part, run, options = self.part, self.run, self.run.options
        batch, tokens, _ = x.shape
        query = x
        for step in self._query:
            query = step(query)
        query = query.view(batch, tokens, part.num_heads, -1).transpose(1, 2)
        unrotated, rotated = torch.split(query, [part.qk_nope_head_dim, part.qk_rope_head_dim], -1)
        latent, key_rotated = self._down[0](x).split([part.kv_lora_rank, part.qk_rope_head_dim], -1)
        latent = self._norm[0](latent)
        key_rotated = key_rotated.view(batch, 1, tokens, -1)
        rotated = rotary(rotated, tables, part.qk_rope_head_dim, run)
        key_rotated = rotary(key_rotated, tables, part.qk_rope_head_dim, run)
        query = torch.cat((unrotated, rotated), -1)
        expanded = self._up[0](latent).view(batch, tokens, part.num_heads, -1).transpose(1, 2)
        key_unrotated, value = torch.split(expanded, [part.qk_nope_head_dim, part.v_head_dim], -1)
        key = torch.cat((key_unrotated, key_rotated.expand(-1, part.num_heads, -1, -1)), -1)
        out = attention(
            run.lowered(query),
            run.lowered(key),
            run.lowered(value),
            kernel=options.profile.attention,
            target=options.target,
            dropout=options.attention_dropout if self.training else 0.0,
            scale=part.scale,
        )
        result: Tensor = self._output[0](out.transpose(1, 2).reshape(batch, tokens, -1))
        return result
