"""What libraries do to values of tensors, where these have none: they initialise them, and read numbers on the host."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _NoInitialisation(TorchFunctionMode):
    """Skips ``torch.nn.init``: tensors without memory need no numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[None]:
    """Make every tensor on ``meta``, and initialise none."""
    with _NoInitialisation(), torch.device("meta"):
        yield


class AnyNumber(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets ``item()`` of a tensor without memory return one, or true."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))
