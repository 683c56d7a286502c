"""What a pretended GPU is called: ``cuda`` by all of Python, and a device of type ``meta`` by torch's own C++.

A build of torch without CUDA can neither move a tensor to CUDA nor run backward there. Its fake tensors ask Python
where they are, so that both can be told what they can work with. The index tells these devices from the plain ``meta`` of
scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FIRST_INDEX = 64
"""Index under which C++ knows ``cuda:0``; no script has so many devices of type ``meta``."""


def inner_device(device: Any) -> Any:
    """Return what C++ is told in place of a device of CUDA's; other devices, and what is none, are returned as they are."""
    named = _device(device)
    if named is None or named.type != "cuda":
        return device
    return torch.device("meta", FIRST_INDEX + (named.index or 0))


def outer_device(device: Any) -> Any:
    """Return the device that Python is told, of one that C++ names."""
    if isinstance(device, torch.device) and device.type == "meta" and (device.index or 0) >= FIRST_INDEX:
        return torch.device("cuda", (device.index or 0) - FIRST_INDEX)
    return device


def _device(value: Any) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return torch.device(value)
    return None


@contextmanager
def named_devices() -> Iterator[None]:
    """Let tensors be moved to CUDA, and be there, while what is inside runs."""

    def to_cuda(tensor: Tensor, device: Any = None, *rest: Any, **options: Any) -> Tensor:
        options.pop("memory_format", None)
        if isinstance(device, int) and not isinstance(device, bool):
            device = torch.device("cuda", device)
        return tensor.to(inner_device(device or torch.device("cuda", 0)), *rest, **options)

    properties = {
        "is_cuda": property(lambda tensor: tensor.fake_device.type == "cuda"),
        "is_meta": property(lambda tensor: tensor.fake_mode.in_kernel_invocation),
        "is_cpu": property(lambda tensor: tensor.fake_device.type == "cpu"),
        "get_device": lambda tensor: -1 if tensor.fake_device.type == "cpu" else tensor.fake_device.index or 0,
    }
    with (
        replaced(FakeTensor, {**properties, "__new__": staticmethod(_made)}),
        replaced(Tensor, {"to": _with_inner_devices(Tensor.to), "cuda": to_cuda}),
        replaced(
            torch, {name: _with_inner_devices(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")}
        ),
    ):
        yield


def _made(
    cls: type[FakeTensor],
    mode: Any,
    bare: Tensor,
    device: torch.device,
    *_: Any,
    requires_grad: bool | None = None,
    **__: Any,
) -> FakeTensor:
    """Return a fake tensor whose operators are those of ``meta`` tensors, which every build of torch has.

    torch would take CUDA's, and break up what a build without CUDA knows no kernel for.
    """
    wanted = bare.requires_grad if requires_grad is None else requires_grad
    tensor: Any = Tensor._make_subclass(cls, bare, wanted, dispatch_device=True, device_for_backend_keys=_BARE)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    tensor.fake_device, tensor.fake_mode = device, mode
    tensor.constant = tensor.pytype = tensor.dispatch_keys = tensor.real_tensor = None
    tensor.nonzero_memo = tensor.item_memo = tensor.unique_memo = None
    tensor.unique_consecutive_memo = tensor.nested_int_memo = None
    return tensor  # type: ignore[no-any-return]


_BARE = torch.device("meta")


def _with_inner_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to whose C++ a device of CUDA's is named as C++ knows it."""

    def named(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = inner_device(options["device"])
        return function(
            *[inner_device(value) if isinstance(value, str | torch.device) else value for value in args], **options
        )

    return named


@contextmanager
def replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of a class or module while what is inside runs."""
    own = vars(owner)
    saved = {name: own[name] for name in values if name in own}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in saved:
                setattr(owner, name, saved[name])
            else:
                delattr(owner, name)
