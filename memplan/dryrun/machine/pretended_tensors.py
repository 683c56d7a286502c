"""Tensors on a pretended GPU have a shape, a dtype and a storage without memory; those on the CPU are real.

It is torch's own fake tensors with three differences: what runs on the CPU alone really runs, large weights made on the
CPU aside; what a script asks of a tensor's values is answered (:mod:`memplan.dryrun.machine.known_values`); and results that
come back to the CPU are real again.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memplan.dryrun.machine.device_names import inner_device
from memplan.dryrun.machine.known_values import KnownValues, written
from memplan.dryrun.terms.kernel_checks import check_arguments
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
            inner_device(options["device"])  # refused where it is another GPU
        options = {name: value for name, value in options.items() if name != "pin_memory"}
        tensors = list(tensors_of((args, options)))
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if not _is_pretended(func, tensors, args, options):
                return func(*args, **options)
        elif func is aten._local_scalar_dense.default:
            if torch.cuda.is_current_stream_capturing():  # as CUDA says of whatever waits for the GPU
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            return self.values.number(args[0])
        elif func is aten._to_copy.default and str(options.get("device")) == "cpu":
            return self._on_the_cpu(args[0], options.get("dtype") or args[0].dtype)
        elif any(not isinstance(one, FakeTensor) and not one.is_meta for one in written(func, args, options)):
            return func(*each_tensor(args, self._whole), **each_tensor(options, self._whole))
        check_arguments(func, args, self.values.of)
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

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor with values that may be written over, each of its own."""
        return self.values.values_of(tensor).contiguous() if isinstance(tensor, FakeTensor) else tensor

    def _without_memory(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
            return tensor
        return self.of(tensor)

    def of(self, tensor: Tensor) -> FakeTensor:
        """Return a real tensor of the CPU as one without memory, whose values are known while it is small and no weight."""
        bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        made = FakeTensor(self, bare, tensor.device)
        if not tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
            self.values.note(made, tensor)
        return made

    def _on_the_cpu(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy that comes to the CPU: a real tensor, if it is small or known."""
        if self.values.of(tensor) is None and tensor.numel() * dtype.itemsize > LARGEST_REAL_BYTES:
            return FakeTensor(self, torch.empty(tensor.shape, dtype=dtype, device="meta"), torch.device("cpu"))
        return self.values.values_of(tensor).to(dtype).contiguous()


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


Rule = Callable[[KnownValues, Any, tuple[Any, ...], dict[str, Any]], Any]


def answered(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the result of an operator whose shape hangs on values; ``NotImplemented`` of any other."""
    rule = RULES.get(func) or RULES.get(str(func))
    return NotImplemented if rule is None else rule(values, func, args, options)


def _known_result(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the real result on the device of the first argument, or nothing where an argument is not known."""
    device = args[0].device
    real = [values.of(item) if isinstance(item, Tensor) else item for item in args]
    if any(isinstance(item, Tensor) and one is None for item, one in zip(args, real, strict=True)):
        return None
    result = func(*real, **{name: values.of(v) if isinstance(v, Tensor) else v for name, v in options.items()})
    if isinstance(result, Tensor):
        return result.to(device)
    return tuple(item.to(device) if isinstance(item, Tensor) else item for item in result)


def _nonzero(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    known = _known_result(values, func, args, options)
    if known is not None:
        return known
    mask: Tensor = args[0]
    count = values.counted("how many elements a mask holds", mask.numel())
    return torch.empty((count, mask.dim()), dtype=torch.int64, device=mask.device)


def _masked_select(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    del func, options
    mask = args[1].expand(torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
    return args[0].new_empty(len(_nonzero(values, aten.nonzero.default, (mask,), {})))


def _index(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if not any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        return NotImplemented
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            if not isinstance(index, FakeTensor):
                index = index.to(args[0].device)
            indices += _nonzero(values, aten.nonzero.default, (index,), {}).unbind(1)
        else:
            indices.append(index)
    return func(args[0], indices, **options)


_DIMS = {aten.unique_dim.default: 1, aten.unique_consecutive.default: 3}
"""Where an operator takes the dimension along which it compares."""


def _unique(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    known = _known_result(values, func, args, options)
    if known is not None:
        return known
    tensor: Tensor = args[0]
    position = _DIMS.get(func, len(args))
    dim = args[position] if position < len(args) else options.get("dim")
    along = tensor.numel() if dim is None else tensor.shape[dim]
    count = values.counted("how many elements are distinct", along)
    shape = [count] if dim is None else list(tensor.shape)
    if dim is not None:
        shape[dim] = count
    whole = torch.empty(tensor.shape if dim is None else (along,), dtype=torch.int64, device=tensor.device)
    counts = torch.empty(count, dtype=torch.int64, device=tensor.device)
    return tensor.new_empty(shape), whole, counts


def _repeat_interleave(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    known = _known_result(values, func, args, options)
    if known is not None:
        return known
    length = options.get("output_size")
    if length is None:
        length = values.counted("how often elements are repeated", 2 * args[0].numel())
    return torch.empty(length, dtype=args[0].dtype, device=args[0].device)


def _bincount(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    known = _known_result(values, func, args, options)
    if known is not None:
        return known
    least = args[2] if len(args) > 2 else options.get("minlength", 0)
    return torch.empty(max(least, 1), dtype=torch.int64, device=args[0].device)


def _packed(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return rows of unequal lengths in one, and how many there are at each place (aten/src/ATen/native/PackedSequence.cpp)."""
    del func, options
    padded, lengths = args[0], values.values_of(args[1])
    rows = (torch.arange(int(lengths.max()))[:, None] < lengths).sum(1)
    return padded.new_empty((int(lengths.sum()), *padded.shape[2:])), rows


def _connectionist(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return a loss for each row, and its forward variables (``ctc_loss_gpu_template`` in aten/src/ATen/native/cuda/LossCTC.cu)."""
    del func, options
    logs, targets, longest = args[0], args[1], args[3]
    if targets.dim() == 1:  # rows in one
        longest = longest if not isinstance(longest, Tensor) else values.values_of(longest).tolist()
        most = max(longest, default=0)
    else:
        most = targets.shape[1]
    places, rows = logs.shape[:2]
    return logs.new_empty(rows), logs.new_empty((rows, places, 2 * most + 1))


def _connectionist_backward(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    del values, func, options
    return torch.empty_like(args[1], memory_format=torch.contiguous_format)


def _suppressed(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return which boxes are left where they overlap (``meta_nms`` in torchvision/_meta_registrations.py, 0.29.1)."""
    del func, options
    boxes: Tensor = args[0]
    count = values.counted("how many boxes are left", boxes.shape[0])
    return torch.empty(count, dtype=torch.int64, device=boxes.device)


def _equal(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    del func, options
    real = [values.of(tensor) for tensor in args]
    if real[0] is not None and real[1] is not None:
        return bool(torch.equal(real[0], real[1]))
    return bool(values.told("whether two tensors are equal", False))


def _close(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Ask as torch does (``allclose`` in aten/src/ATen/native/TensorCompare.cpp, v2.13.0)."""
    del values, func
    return bool(torch.isclose(*args, **options).all().item())


RULES: dict[Any, Rule] = {
    aten.allclose.default: _close,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
    aten.equal.default: _equal,
    aten._pack_padded_sequence.default: _packed,
    aten._ctc_loss.default: _connectionist,
    aten._ctc_loss.Tensor: _connectionist,
    aten._ctc_loss_backward.default: _connectionist_backward,
    aten._ctc_loss_backward.Tensor: _connectionist_backward,
    "torchvision.nms.default": _suppressed,
}
