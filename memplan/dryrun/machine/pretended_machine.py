"""A process whose tensors, queries and kernels are those of a machine with the pretended GPU."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.optim.optimizer as optimizer
import torch.utils._foreach_utils as foreach
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _push_mode

from memplan.dryrun.machine.cuda_runtime import pretended_runtime
from memplan.dryrun.machine.device_names import named_devices, own_names
from memplan.dryrun.machine.known_values import KnownValues
from memplan.dryrun.machine.pretended_tensors import PretendedTensors
from memplan.dryrun.terms.outcome import Ranks, RefusedError
from memplan.dryrun.watching.live_recorder import LiveRecorder
from memplan.trace.pretended_cuda.autocast_region import cuda_autocast
from memplan.trace.pretended_cuda.composite_kernels import composite_kernels, cpu_kernels
from memplan.trace.pretended_cuda.fake_devices import replaced


class _NoTensor:
    """What libraries take for fake tensors, in whose presence they leave out what asks for values."""


_TYPES = "_foreach_supported_types"
"""Types of tensors whose updates run in groups, on devices that can."""


@contextmanager
def pretended_machine(
    recorder: LiveRecorder, values: KnownValues, *, kernels: str = "cuda", ranks: Ranks | None = None
) -> Iterator[None]:
    """Run what is inside as on a machine that has the recorder's card.

    Args:
        values: Answers what is asked of tensors without values.
        kernels: Whose operators run: ``cuda`` for those of CUDA, ``cpu`` for those of torch's CPU build.
        ranks: The processes of a job on several GPUs, or nothing for a script that joins no group.
    """
    mode = PretendedTensors(values)
    with ExitStack() as stack:
        stack.enter_context(pretended_runtime(recorder, ranks))
        cuda = kernels == "cuda"
        stack.enter_context(composite_kernels(recorder.card.compute_capability) if cuda else cpu_kernels())
        stack.enter_context(named_devices(ranks.local_rank if ranks else 0))
        stack.enter_context(cuda_autocast())
        stack.enter_context(_tensor_methods(values))
        stack.enter_context(replaced(torch._subclasses, {"FakeTensor": _NoTensor}))
        stack.enter_context(_moved_modules())
        stack.enter_context(
            replaced(Tensor, {"_make_wrapper_subclass": staticmethod(_wrapper), "__new__": staticmethod(_of_a_class)})
        )
        stack.enter_context(_processes(ranks, recorder))
        stack.enter_context(replaced(torch.multiprocessing, {"spawn": _spawned(ranks)}))
        for owner in (foreach, optimizer) if cuda else (foreach,):  # on the CPU no optimizer groups tensors unasked
            stack.enter_context(replaced(owner, {_TYPES: [*getattr(owner, _TYPES), FakeTensor]}))
        grouped = [*foreach._get_foreach_kernels_supported_devices(), "meta"]  # as C++ calls where tensors are
        stack.enter_context(replaced(foreach, {"_get_foreach_kernels_supported_devices": lambda: grouped}))
        stack.enter_context(mode)
        stack.enter_context(recorder)
        stack.enter_context(_in_threads((mode, recorder)))
        stack.enter_context(_forward_derivatives())
        stack.enter_context(replaced(torch.jit, {"script": _unscripted}))
        stack.enter_context(replaced(torch.nn.init, {"_no_grad_trunc_normal_": _truncated}))
        yield


@contextmanager
def _in_threads(modes: tuple[TorchDispatchMode, ...]) -> Iterator[None]:
    """Let threads that a script starts find the same tensors as the script: torch keeps modes for each thread."""
    begin: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def begun(thread: threading.Thread) -> None:
        for mode in modes:
            _push_mode(mode)
        begin(thread)

    with replaced(threading.Thread, {"_bootstrap_inner": begun}):
        yield


def _truncated(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draw what lies within bounds as torch does, which draws again until all does: here twice (torch/nn/init.py, v2.13.0)."""
    with torch.no_grad():
        result = tensor.normal_(mean, std, generator=generator)
        for _ in range(2):
            mask = (result < a) | (result > b)
            result = torch.where(mask, torch.empty_like(result).normal_(mean, std, generator=generator), result)
        return tensor.copy_(result)


