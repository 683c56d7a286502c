"""CUDA's autocast on ``meta`` tensors: its lists of operators, its cache of cast weights, its nesting.

torch decides by the type of a tensor's device whether autocast is for it, and ``meta`` has no autocast. Here
``torch.autocast`` of ``cuda`` or ``meta`` is replaced by a region that puts a dispatch key above autograd, where CUDA's
has its own, whose kernels cast and call on. Other device types keep torch's own.

Source:
    aten/src/ATen/autocast_mode.h (``autocast_lists.yaml``) and autocast_mode.cpp, ``cached_cast`` (v2.13.0); torch/amp/autocast_mode.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from memplan.documents.loading import load_document
from memplan.trace.pretended_cuda.fake_devices import all_replaced

KEY = "AutocastPrivateUse1"
OURS = ("cuda", "meta")
"""Device types whose autocast is the one in here."""


def operator_lists() -> dict[str, list[str]]:
    """Return the operators of CUDA's autocast by what it does with their arguments."""
    lists: dict[str, list[str]] = load_document(Path(__file__).with_name("autocast_lists.yaml")).data
    return lists


class _Region:
    """The state of autocast: whether it is on, what it casts to, and what it has cast."""

    def __init__(self) -> None:
        self.enabled, self.dtype, self.caches = False, torch.float16, True
        self.nesting = 0
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}

    def switch(self, enabled: bool) -> None:
        """Put the key above autograd, or take it away."""
        self.enabled = enabled
        torch.set_autocast_enabled("cuda", enabled)  # Dynamo compares it before and after
        torch.set_autocast_dtype("cuda", self.dtype)
        _included(enabled)

    def cast(self, value: Any) -> Any:
        """Return a float tensor in the narrow dtype; copies of fp32 leaves that are trained are kept until the region ends."""
        if not _eligible(value) or value.dtype == self.dtype:
            return value
        caches = (
            self.caches
            and torch.is_autocast_cache_enabled()
            and value.dtype == torch.float32
            and value.requires_grad
            and value.is_leaf
        )
        if not caches or value._is_view():
            return value.to(self.dtype)
        known = self.copies.get(id(value))
        if known is None:
            with torch.enable_grad():
                known = (value, value.to(self.dtype))
            self.copies[id(value)] = known
        return known[1]


_REGION = _Region()


def _included(on: bool) -> None:
    key = getattr(torch._C.DispatchKey, KEY)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, not on)
    torch._C._dispatch_tls_set_dispatch_key_included(key, on)


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


@contextmanager
def _below() -> Iterator[None]:
    """Run what is inside below autocast, as its kernels do."""
    _included(False)
    try:
        yield
    finally:
        _included(_REGION.enabled)


def _kernel(operator: Any, prepared: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        with _below():
            given, named = prepared(args, options)
            return operator(*given, **named)

    return run


def _lowered(args: Any, options: Any) -> tuple[Any, Any]:
    cast = tree_map(_REGION.cast, (args, options))
    return cast[0], cast[1]


def _raised(args: Any, options: Any) -> tuple[Any, Any]:
    cast = tree_map(_wide, (args, options))
    return cast[0], cast[1]


def _wide(value: Any) -> Any:
    return value.float() if _eligible(value) else value


def _by_option(args: Any, options: Any) -> tuple[Any, Any]:
    """Ask for fp32 where no dtype is asked for, and the tensor is narrow enough."""
    if not _eligible(args[0]) or options.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args):
        return args, options
    given = args[:-1] if args[-1] is None else args
    return given, {**options, "dtype": torch.float32}


def _promoted(args: Any, options: Any) -> tuple[Any, Any]:
    result: list[Tensor] = []
    tree_map(lambda value: result.append(value) if _eligible(value) else None, (args, options))
    widest = torch.float32 if any(tensor.dtype == torch.float32 for tensor in result) else _REGION.dtype
    cast = tree_map(lambda value: value.to(widest) if _eligible(value) else value, (args, options))
    return cast[0], cast[1]


class _Autocast(ContextDecorator):
    """Stands for ``torch.autocast``."""

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self.device, self.fast_dtype, self._enabled = device_type, dtype or _REGION.dtype, enabled
        self._cache_enabled = _REGION.caches if cache_enabled is None else cache_enabled
        self._before: list[tuple[bool, torch.dtype, bool]] = []

    def __enter__(self) -> _Autocast:
        self._before.append((_REGION.enabled, _REGION.dtype, _REGION.caches))
        _REGION.nesting += 1
        _REGION.dtype, _REGION.caches = self.fast_dtype, self._cache_enabled
        _REGION.switch(self._enabled)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        _REGION.nesting -= 1
        if not _REGION.nesting:
            _REGION.copies.clear()
        enabled, _REGION.dtype, _REGION.caches = self._before.pop()
        _REGION.switch(enabled)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Give ``meta`` tensors the autocast of CUDA while what is inside runs."""
    libraries = _kernels()
    try:
        with all_replaced(_answers()):
            yield
    finally:
        _REGION.switch(False)
        _REGION.nesting = 0
        _REGION.copies.clear()
        for library in libraries:
            library._destroy()


def _kernels() -> list[Any]:
    """Register the kernels of the lists, and let all other operators pass."""
    others = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    others.fallback(torch.library.fallthrough_kernel, KEY)  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    rules = {"lowered": _lowered, "raised": _raised, "raised-by-option": _by_option, "promoted": _promoted}
    for kind, names in operator_lists().items():
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _kernel(operator, rules[kind]), KEY)  # type: ignore[no-untyped-call]
    return [others, library]


def _answers() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield what asks for autocast's state, and what enters it, to be put in the place of torch's."""
    own = torch.autocast
    mode: Any = torch.amp.autocast_mode

    class Either(type):
        """Makes a region of ours or torch's own, and takes both for one of its class, as Dynamo asks."""

        def __call__(cls, device_type: str = "cuda", *args: Any, **options: Any) -> Any:
            return (_Autocast if device_type in OURS else own)(device_type, *args, **options)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, _Autocast | own)

    autocast = Either("autocast", (), {})

    def either(original: Callable[..., Any], answer: Callable[[], Any]) -> Callable[..., Any]:
        return lambda device="cuda": answer() if device in OURS else original(device)

    answers: list[tuple[Any, str, Any]] = [
        (torch, "is_autocast_enabled", lambda: _REGION.enabled),
        (torch, "get_autocast_dtype", lambda: _REGION.dtype),
        (torch, "get_autocast_gpu_dtype", lambda: _REGION.dtype),
        (mode, "is_autocast_available", lambda: True),
        (torch.amp, "is_autocast_available", lambda: True),
    ]
    for owner, name, answer in answers:
        yield owner, {name: either(getattr(owner, name), answer)}
    for owner in (torch, torch.amp, mode):
        yield owner, {"autocast": autocast}
