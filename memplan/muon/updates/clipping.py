"""Clipping by the norm of all gradients, wherever they are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memplan.muon.stores.optimizer_errors import OptimizerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memplan.muon.stores.gradient_stores import Gradient

_LEAST_NORM = 1e-6
"""Added to the norm before dividing by it, as in ``torch.nn.utils.clip_grad_norm_``."""


def clip_gradients_(gradients: Sequence[Gradient], max_norm: float, error_if_nonfinite: bool) -> Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``; return the norm before, fp32.

    Formula:
        ``g *= min(1, max_norm / (norm + 1e-6))``, ``norm`` the root of the sum of all squares.

    Raises:
        OptimizerError: If ``max_norm`` is no number of at least 0, or, where asked for, the norm is not finite.
    """
    if not float(max_norm) >= 0:
        raise OptimizerError(f"max_norm: expected a number of at least 0, got {max_norm!r}")
    if not gradients:
        return torch.zeros(())
    norms = [gradient.norm() for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    if error_if_nonfinite and not bool(total.isfinite()):
        raise OptimizerError("the norm of all gradients is not finite; no gradient was changed")
    factor = (max_norm / (total + _LEAST_NORM)).clamp_(max=1.0)
    for gradient, norm in zip(gradients, norms, strict=True):
        gradient.scale_(factor.to(norm.device))
    return total
