"""What a training step is given: tokens, targets, and tables that depend on positions only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memplan.model.spec import Attention, ModelSpec
from memplan.trace.reference.parts import Tables
from memplan.trace.reference.run_options import ReferenceOptions


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch and its tables."""

    ids: Tensor  # Tokens (batch, tokens)
    targets: Tensor  # Tokens to predict, already shifted
    tables: tuple[Tables, ...]  # One for each rotary base
    positions: Tensor | None  # Positions (1, tokens) for learned position embeddings

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        yield from (self.ids, self.targets)
        for table in self.tables:
            yield from (tensor for tensor in table if tensor is not None)
        if self.positions is not None:
            yield self.positions


def batch_of(spec: ModelSpec, options: ReferenceOptions, batch: int, tokens: int, device: str) -> Batch:
    """Return a batch of ``batch`` sequences of ``tokens`` tokens."""
    ids = torch.zeros((batch, tokens), dtype=torch.long, device=device)
    positions = torch.arange(tokens, device=device)[None] + spec.reserved_positions if spec.learned_positions else None
    return Batch(ids, torch.zeros_like(ids), _tables(spec, tokens, options, device), positions)


def _tables(spec: ModelSpec, tokens: int, options: ReferenceOptions, device: str) -> tuple[Tables, ...]:
    """Return the rotary tables for ``tokens`` positions, in the compute dtype, and a mask where one is needed."""
    mask = None
    if any(isinstance(run.layer.attention, Attention) and _eager(run.layer.attention) for run in spec.runs):
        mask = torch.ones((tokens, tokens), dtype=torch.bool, device=device).triu(1)
    width = _rotary_width(spec)
    if not width:
        return (Tables(torch.empty(0, device=device), torch.empty(0, device=device), mask),)
    steps = torch.arange(0, width, 2, device=device).float() / width
    angles = torch.outer(torch.arange(tokens, device=device).float(), 1.0 / 10000.0**steps)
    angles = torch.cat((angles, angles), -1)
    dtype = options.compute_dtype
    return tuple(Tables(angles.cos().to(dtype), angles.sin().to(dtype), mask) for _ in range(spec.rotary_tables))


def _eager(part: Attention) -> bool:
    return part.sinks or part.logit_softcap > 0


def _rotary_width(spec: ModelSpec) -> int:
    """Return how many dimensions of a head are rotated, in layers that rotate any."""
    parts = [run.layer.attention for run in spec.runs]
    widths = [
        part.rotary_dim if isinstance(part, Attention) else getattr(part, "qk_rope_head_dim", 0) for part in parts
    ]
    return max(widths)
