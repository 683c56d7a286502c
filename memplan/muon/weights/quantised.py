"""A weight that is codes and nothing else, and how an optimizer updates it in place.

A ``QuantisedWeight`` holds a matrix in a GGUF layout. ``quantised_layers`` dequantise it for their
product, and hand the gradient of the matrix to its store, from where ``Muon`` updates the codes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from memplan.muon.stores.chunk_loops import starts
from memplan.muon.stores.gradient_stores import Gradient, GradientStore
from memplan.muon.stores.optimizer_errors import OptimizerError, unknown_choice
from memplan.muon.updates.handles import hook_of
from memplan.muon.weights.weight_codecs import weight_format

if TYPE_CHECKING:
    from collections.abc import Callable

    from memplan.muon.weights.weight_formats import WeightFormat


class CodedParameter(nn.Parameter):
    """Codes, uint8, with the store of their matrix's gradient.

    To autograd they are integers, which need no gradient; setting ``requires_grad`` freezes or thaws the matrix.
    """

    store: GradientStore  # Where layers leave the gradient
    anchor: Tensor
    """Takes part in every product, so that autograd knows when the gradient is complete; it is empty."""

    def __new__(cls, codes: Tensor, store: GradientStore, trained: bool = True) -> CodedParameter:
        """Return a parameter over the memory of ``codes``."""
        made: CodedParameter = super().__new__(cls, codes, requires_grad=False)
        made.store = store
        made.anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=trained)
        return made

    def __init__(self, codes: Tensor, store: GradientStore, trained: bool = True) -> None:
        """Do nothing: ``__new__`` has done it."""

    @property
    def requires_grad(self) -> bool:
        """False, as for all integers; whether the matrix is trained is said by ``anchor``."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> CodedParameter:
        """Train the matrix, or freeze it: its layers then leave no gradient."""
        self.anchor.requires_grad_(requires_grad)
        if not requires_grad:
            self.store.clear()
        return self

    @property
    def grad(self) -> Tensor | None:
        """The stored gradient, of the matrix's shape and free to be changed in place; None where there is none."""
        codes = self.store.codes
        return codes if codes is None or self.store.scale is None else codes.as_subclass(ScaledGradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.store.clear()
        elif value is not self.store.codes:
            self.store.clear()
            self.store.add_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedParameter:
        """Return a copy with a copied store, which the copy of the module shares."""
        if id(self) not in memo:
            store = copy.deepcopy(self.store, memo)
            memo[id(self)] = CodedParameter(self.data.clone(), store, self.anchor.requires_grad)
        copied: CodedParameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the codes and the store."""
        del protocol
        return CodedParameter, (self.data, self.store, self.anchor.requires_grad)


_WITHOUT_NUMBERS = frozenset({
    "__get__", "__len__", "__repr__", "data_ptr", "detach_", "dim", "element_size", "get_device", "is_contiguous", "nelement",
    "numel", "requires_grad_", "size", "storage_offset", "stride", "untyped_storage", "zero_",
})  # fmt: skip
"""What may be asked of a gradient whose numbers mean nothing: its form and place, and what ``zero_grad`` calls."""


class ScaledGradient(Tensor):
    """A gradient in FP8, which means nothing without its scale: it can be looked at and dropped, not computed with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse whatever computes with the numbers."""
        if getattr(func, "__name__", "") in _WITHOUT_NUMBERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise OptimizerError(
            "the gradient of this coded weight is stored in FP8 with a scale, which torch's own functions do not know; "
            "to clip gradients, call clip_grad_norm_ of the optimizer"
        )


DECODE_CHUNK = 1 << 20
KERNELS = ("torch", "triton")


class QuantisedWeight(nn.Module):
    """A matrix as codes, which several layers may share.

    Args:
        codes: ``(rows, row_bytes)``, uint8, as in a GGUF file.
        format: Name of the format, such as ``q4-0``.
        columns: Elements of a row.
        kernels: What reads and writes codes: ``torch`` or ``triton``.

    Attributes:
        codes: The only parameter; its ``.grad`` is the stored gradient of the matrix.
        gradient: Where layers leave that gradient between backward and step.
    """

    codes: CodedParameter

    def __init__(self, codes: Tensor, format: str, columns: int, kernels: str = "torch") -> None:
        super().__init__()
        self.format: WeightFormat = _format(format, kernels)
        if codes.dtype != torch.uint8 or codes.shape[1:] != (self.format.row_bytes(columns),):
            raise OptimizerError(f"{format}: codes of {codes.dtype} {tuple(codes.shape)} do not hold rows of {columns}")
        self.shape = torch.Size((codes.shape[0], columns))
        self.gradient = GradientStore("bf16", self.shape)
        self.codes = CodedParameter(codes.contiguous(), self.gradient)

    @property
    def anchor(self) -> Tensor:
        """What takes part in products for the codes.

        Raises:
            OptimizerError: If ranks share the codes: nothing would sum their gradients.
        """
        if not isinstance(self.codes, CodedParameter):
            raise OptimizerError(
                f"codes have become a {type(self.codes).__name__}: coded weights are trained by one process, and cannot be sharded"
            )
        replicas = torch.distributed.is_available() and nn.parallel.DistributedDataParallel._active_ddp_module
        if replicas and self.codes.anchor.requires_grad and replicas.process_group.size() > 1:
            raise OptimizerError(
                "DistributedDataParallel does not sum gradients of codes, so that replicas would part: freeze coded weights "
                "(requires_grad_(False)), or train them by one process"
            )
        return self.codes.anchor

    @classmethod
    @torch.no_grad()
    def of(
        cls, matrix: Tensor, format: str, generator: torch.Generator | None = None, kernels: str = "torch"
    ) -> QuantisedWeight:
        """Return the codes of ``matrix``, ``(rows, columns)`` of any float dtype, nearest unless given noise."""
        chosen = _format(format, kernels)
        rows, columns = matrix.shape
        codes = torch.zeros(rows, chosen.row_bytes(columns), dtype=torch.uint8, device=matrix.device)
        step = max(DECODE_CHUNK // columns, 1)
        for first in starts(rows, step):
            part = matrix[first : first + step].detach().float().reshape(-1)
            chosen.encode_(part, codes[first : first + step].view(-1, chosen.block_bytes), generator)
        return cls(codes, format, columns, kernels)

    @torch.no_grad()
    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix, ``(rows, columns)`` in ``dtype``, decoded a few rows at a time."""
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        return self._decode_into(self.codes, out)

    def dequantise_bytes(self, dtype: torch.dtype) -> int:
        """Return the most that ``dequantised`` allocates: the matrix, and some rows of it in fp32."""
        rows, columns = self.shape
        part = min(max(DECODE_CHUNK // columns, 1), rows) * columns
        copied = 0 if dtype == torch.float32 else 4 * part
        decode = self.format.decode_bytes(part // self.format.block_elements)
        return rows * columns * dtype.itemsize + copied + decode

    @torch.no_grad()
    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the matrix, ``(*index.shape, columns)``."""
        codes = self.codes.index_select(0, index.reshape(-1))
        out = torch.empty(codes.shape[0], self.shape[1], dtype=dtype, device=codes.device)
        return self._decode_into(codes, out).view(*index.shape, self.shape[1])

    def _decode_into(self, codes: Tensor, out: Tensor) -> Tensor:
        step = max(DECODE_CHUNK // self.shape[1], 1)
        exact = None
        if out.dtype != torch.float32:
            exact = torch.empty(min(step, out.shape[0]) * self.shape[1], dtype=torch.float32, device=out.device)
        for first in starts(out.shape[0], step):
            part = out[first : first + step]
            blocks = codes[first : first + step].view(-1, self.format.block_bytes)
            if exact is None:
                self.format.decode_(blocks, part.view(-1))
            else:
                part.copy_(self.format.decode_(blocks, exact[: part.numel()]).view(part.shape))
        return out

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Load codes; those that ``assign=True`` puts in place are a parameter of this class again."""
        codes, own = self.codes, dict(self.codes.__dict__)
        super()._load_from_state_dict(*arguments)
        self._replace(codes, own)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the codes; what ``to_empty`` makes is a parameter of this class again."""
        codes, own = self.codes, dict(self.codes.__dict__)
        super()._apply(lambda tensor: fn(tensor.data), recurse)  # type: ignore[no-untyped-call]
        self._replace(codes, own)
        return self

    def _replace(self, former: CodedParameter, own: dict[str, Any]) -> None:
        """Let a plain parameter that has taken the place of codes, or swapped its form with them, be what they were."""
        if type(self.codes) is not nn.Parameter:
            return
        if self.codes is former:
            former.__class__ = CodedParameter
            former.__dict__.update(own)
        else:
            self.codes = CodedParameter(self.codes.data, self.gradient, own["anchor"].requires_grad)

    def is_wanted(self) -> bool:
        """Tell, inside backward, whether it forms this weight's gradient: ``torch.autograd.grad`` may ask for that of an input alone.

        Raises:
            OptimizerError: If backward itself is to be differentiated.
        """
        if torch.is_grad_enabled():
            raise OptimizerError(
                "second derivatives (create_graph) of coded weights are not formed: freeze these (requires_grad_(False)), or leave "
                "the layers that need them in floats"
            )
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(self.codes.anchor).node))

    def receive(self, gradient: Tensor) -> None:
        """Take over, or add, the gradient that one product formed."""
        self.gradient.take_(gradient)

    def as_handle(self) -> QuantisedHandle:
        """Return how an optimizer updates this weight."""
        return QuantisedHandle(self)

    def extra_repr(self) -> str:
        """Say shape and format."""
        return f"{tuple(self.shape)}, format={self.format.name}"


def _format(name: str, kernels: str) -> WeightFormat:
    """Return a format as ``kernels`` read and write it."""
    if kernels not in KERNELS:
        raise unknown_choice("kernels", kernels, KERNELS)
    if kernels == "torch":
        return weight_format(name)
    from memplan.muon.weights.triton_formats import in_kernels

    return in_kernels(weight_format(name))


class QuantisedHandle:
    """A quantised weight as an update sees it: decoded, updated and encoded a stretch at a time.

    Scales stay while values fit them (``WeightFormat.encode_``), so that only what changes is rounded.
    """

    def __init__(self, weight: QuantisedWeight) -> None:
        self.weight = weight

    @property
    def key(self) -> Tensor:
        """The codes."""
        return self.weight.codes

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, not of the codes."""
        return self.weight.shape

    @property
    def block_elements(self) -> int:
        """Elements of a block of the format."""
        return self.weight.format.block_elements

    @property
    def layout(self) -> WeightFormat:
        """The format, which has the attributes of a layout."""
        return self.weight.format

    @property
    def store(self) -> GradientStore:
        """Where layers leave the gradient."""
        return self.weight.gradient

    @store.setter
    def store(self, store: GradientStore) -> None:
        self.weight.gradient = self.weight.codes.store = store

    def gradient(self, reuse: bool) -> Gradient | None:
        """Return the store while it holds a gradient; it is always free to be overwritten."""
        del reuse
        return self.store if self.store.codes is not None else None

    def clear_gradient(self) -> None:
        """Give the store's memory back."""
        self.store.clear()

    def collect(self, keep: bool) -> None:
        """Do nothing: the store has the gradient already."""

    def on_gradient(self, call: Callable[[], None]) -> Any:
        """Register a hook of the anchor, which is called once all products have left their gradients."""
        return hook_of(self.weight.anchor, call)

    def scratch(self, elements: int) -> Tensor | None:
        """Return an fp32 copy of a stretch."""
        return torch.empty(elements, dtype=torch.float32, device=self.key.device)

    def scratch_bytes(self, elements: int, stochastic: bool = False) -> int:
        """Return ``4 * elements``, and what decoding and encoding allocate for a part of the stretch."""
        return 4 * elements + self.layout.update_bytes(elements // self.block_elements, stochastic)

    def apply_(
        self, start: int, update: Tensor, keep: float, rate: float, scratch: Tensor | None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        """Decode, update and encode the blocks of a stretch."""
        assert scratch is not None
        chosen, size = self.weight.format, self.block_elements
        blocks = self.weight.codes.view(-1, chosen.block_bytes)[start // size : (start + update.numel()) // size]
        exact = chosen.decode_(blocks, scratch[: update.numel()])
        exact.mul_(keep).add_(update, alpha=-rate)
        chosen.encode_(exact, blocks, generator, keep=True)
