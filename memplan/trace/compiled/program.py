"""The program that Inductor writes for a graph, run on tensors without memory."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Program = Callable[[list[Any]], Any]
"""Takes the inputs of a graph in a list that it empties, as Inductor's own do, and returns its outputs."""

_KERNEL = re.compile(r"\b(triton_\w+)\.run\(")


class _Kernel:
    """Stands for a Triton kernel: it writes into what it is given, and takes nothing for itself."""

    def __init__(self, launched: Callable[..., None]) -> None:
        self.run = launched


class _Guard:
    """Stands for ``torch.cuda._DeviceGuard``."""

    def __init__(self, _: int) -> None:
        """Take a device's number."""

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


class _Torch:
    """``torch`` as programs name it, without a GPU to choose."""

    cuda = SimpleNamespace(_DeviceGuard=_Guard, set_device=lambda _: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _IntoGiven:
    """Kernels of libraries, such as matrix products, that write into a tensor which they are given."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch, name)
        return lambda *args, out, **options: operator(*args, out=out, **options)


def program(source: str, device: str, launched: Callable[..., None]) -> Program:
    """Return the function that ``source`` defines, whose kernels do nothing and whose tensors have no memory.

    Buffers are made, used again and let go of where Inductor's wrapper does: its text is what runs. A matrix product
    is torch's own, so that a recorder sees it.

    Args:
        source: What ``GraphLowering.codegen`` returns (torch/_inductor/codegen/wrapper.py, v2.13.0).
    """
    text = source[source.index("class Runner:") : source.index("runner = Runner(")]

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    names: dict[str, Any] = {name: _Kernel(launched) for name in _KERNEL.findall(text)}
    names |= {
        "torch": _Torch(),
        "device": lambda **_: torch.device(device),
        "aten": torch.ops.aten,
        "inductor_ops": SimpleNamespace(seeds=lambda count, _: empty((count,), (1,), torch.int64)),
        "extern_kernels": _IntoGiven(),
        "get_raw_stream": lambda _: 0,
        "empty_strided_cuda": empty,
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
        "reinterpret_tensor": torch.as_strided,
    }
    exec(compile(text, "<compiled>", "exec"), names)
    runner = names["Runner"](partitions=[])

    def call(inputs: list[Any]) -> Any:
        return runner.call(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
