"""Shapes that hang on values: what is selected by a mask, what is distinct, how often something is repeated.

Where the values are known the shape is what it would be. Else a mask holds half of its elements, or all of them
where the worst case is asked for, and as many of a tensor's elements are distinct.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memplan.dryrun.machine.known_values import KnownValues

aten = torch.ops.aten
Rule = Callable[[KnownValues, Any, tuple[Any, ...], dict[str, Any]], Any]


def answered(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the result of an operator whose shape hangs on values; ``NotImplemented`` of any other."""
    rule = RULES.get(func)
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


def _equal(values: KnownValues, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    del func, options
    real = [values.of(tensor) for tensor in args]
    if real[0] is not None and real[1] is not None:
        return bool(torch.equal(real[0], real[1]))
    return bool(values.told("whether two tensors are equal", False))


RULES: dict[Any, Rule] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.bincount.default: _bincount,
    aten.equal.default: _equal,
}
