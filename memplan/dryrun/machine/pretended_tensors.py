"""Tensors on a pretended GPU have a shape, a dtype and a storage without memory; those on the CPU are real.

It is torch's own fake tensors with three differences: what runs on the CPU alone really runs, large weights made on the
CPU aside; what a script asks of a tensor's values is answered (:mod:`memplan.dryrun.machine.known_values`); and results that
come back to the CPU are real again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memplan.dryrun.machine.chosen_shapes import answered
from memplan.dryrun.machine.device_names import inner_device
from memplan.dryrun.machine.known_values import KnownValues, written
from memplan.trace.pretended_cuda.fake_devices import outer_device

LARGEST_REAL_BYTES = 2**20
"""Floats made on the CPU beyond this are without memory, so that weights that are later moved need none."""

aten = torch.ops.aten
_FACTORIES = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.rand.default,
        aten.randn.default,
    }
)
"""What makes weights before they are given values."""


class PretendedTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Runs operators on what is on the CPU, and pretends to run those on what is on the GPU.

    Args:
        values: Answers what a script asks of tensors without values.
    """

    def __init__(self, values: KnownValues) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.values = values
        self.fake_tensor_converter.from_meta_and_device = _wrapped  # type: ignore[method-assign, assignment]

    @property
    def avoid_device_init(self) -> bool:
        """Tell torch that there is no device to initialise."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return torch.device("meta") if self.in_kernel_invocation else inner_device(args[0].fake_device)
        options = kwargs or {}
        if "device" in options:
            options = {**options, "device": outer_device(options["device"])}
        options = {name: value for name, value in options.items() if name != "pin_memory"}
        tensors = list(tensors_of((args, options)))
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if not _is_pretended(func, tensors, args, options):
                return func(*args, **options)
        elif func is aten._local_scalar_dense.default:
            return self.values.number(args[0])
        elif func is aten._to_copy.default and str(options.get("device")) == "cpu":
            return self._on_the_cpu(args[0], options.get("dtype") or args[0].dtype)
        elif any(not isinstance(one, FakeTensor) and not one.is_meta for one in written(func, args, options)):
            return func(*each_tensor(args, self.values.values_of), **each_tensor(options, self.values.values_of))
        with self:
            answer = answered(self.values, func, args, options)
        if answer is not NotImplemented:
            return answer
        args, options = each_tensor((args, options), self._without_memory)
        result: Any = super().__torch_dispatch__(func, types, args, options)
        if result is NotImplemented:
            return result
        self.values.derive(func, args, options, result)
        return result

    def _without_memory(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
            return tensor
        return self.of(tensor)

    def of(self, tensor: Tensor) -> FakeTensor:
        """Return a real tensor of the CPU as one without memory, whose values are known while it is small."""
        bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made = FakeTensor(self, bare, tensor.device)
        self.values.note(made, tensor)
        return made

    def _on_the_cpu(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy that comes to the CPU: a real tensor, if it is small or known."""
        if self.values.of(tensor) is None and tensor.numel() * dtype.itemsize > LARGEST_REAL_BYTES:
            return FakeTensor(self, torch.empty(tensor.shape, dtype=dtype, device="meta"), torch.device("cpu"))
        return self.values.values_of(tensor).to(dtype)


def _wrapped(mode: FakeTensorMode, bare: Tensor, device: torch.device, *_: Any, **__: Any) -> FakeTensor:
    """Return a result on its device; torch would keep a weak reference, and could not swap it for a parameter then."""
    return FakeTensor(mode, bare, device)


def _is_pretended(func: Any, tensors: list[Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Tell whether an operator on real tensors, or on none, makes one without memory: on the GPU, or a large weight."""
    device = options.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    if tensors or func not in _FACTORIES or (device is not None and torch.device(device).type != "cpu"):
        return False
    dtype = options.get("dtype") or torch.get_default_dtype()
    shape = args[0] if args else options.get("size", ())
    return bool(dtype.is_floating_point and prod(shape) * dtype.itemsize > LARGEST_REAL_BYTES)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def each_tensor(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments or results with each tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        items = [each_tensor(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: each_tensor(item, function) for name, item in value.items()}
    return value
