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
from torch.utils._device import _device_constructors

from memplan.dryrun.terms.answers_given import RefusedError

FIRST_INDEX = 64
"""Index under which C++ knows ``cuda:0``; no script has so many devices of type ``meta``."""

_PLAIN = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
_FACTORIES = (
    "tensor",
    "as_tensor",
    "asarray",
    "arange",
    "empty_strided",
    *_PLAIN,
    *(f"{name}_like" for name in _PLAIN),
)
"""What makes tensors on a device that a script may name by its number alone."""


class _Own:
    """Number of the one GPU that is pretended."""

    index = 0


def inner_device(device: Any) -> Any:
    """Return what C++ is told in place of a device of CUDA's; other devices, and what is none, are returned as they are.

    Raises:
        RefusedError: It is another GPU than the one that is pretended.
    """
    named = _device(device)
    if named is None or named.type != "cuda":
        return device
    if named.index not in (None, _Own.index):
        raise RefusedError(
            f"the script puts something on {named}, and only cuda:{_Own.index} is pretended; run it as one process of one GPU"
        )
    return _DEVICE("meta", FIRST_INDEX + _Own.index)


def outer_device(device: Any) -> Any:
    """Return the device that Python is told, of one that C++ names."""
    if isinstance(device, _DEVICE) and device.type == "meta" and (device.index or 0) >= FIRST_INDEX:
        return _DEVICE("cuda", (device.index or 0) - FIRST_INDEX)
    return device


def _device(value: Any) -> torch.device | None:
    if isinstance(value, _DEVICE):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return _DEVICE("cuda", value)
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return _DEVICE(value)
    return None


class _AnyDevice(type):
    """Takes every device for one of its class, and makes real ones: a bare number is a GPU's, which C++ has none of."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _DEVICE)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            return _DEVICE("cuda", args[0])
        return _DEVICE(*args, **options)


class _Device(metaclass=_AnyDevice):
    """Stands for ``torch.device``."""


_DEVICE = torch.device


@contextmanager
def named_devices(index: int = 0) -> Iterator[None]:
    """Let tensors be moved to CUDA, and be there, while what is inside runs.

    Args:
        index: Number of the one GPU that is pretended.
    """

    def to_cuda(tensor: Tensor, device: Any = None, *rest: Any, **options: Any) -> Tensor:
        options.pop("memory_format", None)
        return tensor.to(inner_device(_DEVICE("cuda", index) if device is None else device), *rest, **options)

    properties = {
        "is_cuda": property(lambda tensor: tensor.fake_device.type == "cuda"),
        "is_meta": property(lambda tensor: tensor.fake_mode.in_kernel_invocation),
        "is_cpu": property(lambda tensor: tensor.fake_device.type == "cpu"),
        "get_device": lambda tensor: -1 if tensor.fake_device.type == "cpu" else tensor.fake_device.index or 0,
    }
    own = {"index": index}
    _device_constructors()  # kept, as C++ knows them: a default device is for these
    with (
        replaced(_Own, own),
        replaced(FakeTensor, {**properties, "__new__": staticmethod(_made)}),
        replaced(
            Tensor,
            {
                "to": _first_a_device(_with_inner_devices(Tensor.to)),
                "cuda": to_cuda,
                "_make_subclass": staticmethod(_subclassed(Tensor._make_subclass)),
            },
        ),
        replaced(torch.nn.Module, {"to": _first_a_device(torch.nn.Module.to)}),
        replaced(torch, {"device": _Device}),
        replaced(torch, {name: _with_inner_devices(getattr(torch, name)) for name in _FACTORIES}),
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


def _subclassed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes subclasses of tensors, of fake ones too: parameters of 4 bits, say."""
    classes: dict[type, type] = {}

    def made(cls: Any, data: Tensor, require_grad: bool = False, **options: Any) -> Any:
        if not isinstance(data, FakeTensor) or issubclass(cls, FakeTensor):
            return function(cls, data, require_grad, **options)
        if cls not in classes:
            classes[cls] = type(cls)(cls.__name__, (cls, FakeTensor), {"__module__": cls.__module__})
        tensor = data.detach()
        tensor.__class__ = classes[cls]
        return tensor.requires_grad_(require_grad)

    return made


def _with_inner_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function to whose C++ a device of CUDA's is named as C++ knows it."""

    def named(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = inner_device(options["device"])
        return function(
            *[inner_device(value) if isinstance(value, str | _DEVICE) else value for value in args], **options
        )

    return named


def _first_a_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that takes a bare number for a GPU's."""

    def moved(target: Any, *args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (_DEVICE("cuda", args[0]), *args[1:])
        return function(target, *args, **options)

    return moved


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
