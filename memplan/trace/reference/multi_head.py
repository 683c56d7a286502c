"""Attention of a reference model: multi-head with grouped queries, or latent, by kernel or step by step."""

import torch
from torch import Tensor, nn

from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, LatentAttention, ModelSpec, Norm
from memplan.trace.reference.operations import attention, eager_attention
from memplan.trace.reference.parts import Linear, NormPart, Tables, attach, parameter, rotary
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
        out = out.transpose(1, 2).reshape(batch, tokens, -1)  # and what the kernel made goes, where backward needs none
        result: Tensor = self._output[0](out)
        return result


class AttentionPart(nn.Module):
    """Multi-head attention with grouped queries."""

    def __init__(self, spec: ModelSpec, part: Attention, run: Runtime, device: torch.device) -> None:
        super().__init__()
        self.part, self.run = part, run
        names, hidden = spec.names, spec.hidden_size

        def linear(name: str, rows: int, columns: int, bias: bool) -> nn.Module:
            made = Linear(rows, columns, run, device, bias=bias, transposed=spec.transposed_linear)
            return attach(self, name, made)

        queries, keys = part.query_size, part.key_value_size
        self._sinks_name = names.sinks
        self._eager = part.sinks or part.logit_softcap > 0
        if part.sinks:
            self.register_parameter(names.sinks, parameter((part.num_heads,), "bias", run, device))
        if part.fused_qkv:
            self._qkv: tuple[nn.Module, ...] = (linear(names.qkv, queries + 2 * keys, hidden, part.qkv_bias),)
        else:
            self._qkv = (
                linear(names.query, queries, hidden, part.qkv_bias),
                linear(names.key, keys, hidden, part.qkv_bias),
                linear(names.value, keys, hidden, part.qkv_bias),
            )
        self._output = [linear(names.output, hidden, queries, part.output_bias)]
        self._norms: tuple[nn.Module, ...] = ()
        if part.query_key_norm is not None:
            self._add_norms(spec, part.query_key_norm, device)

    def _add_norms(self, spec: ModelSpec, norm: Norm, device: torch.device) -> None:
        part, names = self.part, spec.names
        per_head = part.query_key_norm_scope == "head"
        sizes = (part.head_dim, part.head_dim) if per_head else (part.query_size, part.key_value_size)
        if part.query_key_norm_scope == "each":
            raise CannotAnswerError(f"{spec.name} has a norm for each head, which memplan's own models have not")
        self._norms = tuple(
            attach(self, name, NormPart(norm, size, self.run, device))
            for name, size in zip((names.query_norm, names.key_norm), sizes, strict=True)
        )

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        """Return what attention adds to the residual stream (batch, tokens, hidden)."""
        query, key, value = self._projections(x)
        width = self.part.rotary_dim
        query = rotary(query, tables, width, self.run)
        key = rotary(key, tables, width, self.run)
        if self.part.norms_rotated:
            query, key = self._norms[0](query), self._norms[1](key)
        if self.part.scales_query:
            query = query * tables.cos.new_ones((query.shape[-2], 1)).to(query.dtype)
        out = self._attend(query, key, value, tables)
        batch, _, tokens, _ = out.shape
        out = out.transpose(1, 2).reshape(batch, tokens, -1)
        result: Tensor = self._output[0](out)
        return result

    def _projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, (batch, heads, tokens, width), normalised where asked.

        Heads are normalised before dimensions are exchanged, as models of transformers do: the fused
        kernel copies what is not contiguous, and attention's result would then be copied too.
        """
        part = self.part
        if part.fused_qkv:
            sizes = [part.query_size, part.key_value_size, part.key_value_size]
            query, key, value = self._qkv[0](x).split(sizes, dim=-1)
        else:
            query, key, value = (projection(x) for projection in self._qkv)
        if part.clip:
            query, key, value = (x.clamp_(-part.clip, part.clip) for x in (query, key, value))
        if self._norms and part.query_key_norm_scope == "full":
            query, key = self._norms[0](query), self._norms[1](key)
        query, key, value = (x.view(*x.shape[:-1], -1, part.head_dim) for x in (query, key, value))
        if self._norms and part.query_key_norm_scope == "head" and not part.norms_rotated:
            query, key = self._norms[0](query), self._norms[1](key)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, tables: Tables) -> Tensor:
        """Return attention; no kernel of torch knows sinks or soft caps, so those go step by step."""
        part, run, options = self.part, self.run, self.run.options
        dropout = options.attention_dropout if self.training else 0.0
        query, key, value = run.lowered(query), run.lowered(key), run.lowered(value)
        if self._eager and tables.mask is not None:
            sinks = self.get_parameter(self._sinks_name) if part.sinks else None
            return eager_attention(
                query,
                key,
                value,
                tables.mask,
                run,
                scale=part.scale,
                softcap=part.logit_softcap,
                sinks=sinks,
                dropout=dropout,
            )
        kernel = options.profile.attention
        return attention(query, key, value, kernel=kernel, target=options.target, dropout=dropout, scale=part.scale)
