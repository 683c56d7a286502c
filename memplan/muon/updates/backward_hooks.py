"""What happens to a gradient as soon as backward has formed it: it goes to its store, or is used and freed."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memplan.muon.updates.handles import Handle

Group = dict[str, Any]


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
        if use is None:
            return
        now = self.releasing and not self.accumulating
        handle.collect(keep=not now)
        if now:
            use(handle, group)
