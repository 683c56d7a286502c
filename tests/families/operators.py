"""The operators of a training step as a multiset: what is computed, on which shapes, with which numbers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LAYOUT = frozenset(
    [
        "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "arange", "as_strided", "chunk", "clone", "copy_",
        "detach", "empty", "empty_like", "empty_strided", "expand", "fill_", "flatten", "lift_fresh", "new_empty",
        "new_empty_strided", "new_zeros", "ones", "ones_like", "permute", "reshape", "scalar_tensor", "select",
        "select_backward", "slice", "slice_backward", "split", "split_with_sizes", "squeeze", "t", "transpose",
        "unbind", "unflatten", "unsqueeze", "view", "zero_", "zeros", "zeros_like", "unsafe_split", "broadcast_to",
        "view_as_real", "view_as_complex", "_conj", "split_backward", "split_with_sizes_backward", "full",
        "full_like",
    ]
)  # fmt: skip
"""Operators that compute nothing: views, copies, casts, and tensors that are filled later."""

SAME = {
    "add_": "add", "mul_": "mul", "div_": "div", "sub_": "sub", "rsub": "sub", "clamp_min": "clamp", "clamp_max": "clamp",
    "masked_fill_": "masked_fill", "_softmax": "softmax", "scatter_": "scatter",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_flash_attention_backward": "attention_backward",
}  # fmt: skip
"""Operators in place, or under another name, that compute the same."""


class Operators(TorchDispatchMode):
    """Counts operators by name, shape and dtype of the result, and numbers among the arguments."""

    def __init__(self, batch: int, tokens: int, skipped: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._tokens = batch, tokens
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self._skipped = skipped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        first = result[0] if isinstance(result, tuple | list) else result
        if name in LAYOUT or self._skipped() or not isinstance(first, Tensor) or not first.is_floating_point():
            return result
        name = SAME.get(name, name)
        self.counts[name, shape_of(name, first, *self._tokens), first.dtype, *_numbers(name, args, kwargs or {})] += 1
        return result


def shape_of(name: str, tensor: Tensor, batch: int, tokens: int) -> tuple[int, ...]:
    """Return dimensions in order of size, those of one left out, and sequences and tokens as one dimension.

    Which dimension is which, and whether tokens are told apart by sequence, is a matter of layout; so is
    where concatenated parts lie, of which only the size counts.
    """
    if name == "cat":
        return (tensor.numel(),)
    sizes = sorted(size for size in tensor.shape if size != 1)
    if batch in sizes and tokens in sizes:
        sizes.remove(batch)
        sizes.remove(tokens)
        sizes = sorted([*sizes, batch * tokens])
    return tuple(sizes)


def _numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the factors, caps and exponents among the arguments."""
    if name == "attention":
        return (round(kwargs["scale"], 6),) if kwargs.get("scale") else ()
    if name not in ("add", "sub", "mul", "div", "pow", "clamp"):
        return ()
    return tuple(round(float(a), 6) for a in args if isinstance(a, int | float) and not isinstance(a, bool))


def difference(one: Operators, other: Operators, *, dtypes: bool = True) -> dict[tuple[Any, ...], int]:
    """Return by how many times each operator occurs more in ``one`` than in ``other``; dtypes may be overlooked."""
    apart: Counter[tuple[Any, ...]] = Counter()
    for counts, sign in ((one.counts, 1), (other.counts, -1)):
        for (name, shape, dtype, *numbers), count in counts.items():
            apart[name, shape, dtype if dtypes else None, *numbers] += sign * count
    return {key: apart[key] for key in sorted(apart, key=str) if apart[key]}


def inside(model: nn.Module, names: frozenset[str]) -> Callable[[], bool]:
    """Return what tells whether a module with one of ``names`` is running."""
    depth = [0]

    def enter(*_: Any) -> None:
        depth[0] += 1

    def leave(*_: Any) -> None:
        depth[0] -= 1

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)
    return lambda: depth[0] > 0
