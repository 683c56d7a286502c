"""Values of tensors without memory: those that are known, and what a script is told where none is.

Integers, masks and single numbers that come from the CPU, or follow from such, keep their values: token counts, masks,
positions and loss scales are what they would be. Everything else follows from weights, and is answered by rule.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memplan.dryrun.terms.outcome import Answer
from memplan.dryrun.terms.script_lines import ScriptLines, harmless_answer

KNOWN_INTEGERS = 2**20
"""Elements up to which integers and masks keep their values."""
KNOWN_FLOATS = 2**16
"""Elements up to which other tensors do: loss scales, accumulated losses, rewards, boxes, masks as weights."""
MOST_EXPERTS = 1024
"""Columns up to which the chosen indices of ``topk`` are taken for experts of a router."""

MOST_IN_A_ROW = 1000
"""Times that one line is told that something holds while nothing else is asked: it may be a loop that ends when it does not."""

Routing = Literal["balanced", "worst"]
aten = torch.ops.aten

_ALL_FINITE: dict[Any, bool] = {aten.isnan.default: False, aten.isinf.default: False}
_NOT_INFINITE: dict[Any, bool] = {aten.eq.Scalar: False, aten.ne.Scalar: True}
"""Comparisons with an infinity, of which ``isfinite`` is made, and one with itself."""
_AMONG = frozenset({aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor})
"""What asks which elements are one of some, such as tokens that end a sequence: none is where the elements are not known."""
_DECIDES: dict[Any, bool] = {
    aten.bitwise_and.Tensor: False,
    aten.logical_and.default: False,
    aten.bitwise_or.Tensor: True,
    aten.logical_or.default: True,
}
"""What one operand decides by itself, whatever the other is, where it is this everywhere: a limit of length, say."""
_UNSET = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""What makes tensors whose values nobody has set."""
_OVERWRITES = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default})
"""What sets all values of its first argument, whatever they were."""
_FILLED = frozenset(
    {
        aten.ones_like.default,
        aten.zeros_like.default,
        aten.full_like.default,
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.new_full.default,
    }
)
"""What takes nothing of its first argument but shape and dtype."""
_KEEPS_FOUND_INF = aten._amp_foreach_non_finite_check_and_unscale_.default


class Known:
    """The values of a tensor; those that share a storage share whether they are still true."""

    __slots__ = ("holds", "real")

    def __init__(self, real: Tensor, holds: list[bool] | None = None) -> None:
        self.real, self.holds = real, holds if holds is not None else [True]


