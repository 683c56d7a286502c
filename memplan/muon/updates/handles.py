"""A parameter as an update sees it: where its gradient is, and how a stretch of it is changed.

``FloatHandle`` is a float parameter; ``SplitHandle`` one in bf16 whose lost 16 bits are kept beside
it, which together are an exact fp32 master weight. Quantised weights have theirs in ``quantised``.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from memplan.muon.sharded.divisions import is_divided, local_part, placed_as, shards_have_whole_blocks
from memplan.muon.state_codecs.state_formats import ADAMW_BLOCK
from memplan.muon.stores.gradient_stores import Gradient, GradientStore, TensorGradient
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.stores.rounding_noise import random_bits_


class Handle(Protocol):
    """What an update asks of a parameter."""

    store: Any  # Where its gradient is kept, if not in ``.grad``

    @property
    def key(self) -> Tensor:
        """The tensor under which the optimizer keeps state, as it stands in ``param_groups``."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, ``(rows, columns)`` or with leading experts."""

    @property
    def block_elements(self) -> int:
        """Elements of a block of the weight; stretches begin and end with blocks."""

    @property
    def layout(self) -> Any:
        """Elements and bytes of a block of the weight (``byte_model.Layout``); None for floats of the key's dtype."""

    def gradient(self, reuse: bool) -> Gradient | None:
        """Return the gradient, or None where there is none; ``reuse`` allows to overwrite it."""

    def clear_gradient(self) -> None:
        """Give the gradient's memory back."""

    def collect(self, keep: bool) -> None:
        """Take over a gradient that backward has just formed; ``keep`` it for later, or use it at once."""

    def on_gradient(self, call: Callable[[], None]) -> Any:
        """Call ``call`` whenever backward has formed the gradient; return a handle to remove that."""

    def scratch(self, elements: int) -> Tensor | None:
        """Return what ``apply_`` needs for stretches of up to ``elements``."""

    def scratch_bytes(self, elements: int, stochastic: bool = False) -> int:
        """Return the bytes of ``scratch``, and what ``apply_`` allocates besides."""

    def apply_(
        self, start: int, update: Tensor, keep: float, rate: float, scratch: Tensor | None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        """Replace ``w`` by ``keep * w - rate * update`` from ``start`` on.

        ``update`` is fp32 and may be destroyed. With a ``generator`` rounding is stochastic.
        """


class FloatHandle:
    """A parameter in fp32, bf16 or fp16; of a DTensor this rank's shard.

    Args:
        parameter: The parameter; contiguous.
        store: Where its gradient is kept, if not in ``parameter.grad``.
    """

    block_elements = 1  # Floats have no blocks
    layout: Any = None  # The dtype says it all

    def __init__(self, parameter: Tensor, store: GradientStore | None = None) -> None:
        self.key = parameter
        self.store = store

    @property
    def parameter(self) -> Tensor:
        """What this rank has of it, which is all where it is no DTensor."""
        return local_part(self.key)

    @property
    def shape(self) -> torch.Size:
        """The shape of that."""
        return self.parameter.shape

    def gradient(self, reuse: bool) -> Gradient | None:
        """Return ``parameter.grad``, or the store's gradient."""
        if self.store is not None and self.store.codes is not None:
            return self.store
        if self.key.grad is not None and is_divided(self.key):
            self.key.grad = placed_as(self.key.grad, self.key)
        grad = None if self.key.grad is None else local_part(self.key.grad)
        if grad is not None and grad.layout != torch.strided:
            raise OptimizerError(f"sparse gradient for a parameter of shape {tuple(self.shape)}: expected a dense one")
        return None if grad is None else TensorGradient(grad, reuse)

    def clear_gradient(self) -> None:
        """Drop ``parameter.grad`` and the store's gradient."""
        self.key.grad = None
        if self.store is not None:
            self.store.clear()

    def collect(self, keep: bool) -> None:
        """Move ``parameter.grad`` into the store, where there is one that it must be kept in or added to."""
        if self.store is not None and self.key.grad is not None and (keep or self.store.codes is not None):
            self.store.take_(self.key.grad)
            self.key.grad = None

    def on_gradient(self, call: Callable[[], None]) -> Any:
        """Register a hook of the parameter."""
        return hook_of(self.key, call)

    def scratch(self, elements: int) -> Tensor | None:
        """Return nothing for fp32, else an fp32 copy of a stretch."""
        if self.parameter.dtype == torch.float32:
            return None
        return torch.empty(elements, dtype=torch.float32, device=self.parameter.device)

    def scratch_bytes(self, elements: int, stochastic: bool = False) -> int:
        """Return 0 for fp32, else ``4 * elements``."""
        del stochastic
        return 0 if self.parameter.dtype == torch.float32 else 4 * elements

    def apply_(
        self, start: int, update: Tensor, keep: float, rate: float, scratch: Tensor | None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        """Update in place for fp32; else in fp32, with one rounding at the end."""
        weights = self.parameter.detach().view(-1)[start : start + update.numel()]
        if scratch is None:
            weights.mul_(keep).add_(update, alpha=-rate)
            return
        exact = scratch[: update.numel()].copy_(weights)
        exact.mul_(keep).add_(update, alpha=-rate)
        if generator is not None and weights.dtype == torch.bfloat16:
            _round_stochastically_(exact, update, generator)
        weights.copy_(exact)


def hook_of(leaf: Tensor, call: Callable[[], None]) -> Any:
    """Call ``call`` whenever backward has formed a leaf's gradient; one that is frozen now may be trained later."""
    if not leaf.is_leaf:
        return None
    trained = leaf.requires_grad
    leaf.requires_grad_()
    hook = leaf.register_post_accumulate_grad_hook(lambda _: call())  # type: ignore[no-untyped-call]
    leaf.requires_grad_(trained)
    return hook


def coded_elements(handle: Handle) -> int:
    """Return the elements by which AdamW's format is chosen, on all ranks the same; 0 where shards are no whole blocks."""
    if not is_divided(handle.key):
        return handle.shape.numel()
    return handle.key.numel() if shards_have_whole_blocks(handle.key, ADAMW_BLOCK) else 0


class SplitHandle(FloatHandle):
    """A bf16 parameter with the other 16 bits of its fp32 value beside it.

    The parameter holds the fp32 value rounded to nearest, and ``mantissa`` the low half of its
    bits, so that both together are exact and take four bytes for each element.

    Args:
        parameter: bf16, contiguous.
        mantissa: int16, of the same shape; zeros stand for the parameter as it is.
        store: As for ``FloatHandle``.

    Source:
        https://github.com/KellerJordan/modded-nanogpt keeps bf16 and 16 bits, truncated.
    """

    def __init__(self, parameter: Tensor, mantissa: Tensor, store: GradientStore | None = None) -> None:
        super().__init__(parameter, store)
        self.mantissa = mantissa

    def apply_(
        self, start: int, update: Tensor, keep: float, rate: float, scratch: Tensor | None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        """Join the halves, update in fp32, and split again."""
        del generator
        assert scratch is not None
        stretch = slice(start, start + update.numel())
        exact = scratch[: update.numel()]
        halves = (self.parameter.detach().view(-1)[stretch], self.mantissa.view(-1)[stretch])
        join_(*halves, exact)
        exact.mul_(keep).add_(update, alpha=-rate)
        split_(exact, *halves)


def join_(rounded: Tensor, low: Tensor, out: Tensor) -> None:
    """Write the fp32 values that ``rounded`` (bf16) and ``low`` (int16) stand for into ``out``.

    All are ``(elements,)``. The upper half of the bits is ``rounded``, less one where rounding
    carried into it, which is where the top bit of ``low`` is set.
    """
    lower, upper = _halves(out)
    upper.copy_(low).bitwise_right_shift_(15).add_(rounded.view(torch.int16))
    lower.copy_(low)


def split_(values: Tensor, rounded: Tensor, low: Tensor) -> None:
    """Split fp32 ``values`` into ``rounded`` (bf16, to nearest) and ``low`` (int16): the inverse of ``join_``."""
    lower, upper = _halves(values)
    low.copy_(lower)
    rounded.view(torch.int16).copy_(lower).bitwise_right_shift_(15).neg_().add_(upper)


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high 16 bits of fp32 ``values``, as views (little-endian machines)."""
    pairs = values.view(torch.int16).view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _round_stochastically_(exact: Tensor, spent: Tensor, generator: torch.Generator) -> None:
    """Round fp32 ``exact`` to numbers that bf16 holds, up or down with the odds that keep the mean.

    Random low bits are added and cut off; ``spent``, an fp32 tensor as long, is overwritten with them.
    """
    bits, random = exact.view(torch.int32), spent.view(torch.int32)
    bits.add_(random_bits_(random, generator)).bitwise_and_(-(1 << 16))