def _wrapper(kind: type, *size: Any, **options: Any) -> Tensor:
    """Return a tensor that stands for others, as torch's own classes do; another's codes and scales are not followed on the GPU."""
    if torch.device(options.get("device") or "cpu").type == "cuda" and not kind.__module__.startswith("torch."):
        whose = "torchao's tensors (quantised weights, states of its optimizers) are"
        known = (
            whose if kind.__module__.startswith("torchao") else f"tensors of a class of their own ({kind.__name__}) are"
        )
        raise RefusedError(f"{known} not known on the pretended GPU; run it without")
    return _MAKE_WRAPPER(kind, *size, **options)


_MAKE_WRAPPER: Callable[..., Tensor] = Tensor._make_wrapper_subclass


def _of_a_class(kind: type, *given: Any, **options: Any) -> Tensor:
    """Return a tensor of a class of its own that is made of numbers, on the CPU, which torch refuses where a mode has made its values."""
    if any(isinstance(one, Tensor) for one in given):
        return _NEW(kind, *given, **options)
    with _disable_current_modes():
        return _NEW(kind, *given, **options)


_NEW: Callable[..., Tensor] = Tensor.__new__


def _unscripted(given: Any, *_: Any, **__: Any) -> Any:
    """Return what TorchScript would compile as it is: its interpreter runs the same operators."""
    return given


@contextmanager
def _forward_derivatives() -> Iterator[None]:
    """Let torch compile its own derivatives of forward mode, which it loads late, under its own names."""
    load, script = forward_ad._maybe_load_decompositions, torch.jit.script

    def loaded() -> None:
        with own_names(), replaced(torch.jit, {"script": script}):
            load()  # type: ignore[no-untyped-call]

    with replaced(forward_ad, {"_maybe_load_decompositions": loaded}):
        yield


@contextmanager
def _tensor_methods(values: KnownValues) -> Iterator[None]:
    """Let tensors without memory be printed, listed and converted, with the values that they are told to have."""
    data = Tensor.data

    def set_data(tensor: Tensor, value: Tensor) -> None:
        if isinstance(tensor, FakeTensor) is not isinstance(value, FakeTensor):
            made = (
                torch.nn.Parameter(value, tensor.requires_grad)
                if isinstance(tensor, torch.nn.Parameter)
                else value.detach()
            )
            torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]
            return
        data.__set__(tensor, value)  # type: ignore[attr-defined]
        if isinstance(value, FakeTensor):
            tensor.fake_device = value.fake_device  # type: ignore[attr-defined]

    def shown(tensor: FakeTensor, *_: Any, **__: Any) -> str:
        return f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def formatted(tensor: FakeTensor, form: str) -> str:
        return format(tensor.item(), form) if tensor.dim() == 0 else shown(tensor)

    methods: dict[str, Any] = {
        "__deepcopy__": _deep_copy,
        "tolist": lambda tensor: values.values_of(tensor).tolist(),
        "numpy": lambda tensor, **_: values.values_of(tensor).numpy(),
        "__array__": lambda tensor, dtype=None, **_: values.values_of(tensor).numpy().astype(dtype or None),
        "__repr__": shown,
        "__format__": formatted,
        "data_ptr": lambda tensor: _address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size(),
        "record_stream": lambda *_: None,
        "new": _new,
    }
    shared: dict[str, Any] = {
        "data": property(data.__get__, set_data),  # type: ignore[attr-defined]
        "pin_memory": lambda tensor, *_: tensor,
        "is_pinned": _no,
    }
    stored = {"data_ptr": _address}
    with (
        replaced(torch.UntypedStorage, stored),
        replaced(FakeTensor, methods),
        replaced(Tensor, shared),
    ):
        yield


def _new(tensor: Tensor, *given: Any) -> Tensor:
    """Return a tensor of the same kind of a size, or of values, as older code asks for it."""
    sizes = given[0] if len(given) == 1 and isinstance(given[0], torch.Size) else given or (0,)
    if all(isinstance(one, int) for one in sizes):
        return tensor.new_empty(tuple(sizes))
    return torch.as_tensor(given[0], dtype=tensor.dtype, device=tensor.device)


