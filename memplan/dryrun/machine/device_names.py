"""What a pretended GPU is called: ``cuda`` by all of Python, and a device of type ``meta`` by torch's own C++.

Its fake tensors are told apart by :mod:`memplan.trace.pretended_cuda.fake_devices`; here is what a script calls devices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

from memplan.dryrun.terms.outcome import RefusedError
from memplan.trace.pretended_cuda.fake_devices import PROPERTIES, all_replaced, below, fake_tensor_of, replaced

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
    """Number of the one GPU that is pretended, and torch's own functions that name devices."""

    index = 0
    names: tuple[tuple[Any, dict[str, Any]], ...] = ()


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
    return below(_DEVICE("cuda", _Own.index))


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


_DTYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Long": torch.int64,
    "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
}  # fmt: skip
"""Dtypes of the classes that older scripts make tensors by: ``torch.cuda.FloatTensor`` and others."""


class _TypedTensor(type):
    """Makes the classes of tensors on the GPU: called with sizes or data, they return a tensor there."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> Tensor:
        if all(isinstance(size, int) for size in args):
            return torch.empty(args, dtype=cls.dtype, device="cuda")
        return torch.as_tensor(args[0], dtype=cls.dtype).to("cuda")

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype == cls.dtype


def _typed_tensors() -> dict[str, _TypedTensor]:
    """Return stand-ins for ``torch.cuda.FloatTensor`` and the like."""
    return {f"{name}Tensor": _TypedTensor(f"{name}Tensor", (), {"dtype": dtype}) for name, dtype in _DTYPES.items()}


def _of_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Tensor.type``, to which a class of tensors on the GPU may be given, or its name."""
    names = {f"torch.cuda.{name}Tensor": dtype for name, dtype in _DTYPES.items()}

    def typed(tensor: Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        wanted = (
            dtype.dtype if isinstance(dtype, _TypedTensor) else names.get(dtype) if isinstance(dtype, str) else None
        )
        if wanted is not None:
            return tensor.to(inner_device("cuda"), wanted)
        if dtype is None and tensor.is_cuda:
            return next((name for name, kind in names.items() if kind == tensor.dtype), function(tensor))
        return function(tensor, *(() if dtype is None else (dtype,)), *args, **options)

    return typed


def _default_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.set_default_tensor_type``, to which a class of tensors on the GPU may be given, or its name."""

    def default(kind: Any) -> None:
        name = kind.__name__ if isinstance(kind, _TypedTensor) else str(kind).removeprefix("torch.cuda.")
        if not isinstance(kind, _TypedTensor) and not str(kind).startswith("torch.cuda."):
            function(kind)
            return
        torch.set_default_dtype(_DTYPES[name.removesuffix("Tensor")])
        torch.set_default_device("cuda")

    return default


@contextmanager
def named_devices(index: int = 0) -> Iterator[None]:
    """Let tensors be moved to CUDA, and be there, while what is inside runs.

    Args:
        index: Number of the one GPU that is pretended.
    """

    def to_cuda(tensor: Tensor, device: Any = None, *rest: Any, **options: Any) -> Tensor:
        options.pop("memory_format", None)
        return tensor.to(inner_device(_DEVICE("cuda", index) if device is None else device), *rest, **options)

    bare = property(lambda tensor: tensor.fake_mode.in_kernel_invocation)
    own = {"index": index}
    _device_constructors()  # kept, as C++ knows them: a default device is for these
    names: list[tuple[Any, dict[str, Any]]] = [
        (
            Tensor,
            {
                "to": _first_a_device(_with_inner_devices(Tensor.to)),
                "cuda": to_cuda,
                "type": _of_type(Tensor.type),
                "_make_subclass": staticmethod(_subclassed(Tensor._make_subclass)),
            },
        ),
        (torch.nn.Module, {"to": _first_a_device(torch.nn.Module.to)}),
        (torch.cuda, {**_typed_tensors()}),
        (torch, {"set_default_tensor_type": _default_type(torch.set_default_tensor_type)}),
        (torch, {"device": _Device}),
        (torch, {name: _with_inner_devices(getattr(torch, name)) for name in _FACTORIES}),
    ]
    _Own.names = tuple((owner, {name: getattr(owner, name) for name in values}) for owner, values in names)
    fake = {**PROPERTIES, "is_meta": bare, "__new__": staticmethod(fake_tensor_of)}
    with replaced(_Own, own), replaced(FakeTensor, fake), all_replaced(names):
        yield


@contextmanager
def own_names() -> Iterator[None]:
    """Let torch's functions be its own while compiled code runs: a compiler knows them by what they are."""
    with all_replaced(_Own.names):
        yield


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
        options.pop("pin_memory", None)  # which ``torch.tensor`` does below its operators, by CUDA's driver
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
