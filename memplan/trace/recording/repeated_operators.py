"""Operators that a step repeats, layer by layer: what torch derives once from shapes is not derived again.

A tensor on ``meta`` has a shape and no values, so what an operator returns follows from the shapes, strides and dtypes
of its arguments and from the numbers beside them. torch derives it in Python, which is most of a trace's time.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

Effect = Literal["new results", "in place", "other"]

_PLAIN = frozenset({Tensor, torch.nn.Parameter})


class _OtherArgumentError(Exception):
    """An argument whose description says too little: values in memory, a subclass of tensors, complex numbers."""


@dataclass(frozen=True, slots=True)
class _NewTensor:
    """A result in a storage of its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> Tensor:
        """Return one more such tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


Repeat = Callable[[tuple[Any, ...]], Any]

MOST_SHARED = 50_000
"""Repeats of torch's own operators that are remembered at most; a trace has some hundreds."""

_shared: dict[Hashable, Repeat] = {}
"""Repeats of torch's own operators, which traces of one process share."""

_OVERRIDDEN = frozenset(
    (
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten.index.Tensor,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.nonzero.default,
    )
)
"""Operators whose results, below autograd, hang on the trace (``cuda_kernels``, ``chosen_rows``)."""


class RepeatedOperators:
    """Runs operators; one that ran before on arguments of equal description gets new results of the same shapes.

    What is known of torch's own operators serves every trace; of other libraries', and of those that some traces
    override, this one.
    """

    def __init__(self) -> None:
        self._own: dict[Hashable, Repeat] = {}
        if len(_shared) > MOST_SHARED:
            _shared.clear()

    def result(self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the operator returns."""
        effect = _effect(func)
        if effect == "other":
            return func(*args, **options)
        try:
            call = _call(effect, func, args, options)
            repeats = _shared if _is_shared(func) else self._own
            repeat = repeats.get(call)
        except (_OtherArgumentError, TypeError):
            return func(*args, **options)
        if repeat is not None:
            return repeat(args)
        return _first(repeats, effect, call, func, args, options)


def _first(
    repeats: dict[Hashable, Repeat],
    effect: Effect,
    call: Hashable,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Run an operator, and note how to repeat it where the next run can only do the same."""
    given = _storages((args, *options.values()))
    result = func(*args, **options)
    if effect == "in place":
        if _call(effect, func, args, options) == call and _storages((args, *options.values())) == given:
            repeats[call] = _nothing if result is None else _first_argument
    else:
        repeat = _repeat(result, set(given))
        if repeat is not None:
            repeats[call] = repeat
    return result


@cache
def _is_shared(func: Any) -> bool:
    """Return whether an operator does the same in every trace."""
    return func.namespace == "aten" and func not in _OVERRIDDEN


@cache
def _effect(func: Any) -> Effect:
    """Return whether an operator makes new tensors, or writes into what it is given and returns nothing else."""
    schema = getattr(func, "_schema", None)
    if schema is None or torch.Tag.inplace_view in func.tags:
        return "other"
    given = [argument.alias_info for argument in schema.arguments]
    returned = [value.alias_info for value in schema.returns]
    if not any(given) and returned and not any(returned):
        return "new results"
    if torch.Tag.inplace not in func.tags:
        return "other"
    first = bool(given) and given[0] is not None and len(returned) == 1 and returned[0] is not None
    return "in place" if not returned or (first and given[0].before_set == returned[0].before_set) else "other"


def _call(effect: Effect, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    """Return an operator and the description of its arguments; what is written in place hangs on no rate or factor."""
    numbers = effect != "in place"
    return func, torch.get_default_dtype(), _described(args, numbers), _described((*options.items(),), numbers)


def _described(value: Any, numbers: bool) -> Hashable:
    """Return all of an argument that shapes, strides and dtypes of results can depend on, with its ``numbers`` or without."""
    if isinstance(value, Tensor):
        if type(value) not in _PLAIN or not value.is_meta or value.dtype.is_complex:
            raise _OtherArgumentError
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, tuple | list):
        return tuple([_described(item, numbers) for item in value])
    if isinstance(value, torch.Generator):
        return torch.Generator
    return type(value), value if numbers or not isinstance(value, float) else None


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _storages(value: Any) -> list[int]:
    """Return the identity of each tensor's storage."""
    return [tensor.untyped_storage()._cdata for tensor in _tensors(value)]


def _nothing(_: tuple[Any, ...]) -> None:
    """Repeat an operator that returns nothing."""


def _first_argument(args: tuple[Any, ...]) -> Any:
    """Repeat an operator that returns what it has written into."""
    return args[0]


def _repeat(result: Any, given: set[int]) -> Repeat | None:
    """Return what makes such results anew, or nothing where a result is no new ``meta`` tensor of the usual size."""
    several = isinstance(result, tuple | list)
    results = list(result) if several else [result]
    new: list[_NewTensor] = []
    for tensor in results:
        if type(tensor) is not Tensor or not tensor.is_meta or tensor.dtype.is_complex or tensor.storage_offset():
            return None
        new.append(_NewTensor(tensor.shape, tensor.stride(), tensor.dtype))
        if new[-1].made().untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            return None
    own = _storages(results)
    if len(set(own)) < len(own) or not given.isdisjoint(own):
        return None
    if not several:
        return lambda _: new[0].made()
    kind = type(result)
    return lambda _: kind([item.made() for item in new])
