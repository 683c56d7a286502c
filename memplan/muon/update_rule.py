"""Muon's update rule, on whole tensors and with no bound on memory: what ``Muon.step`` does to one matrix.

    m  <-  m + (1 - momentum) * (g - m)                    m: the running mean of the gradients g
    u   =  g + momentum * (m - g)                          one step ahead (Nesterov); u = m without it
    o   =  newton_schulz(u)                                u with all its singular values near one
    w  <-  (1 - lr * weight_decay) * w - lr * ratio * o    ratio follows the shape (``steps.rate_ratio``)

``steps`` does the same a chunk at a time, with ``m`` and ``w`` in any format; tests hold it against this.
"""

import torch
from torch import Tensor

from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_reference
from memplan.muon.orthogonalisation.schedules import KELLER_JORDAN, Schedule
from memplan.muon.updates.steps import AdjustRate, rate_ratio


@torch.no_grad()
def muon_update_(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    *,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    schedule: Schedule = KELLER_JORDAN * 5,
    adjust: AdjustRate = "original",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Update a matrix ``w`` and its momentum ``m`` in place, given its gradient ``g``; all ``(rows, columns)``, fp32.

    Args:
        w: The matrix.
        g: Its gradient; not changed.
        m: Its momentum, zeros before the first step.
        lr: Learning rate.
        weight_decay: Decoupled: the matrix shrinks by ``lr * weight_decay``.
        momentum: Decay of the running mean.
        nesterov: Whether the update looks one step ahead.
        schedule: Newton-Schulz coefficients, one triple for each iteration.
        adjust: How the rate follows the shape.
        dtype: Precision of Newton-Schulz.

    Source:
        https://kellerjordan.github.io/posts/muon/

    Example:
        >>> w, m = torch.zeros(2, 2), torch.zeros(2, 2)
        >>> muon_update_(w, torch.tensor([[3.0, 0.0], [0.0, -5.0]]), m, lr=0.1)
        >>> (w / 0.1).round(decimals=0)
        tensor([[-1.,  0.],
                [ 0.,  1.]])
    """
    m.lerp_(g, 1 - momentum)
    u = g.lerp(m, momentum) if nesterov else m
    o = newton_schulz_reference(u, schedule, dtype).float()
    w.mul_(1 - lr * weight_decay).sub_(o, alpha=lr * rate_ratio(adjust, *w.shape))
