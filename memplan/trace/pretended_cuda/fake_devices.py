"""Fake tensors that all of Python finds on ``cuda``, and torch's own C++ on ``meta``.

A build of torch without CUDA can neither guard a device of CUDA's nor run backward there. Its fake tensors ask Python
where they are, so that both can be told what they can work with. The index tells these devices from the plain ``meta``.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

FIRST_INDEX = 64
"""Index under which C++ knows ``cuda:0``; no script has so many devices of type ``meta``."""

BARE = torch.device("meta")
_DEVICE = torch.device
_ASKED = torch.ops.prim.device.default


def below(device: torch.device) -> torch.device:
    """Return the device that C++ is told in place of one of CUDA's; others are returned as they are."""
    return _DEVICE("meta", FIRST_INDEX + (device.index or 0)) if device.type == "cuda" else device


def outer_device(device: Any) -> Any:
    """Return the device that Python is told, of one that C++ names."""
    if isinstance(device, _DEVICE) and device.type == "meta" and (device.index or 0) >= FIRST_INDEX:
        return _DEVICE("cuda", (device.index or 0) - FIRST_INDEX)
    return device


PROPERTIES = {
    "is_cuda": property(lambda tensor: tensor.fake_device.type == "cuda"),
    "is_cpu": property(lambda tensor: tensor.fake_device.type == "cpu"),
    "get_device": lambda tensor: -1 if tensor.fake_device.type == "cpu" else tensor.fake_device.index or 0,
}
"""What a fake tensor answers of its device."""


def fake_tensor_of(
    cls: type[FakeTensor],
    mode: Any,
    bare: Tensor,
    device: torch.device,
    constant: Any = None,
    *_: Any,
    requires_grad: bool | None = None,
    **__: Any,
) -> FakeTensor:
    """Return a fake tensor whose operators are those of ``meta`` tensors, which every build of torch has.

    torch would take CUDA's, and break up what a build without CUDA knows no kernel for.
    """
    wanted = bare.requires_grad if requires_grad is None else requires_grad
    tensor: Any = Tensor._make_subclass(cls, bare, wanted, dispatch_device=True, device_for_backend_keys=BARE)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    tensor.fake_device, tensor.fake_mode = device, mode
    tensor.constant = constant if type(mode) is FakeTensorMode else None  # a mode of ours knows values itself
    tensor.pytype = tensor.dispatch_keys = tensor.real_tensor = None
    tensor.nonzero_memo = tensor.item_memo = tensor.unique_memo = None
    tensor.unique_consecutive_memo = tensor.nested_int_memo = None
    return tensor  # type: ignore[no-any-return]


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


@contextmanager
def all_replaced(values: Iterable[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
    """Set attributes of several classes or modules, one after the other, while what is inside runs."""
    with ExitStack() as stack:
        for owner, own in values:
            stack.enter_context(replaced(owner, own))
        yield


@contextmanager
def fake_cuda(index: int = 0) -> Iterator[None]:
    """Let torch's own fake tensors be on ``cuda`` in a build without it, while what is inside runs: on that card where none is named."""
    made: Any
    made, dispatched, run = FakeTensor.__new__, FakeTensor.__torch_dispatch__, FakeTensorMode.__torch_dispatch__

    def new(cls: Any, mode: Any, bare: Tensor, device: Any, *args: Any, **options: Any) -> FakeTensor:
        device = _DEVICE(device)
        if device.type != "cuda":
            return made(cls, mode, bare, device, *args, **options)  # type: ignore[no-any-return]
        named = index if device.index is None else device.index
        return fake_tensor_of(cls, mode, bare, _DEVICE("cuda", named), *args, **options)

    def requested(tensor: FakeTensor) -> torch.device:
        return BARE if tensor.fake_mode.in_kernel_invocation else below(tensor.fake_device)

    def dispatch(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return requested(args[0]) if func is _ASKED else dispatched(func, types, args, kwargs or {})

    def under_mode(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if "device" in options:
            options = {**options, "device": outer_device(options["device"])}
        return run(mode, func, types, args, options)

    handlers: dict[Any, Any] = fake_tensor._DISPATCH_META_HANDLERS
    original = handlers[_ASKED]
    plain = property(lambda tensor: tensor.fake_mode.in_kernel_invocation or tensor.fake_device.type == "meta")
    with ExitStack() as stack:
        stack.enter_context(replaced(FakeTensor, {**PROPERTIES, "is_meta": plain, "__new__": staticmethod(new)}))
        stack.enter_context(replaced(FakeTensor, {"__torch_dispatch__": classmethod(dispatch)}))
        stack.enter_context(replaced(FakeTensorMode, {"__torch_dispatch__": under_mode}))
        handlers[_ASKED] = lambda args: requested(args[0])
        try:
            yield
        finally:
            handlers[_ASKED] = original
