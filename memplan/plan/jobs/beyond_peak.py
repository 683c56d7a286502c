"""What a job may hold beyond the peak of its step: as a compiler chooses, and what a CUDA graph keeps apart."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.plan.jobs.forms_by_regime import FormsByRegime
from memplan.step.regimes import regime_of

IN_LAYERS = ("forward", "second backward")
"""Instants of which some lie within layers, besides their backward."""
BEHIND = ("optimizer step", "gradient clipping")
"""Instants that a CUDA graph of forward and backward does not hold."""


def compiler_doubt_bytes(regimes: FormsByRegime, batch: int, length: int, most: Mapping[str, int]) -> int:
    """Return what a compiled step may take beyond the plan: Inductor chooses some kernels by timing them on the card.

    Args:
        batch: Sequences per micro-batch.
        length: Tokens per sequence.
        most: Requested bytes by instant.
    """
    if regimes.setup.config.compile == "none":
        return 0
    if regimes.setup.config.compile == "model":
        from memplan.step.compiled.compiled_model import padded_bytes

        return padded_bytes(regimes.model.spec, batch * length)
    from memplan.step.compiled_layers.compiled_layer import order_doubt_bytes

    layer = regimes.tapes(regime_of(regimes.own, regimes.setup, batch, length))[1].compiled
    assert layer is not None
    more = order_doubt_bytes(layer, batch, length, regimes.values(batch, length))
    in_layers = (size for name, size in most.items() if name in IN_LAYERS or name.startswith("layer"))
    return max(0, max(in_layers, default=0) + more - max(most.values()))


def apart_bytes(regimes: FormsByRegime, most: Mapping[str, int], always: int) -> int:
    """Return what is reserved beyond the peak because a CUDA graph's private pool and the update's scratch share no memory.

    Args:
        most: Requested bytes by instant.
        always: What is there throughout, but for gradients.
    """
    if not regimes.setup.captures_step:
        return 0
    behind = max(most.get(name, 0) for name in BEHIND)
    captured = max(size for name, size in most.items() if name not in BEHIND)
    return max(0, captured + behind - always - regimes.states.gradient_bytes - max(most.values()))
