"""What happens to gradients as backward forms them, and clipping by the norm of all of them, wherever they are kept."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from memplan.muon.sharded.divisions import divisions_of, world_size
from memplan.muon.stores.gradient_stores import Gradient
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.updates.handles import Handle

_LEAST_NORM = 1e-6
"""Added to the norm before dividing by it, as in ``torch.nn.utils.clip_grad_norm_``."""


def clip_gradients_(
    gradients: Sequence[Gradient], parameters: Sequence[Tensor], max_norm: float, error_if_nonfinite: bool
) -> Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``; return the norm before, fp32.

    Args:
        gradients: What this rank has of them.
        parameters: Whose they are, in the same order: DTensors say which ranks have the rest.
        max_norm: At least 0.
        error_if_nonfinite: Whether a norm that is not finite is refused.

    Formula:
        ``g *= min(1, max_norm / (norm + 1e-6))``, ``norm`` the root of the sum of all squares.

    Raises:
        OptimizerError: If ``max_norm`` is no number of at least 0, or, where asked for, the norm is not finite.
    """
    if not float(max_norm) >= 0:
        raise OptimizerError(f"max_norm: expected a number of at least 0, got {max_norm!r}")
    if not gradients:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    norms = [gradient.norm() for gradient in gradients]
    total = _total([norm.to(norms[0].device) for norm in norms], parameters)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise OptimizerError("the norm of all gradients is not finite; no gradient was changed")
    factor = (max_norm / (total + _LEAST_NORM)).clamp_(max=1.0)
    for gradient, norm in zip(gradients, norms, strict=True):
        gradient.scale_(factor.to(norm.device))
    return total


def _total(norms: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Return the root of the sum of all squares; those of shards are summed over the ranks that divide a parameter."""
    together: dict[tuple[Any, ...], list[Tensor]] = {}
    for norm, parameter in zip(norms, parameters, strict=True):
        together.setdefault(tuple(division.group for division in divisions_of(parameter)), []).append(norm)
    totals = []
    for groups, part in together.items():
        total: Tensor = torch.linalg.vector_norm(torch.stack(part))
        for group in groups:
            total = total.square()
            torch.distributed.all_reduce(total, group=group)
            total = total.sqrt()
        totals.append(total)
    return totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals))


Group = dict[str, Any]
_BEFORE_THE_SUM = (
    "gradient_format and released gradients take each gradient inside backward, before DistributedDataParallel sums it over the "
    "ranks, so that replicas would part: leave them out where there are several ranks"
)


class BackwardHooks:
    """Hooks of an optimizer's parameters; they do nothing once the optimizer is gone.

    Args:
        use: Method of the optimizer that updates a parameter and frees its gradient.

    Attributes:
        releasing: Whether a complete gradient is used at once.
        accumulating: Whether gradients only add up for now.
    """

    def __init__(self, use: Callable[[Handle, Group], None]) -> None:
        self.releasing = False
        self.accumulating = False
        self._use = WeakMethod(use)
        self._hooks: list[Any] = []

    def listen(self, parameters: Iterable[tuple[Handle, Group]]) -> None:
        """Register a hook for each gradient of ``parameters`` that backward completes."""
        for handle, group in parameters:
            self._hooks.append(handle.on_gradient(partial(self._formed, handle, group)))

    def release(self, parameters: Iterable[tuple[Handle, Group]]) -> None:
        """Use every gradient at once from now on."""
        if not self._hooks:
            self.listen(parameters)
        self.releasing = True

    @contextmanager
    def sums_only(self) -> Iterator[None]:
        """Within, gradients only add up."""
        self.accumulating = True
        try:
            yield
        finally:
            self.accumulating = False

    @torch.no_grad()
    def _formed(self, handle: Handle, group: Group) -> None:
        use = self._use()
        if use is None or handle.gradient(False) is None:  # another copy of the optimizer has taken it
            return
        if world_size() > 1:
            raise OptimizerError(_BEFORE_THE_SUM)
        now = self.releasing and not self.accumulating
        handle.collect(keep=not now)
        if now:
            use(handle, group)