class KnownValues:
    """Answers what a script asks of tensors without values.

    Args:
        lines: Tells which line of the script asks.
        routing: Whether tokens are spread evenly over experts and masks hold half, or all go to the first experts
            and masks hold everything.
    """

    def __init__(self, lines: ScriptLines, routing: Routing = "balanced") -> None:
        self.lines, self.routing = lines, routing
        self.answers: dict[tuple[str, str], Answer] = {}
        self.losses = 0
        self._asked = ("", 0)

    # What is known.

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor, if they are known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        known: Known | None = getattr(tensor, "_known", None)
        return known.real if known is not None and known.holds[0] else None

    def note(self, pretended: Tensor, real: Tensor, holds: list[bool] | None = None) -> None:
        """Remember the values of a tensor, where they are few enough."""
        few = KNOWN_FLOATS if real.dtype.is_floating_point or real.dtype.is_complex else KNOWN_INTEGERS
        if real.numel() <= few and not real.is_meta:
            pretended._known = Known(real, holds)  # type: ignore[attr-defined]

    def derive(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Remember the values of results that follow from known ones, and forget those that are written over."""
        if func is _KEEPS_FOUND_INF or func in _UNSET:
            return
        if func is aten.topk.default:
            self._route(args, result)
            return
        if func in _FILLED:
            args = (torch.empty((), dtype=args[0].dtype).expand(args[0].shape), *args[1:])
        given = _tensors((args, options))
        changed = written(func, args, options)
        if func in _OVERWRITES and self.of(args[0]) is None and not args[0]._is_view():
            self.note(args[0], torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu"))
        results = [one for one in _tensors(result) if isinstance(one, FakeTensor)]
        real = [self.of(tensor) for tensor in given]
        holds = _of_the_finite(func, args) if results and real[:1] == [None] else None
        if holds is not None:
            results[0]._known = Known(torch.tensor(holds).expand(results[0].shape))  # type: ignore[attr-defined]
            return
        if func in _AMONG and results and any(one is None for one in real):
            results[0]._known = Known(torch.tensor(False).expand(results[0].shape))  # type: ignore[attr-defined]
            return
        if func in _DECIDES and results and _is_everywhere(_DECIDES[func], real, results[0]):
            results[0]._known = Known(torch.tensor(_DECIDES[func]).expand(results[0].shape))  # type: ignore[attr-defined]
            return
        small = all(tensor.numel() <= _most(tensor) for tensor in (*results, *changed))
        if small and (results or changed) and all(one is not None for one in real):
            self._derived(func, args, options, result, given)
            return
        for tensor in changed:
            _forget(tensor)

    def forget_numbers(self, *args: Any, **options: Any) -> None:
        """Forget the values of what a kernel may have written: tensors of floating point."""
        for tensor in _tensors((args, options)):
            if tensor.dtype.is_floating_point:
                _forget(tensor)

    def _derived(self, func: Any, args: Any, options: Any, result: Any, given: list[Tensor]) -> None:
        on_the_cpu = dict(options)
        if "device" in on_the_cpu:
            on_the_cpu["device"] = torch.device("cpu")
        values = _mapped((args, on_the_cpu), lambda tensor: self.of(tensor))
        try:
            with torch.no_grad():
                real = func(*values[0], **values[1])
        except Exception:
            for tensor in written(func, args, options):
                _forget(tensor)
            return
        states = {_place(known.real): known.holds for known in map(_known, given) if known is not None}
        for pretended, value in zip(_tensors(result), _tensors(real), strict=False):
            if isinstance(pretended, FakeTensor) and pretended.shape == value.shape:
                self.note(pretended, value, states.get(_place(value)))

    def _route(self, args: tuple[Any, ...], result: Any) -> None:
        """Choose the experts of a router: every one as often as any other, or the same for all."""
        columns, chosen = args[0].shape[-1], result[1]
        if columns > MOST_EXPERTS or not isinstance(chosen, FakeTensor) or chosen.numel() > KNOWN_INTEGERS:
            return
        count = chosen.shape[-1]
        rows = chosen.numel() // max(count, 1)
        if self.routing == "balanced":
            indices = (torch.arange(rows * count) % columns).view(chosen.shape)
        else:
            indices = torch.arange(count).expand(chosen.shape).contiguous()
        chosen._known = Known(indices)  # type: ignore[attr-defined]

    # What is asked.

    def number(self, tensor: Tensor) -> Any:
        """Return a single value: the one that is known, or a plausible one, which is remembered as asked for."""
        known = self.of(tensor)
        if known is not None:
            return known.item()
        if tensor.dtype == torch.bool:
            return self._holds()
        if not tensor.dtype.is_floating_point:
            return self.told("a whole number", 1)
        self.losses += 1
        self._asked = ("", 0)
        return self.told("a number", round(2.0 / (1 + 0.05 * (self.losses - 1)), 4))

    def _holds(self) -> bool:
        """Return that a condition holds, until one line has asked for nothing else so often that it waits for the opposite.

        One that is asked in order to raise an error is answered so that none is.
        """
        harmless = harmless_answer(self.lines.asking())
        if harmless is not None:
            return bool(self.told("whether an error is due", False)) is not harmless
        line = self.lines.current()
        self._asked = (line, self._asked[1] + 1 if self._asked[0] == line else 1)
        if self._asked[1] > MOST_IN_A_ROW:
            self._asked = ("", 0)
            return bool(self.told("whether something holds, again and again", False))
        return bool(self.told("whether something holds", True))

    def told(self, question: str, value: Any) -> Any:
        """Return a value that is answered by rule, remembered with the line that asks."""
        line = self.lines.current()
        self.answers.setdefault((line, question), Answer(line, question, str(value)))
        return value

    def counted(self, question: str, whole: int) -> int:
        """Return how many of ``whole`` elements are chosen where nobody knows."""
        return int(self.told(question, whole if self.routing == "worst" else (whole + 1) // 2))

    def values_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the CPU with the values that a script would read, known or plausible."""
        known = self.of(tensor)
        if known is not None:
            return known.clone()
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return torch.full((), self.number(tensor), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


def _known(tensor: Tensor) -> Known | None:
    known: Known | None = getattr(tensor, "_known", None)
    return known


def _of_the_finite(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Return what holds of numbers that nobody knows: all are finite, and a single one is positive."""
    if func in _ALL_FINITE:
        return _ALL_FINITE[func]
    if func is aten.eq.Tensor and args[0] is args[1]:
        return True
    if func in _NOT_INFINITE and isinstance(args[1], float) and math.isinf(args[1]):
        return _NOT_INFINITE[func]
    return False if func is aten.lt.Scalar and args[0].numel() == 1 and args[1] <= 0 else None


def _is_everywhere(value: bool, operands: list[Tensor | None], result: Tensor) -> bool:
    known = (one for one in operands if one is not None and result.dtype == one.dtype == torch.bool)
    return any(one.numel() > 0 and bool((one == value).all()) for one in known)


def _place(tensor: Tensor) -> int:
    """Return what tells a storage from others; a sparse tensor has none, and shares nothing."""
    return id(tensor) if tensor.is_sparse else tensor.untyped_storage()._cdata


def _most(tensor: Tensor) -> int:
    return KNOWN_FLOATS if tensor.dtype.is_floating_point or tensor.dtype.is_complex else KNOWN_INTEGERS


def _forget(tensor: Tensor) -> None:
    known = _known(tensor)
    if known is not None:
        known.holds[0] = False


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    return []


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)([_mapped(item, function) for item in value])
    if isinstance(value, dict):
        return {name: _mapped(item, function) for name, item in value.items()}
    return value


def written(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes into."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    result: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else options.get(argument.name)
            result += _tensors(value)
    return result
