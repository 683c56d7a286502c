"""Libraries of kernels on ``meta`` tensors: their Python runs and allocates, and their kernels do nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import signature, unwrap
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._library import triton as wrapping

from memplan.errors import CannotAnswerError
from memplan.model.state_space import MULTIPROCESSORS
from memplan.trace.pretended_cuda.fake_devices import all_replaced, replaced
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div

COMPILED = ("triton", "causal_conv1d_cuda")
"""Modules whose contents only run on a card."""
VERSION = "3.8.0"


class Idle:
    """Stands for anything of Triton's: a decorator, a kernel, a launch of it, a constant."""

    __name__ = "idle"

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Idle()

    def __getitem__(self, _: Any) -> Idle:
        return self

    def __call__(self, *_: Any, **__: Any) -> Idle:
        """Do nothing, whatever is asked for."""
        return self


SHARED_MEMORY_BYTES = 166_912
"""Of a block on compute capability 8.0, by which kernels choose sizes of tiles (triton's ``max_shared_mem``)."""

_DRIVER = SimpleNamespace(
    active=SimpleNamespace(
        get_current_target=lambda: SimpleNamespace(backend="cuda", arch=80, warp_size=32),
        get_active_torch_device=lambda: torch.device("cuda"),
        utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": SHARED_MEMORY_BYTES}),
    )
)


class _Config:
    """Sizes of a kernel's tiles, of which several are tried."""

    def __init__(self, kwargs: dict[str, int], **_: Any) -> None:
        self.kwargs = kwargs


class _Tuned(Idle):
    """A kernel of which the first sizes that would be tried are the best."""

    def __init__(self, configs: list[_Config]) -> None:
        self.configs, self.best_config = configs, configs[0]


def _autotuned(configs: list[Any], **_: Any) -> Callable[[Any], Any]:
    return lambda _: _Tuned(configs)


class _IdleModule(ModuleType):
    __version__ = VERSION

    @staticmethod
    def cdiv(whole: int, part: int) -> int:
        return ceil_div(whole, part)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << (number - 1).bit_length()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "driver":
            return _DRIVER
        if name == "Config":
            return _Config
        if name == "autotune":
            return _autotuned
        if name in ("runtime", "language"):
            return import_module(f"{self.__name__}.{name}")
        return type(name, (Idle,), {}) if name[0].isupper() else Idle()


class _Finder:
    """Finds compiled modules, and every module below them."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, _Finder, is_package=True) if name.partition(".")[0] in COMPILED else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        module = _IdleModule(spec.name)
        module.__path__ = []
        return module

    @staticmethod
    def exec_module(_: ModuleType) -> None:
        return


@contextmanager
def idle_kernels() -> Iterator[None]:
    """Let libraries be imported that hold kernels, which take the machine for one with a card of compute capability 8.0."""
    answers: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda *_: "NVIDIA",
        "get_device_capability": lambda *_: (8, 0),
        "device_count": lambda: 1,
    }
    sys.meta_path.insert(0, _Finder)
    try:
        with replaced(torch.cuda, answers):
            yield
    finally:
        sys.meta_path.remove(_Finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in COMPILED]:
            del sys.modules[name]  # of which others are to find none


@contextmanager
def idle_launches(launched: Callable[..., None] = lambda *_, **__: None) -> Iterator[None]:
    """Let Triton, as it is installed, compile and launch no kernel.

    Args:
        launched: Is called in the place of each launch, with what the kernel is given.

    Raises:
        ImportError: Triton is not installed.
    """
    runners: list[Any] = [getattr(import_module(f"triton.runtime.{name}"), kind) for name, kind in _RUNNERS]
    wraps = wrapping.is_wrap_triton_enabled
    enabled = {"is_wrap_triton_enabled": lambda: wraps() and any(map(_get_dispatch_mode, _TRACING))}
    idle = {"run": lambda _, *args, **options: launched(*args, **options)}
    with replaced(wrapping, enabled), all_replaced((runner, idle) for runner in runners):
        yield


_RUNNERS = ("jit", "JITFunction"), ("autotuner", "Autotuner"), ("autotuner", "Heuristics")
"""What ``kernel[grid](...)`` calls (triton/runtime/jit.py, ``KernelInterface.__getitem__``, 3.9.0)."""
_TRACING = (_TorchDispatchModeKey.FUNCTIONAL, _TorchDispatchModeKey.PROXY)
"""Modes of torch's compiler, for which ``torch.library.wrap_triton`` puts an operator in the place of a kernel."""

ORIGINAL: dict[str, Callable[..., Any]] = {}
"""Module and name -> transformers' own function."""


def with_linear_attention(model: Any, setup: TrainingSetup) -> None:
    """Have what is no attention run by the code that a setup names, whatever transformers has found installed.

    Raises:
        CannotAnswerError: The kernels' libraries are not installed.
    """
    module = sys.modules[type(model).__module__]
    for name in [name for name in (*_KERNELS, _SCAN) if hasattr(module, name)]:
        own = ORIGINAL.setdefault(f"{module.__name__}.{name}", unwrap(getattr(module, name)))
        if setup.profile.linear_attention == "torch":
            setattr(module, name, own)
        else:
            setattr(module, name, _scan() if name == _SCAN else _of_library(name))


_KERNELS = {
    "torch_chunk_gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "causal_conv1d_fn": ("causal_conv1d.causal_conv1d_interface", "causal_conv1d_fn"),
}
"""Name of transformers' own function -> module and function of the library that has a kernel for it."""

_SCAN = "mamba2_split_conv1d_scan_combined"
"""transformers' own function of a whole state space layer, which mamba-ssm has one for."""


@cache
def _of_library(name: str) -> Callable[..., Any]:
    """Return the function of flash-linear-attention or causal-conv1d, which takes the keywords that it knows."""
    module, function = _KERNELS[name]
    try:
        with idle_kernels():
            return _knowing(getattr(import_module(module), function))
    except ImportError as error:
        raise CannotAnswerError(
            f"tracing kernels.linear_attention: fla needs {error.name}: pip install fla-core, and "
            "CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE pip install causal-conv1d"
        ) from None


@cache
def _scan() -> Callable[..., Any]:
    """Return mamba-ssm's function of a whole state space layer, imported without the rest of the package.

    Its modules have another ``torch``, whose one device has as many multiprocessors as the formula takes a card to have.
    """
    spec = find_spec("mamba_ssm")
    try:
        if spec is None:
            raise ModuleNotFoundError(name="mamba-ssm")
        package = ModuleType("mamba_ssm")
        package.__spec__ = spec
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["mamba_ssm"] = package
        with idle_kernels():
            module = import_module("mamba_ssm.ops.triton.ssd_combined")
    except ImportError as error:
        raise CannotAnswerError(
            f"tracing kernels.linear_attention: mamba needs {error.name}: pip install einops, and MAMBA_FORCE_BUILD=TRUE "
            "MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm; causal-conv1d likewise"
        ) from None
    for name, part in list(sys.modules.items()):
        if name.startswith("mamba_ssm."):
            part.torch = _TORCH  # type: ignore[attr-defined]
    return _knowing(module.mamba_split_conv1d_scan_combined)


class _Torch:
    """torch, with one device that nothing is launched on."""

    cuda = SimpleNamespace(
        device=lambda _: nullcontext(),
        get_device_properties=lambda _: SimpleNamespace(multi_processor_count=MULTIPROCESSORS),
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_TORCH = _Torch()


def _knowing(function: Callable[..., Any]) -> Callable[..., Any]:
    known = set(signature(function).parameters)

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return called