def _deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Return a copy with a storage of its own; torch's would have two, of which its views share the other."""
    if not tensor.is_leaf:
        raise RuntimeError("only tensors created by the user (graph leaves) support deepcopy")
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        trained = isinstance(tensor, torch.nn.Parameter)
        made = (
            torch.nn.Parameter(copied, tensor.requires_grad) if trained else copied.requires_grad_(tensor.requires_grad)
        )
        if tensor.grad is not None:
            made.grad = _deep_copy(tensor.grad, memo)
        memo[id(tensor)] = made
    copy: Tensor = memo[id(tensor)]
    return copy


def _address(storage: torch.UntypedStorage) -> int:
    """Return where a storage lies, or what tells one without memory from others."""
    return int(storage._cdata) if storage.device.type == "meta" else _DATA_POINTER(storage)


_DATA_POINTER = torch.UntypedStorage.data_ptr


def _processes(ranks: Ranks | None, recorder: LiveRecorder) -> AbstractContextManager[None]:
    """Return a machine on which a script is one of so many processes, or may join none."""
    if ranks is None:
        return _no_group()
    from memplan.dryrun.machine.pretended_ranks import RankRecorder, pretended_ranks

    assert isinstance(recorder, RankRecorder)
    return pretended_ranks(ranks, recorder)


@contextmanager
def _no_group() -> Iterator[None]:
    from torch.distributed import device_mesh

    refused = {"init_process_group": _refused_group}
    with replaced(torch.distributed, refused), replaced(device_mesh, refused):
        yield


def _spawned(ranks: Ranks | None) -> Callable[..., None]:
    """Return ``torch.multiprocessing.spawn``, which runs its function here, as the one process of the job that is judged."""

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        if ranks is None and nprocs > 1:
            raise RefusedError(
                f"the script spawns {nprocs} processes; say how many there are, one of which runs (see: --gpus)"
            )
        fn(ranks.local_rank if ranks else 0, *args)

    return spawn


def _refused_group(*_: Any, **__: Any) -> Any:
    raise RefusedError("the script joins a process group; say how many processes there are (see: --gpus)")


def _no(*_: Any) -> bool:
    return False


@contextmanager
def _moved_modules() -> Iterator[None]:
    """Let a module keep its parameters when it is moved: tied weights stay tied, and optimizers keep theirs."""
    original: Any = torch.nn.Module._apply
    future: Any = torch.__future__

    def applied(module: Any, function: Any, recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(function)
        own, real = module._parameters, {}
        for name, parameter in own.items():
            if isinstance(parameter, FakeTensor):
                _move(parameter, function)
            elif is_lazy(parameter):
                module._moves_later = function
            elif type(parameter) is torch.nn.Parameter and parameter.is_meta:  # torch, too, makes another of it
                with torch.no_grad():
                    own[name] = torch.nn.Parameter(function(parameter), parameter.requires_grad)
            else:
                real[name] = parameter
        before = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(True)
        module._parameters = real
        try:
            return original(module, function, recurse=False)
        finally:
            module._parameters = own
            future.set_swap_module_params_on_conversion(before)

    infer: Any = LazyModuleMixin._infer_parameters

    def inferred(lazy: Any, module: Any, *args: Any, **options: Any) -> Any:
        infer(lazy, module, *args, **options)
        if "_moves_later" in vars(module):  # its parameters have a shape now
            module._apply(vars(module).pop("_moves_later"))

    # A parameter stays the object that it was, so that those who hold it weakly hold it still: DeepSpeed names them so.
    weakly = SimpleNamespace(getweakrefs=lambda _: [])
    with (
        replaced(torch.nn.Module, {"_apply": applied}),
        replaced(LazyModuleMixin, {"_infer_parameters": inferred}),
        replaced(torch.utils, {"weakref": weakly}),
    ):
        yield


def _move(parameter: Tensor, function: Any) -> None:
    """Give a parameter without memory what a function makes of it, as torch does where types agree."""
    gradient = parameter.grad
    with torch.no_grad():
        moved = function(parameter)
        if moved is not parameter:
            parameter.data = moved
        if gradient is not None:
            parameter.grad = function(gradient)
