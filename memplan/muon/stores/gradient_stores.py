"""Gradients between backward and step: what the optimizer reads, and stores of fp32, bf16 or scaled FP8."""

from typing import Protocol

import torch
from torch import Tensor

from memplan.muon.stores.chunk_loops import starts
from memplan.muon.stores.optimizer_errors import OptimizerError, unknown_choice

GRADIENT_FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8-e4m3": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
}
DEFAULT_CHUNK_ELEMENTS = 1 << 20
_SMALLEST_SCALE = 1e-30


class Gradient(Protocol):
    """What an update asks of a gradient."""

    def read_(self, start: int, out: Tensor) -> None:
        """Write ``out.numel()`` elements from ``start`` on into ``out``, in fp32."""

    def workspace(self, dtype: torch.dtype) -> Tensor | None:
        """Return the gradient's own memory, flat, if an update of ``dtype`` may be written there."""

    def largest(self) -> Tensor:
        """Return the largest magnitude, one number; not finite if any element is not."""

    def norm(self) -> Tensor:
        """Return the root of the sum of squares, one fp32 number."""

    def scale_(self, factor: Tensor) -> None:
        """Multiply the gradient by one number."""


class TensorGradient:
    """A plain gradient tensor, fp32, bf16 or fp16.

    Args:
        tensor: The gradient; copied whole where it is not contiguous.
        reuse: Whether an update may overwrite it.
    """

    def __init__(self, tensor: Tensor, reuse: bool = True) -> None:
        self._tensor = tensor
        self._reuse = reuse and tensor.is_contiguous()
        self._flat = tensor.contiguous().view(-1)

    def read_(self, start: int, out: Tensor) -> None:
        """Copy a stretch, converted to fp32."""
        out.copy_(self._flat[start : start + out.numel()])

    def workspace(self, dtype: torch.dtype) -> Tensor | None:
        """Return the gradient itself where its dtype is that of the update."""
        return self._flat if self._reuse and self._flat.dtype == dtype else None

    def largest(self) -> Tensor:
        """Return the largest magnitude in the gradient's dtype."""
        return _largest(self._flat)

    def norm(self) -> Tensor:
        """Return the norm, summed in fp32."""
        return _norm(self._flat)

    def scale_(self, factor: Tensor) -> None:
        """Multiply the tensor that was given."""
        self._tensor.mul_(factor)


class GradientStore:
    """A gradient kept in fp32 or bf16, or in FP8 with one fp32 scale, to which further gradients are added.

    Memory is taken with the first gradient and given back by ``clear``. A plain cast to FP8 loses
    small gradients, and torch cannot add to FP8 tensors; here the sum is formed in fp32, a chunk
    at a time, and rounded again with the scale of the sum.

    Args:
        format: One of ``GRADIENT_FORMATS``.
        shape: Shape of the gradient.
        chunk_elements: Elements that are added at a time.

    Attributes:
        codes: The stored numbers, of ``shape``; None while there is no gradient.
        scale: One fp32 number for FP8, else None.
    """

    def __init__(self, format: str, shape: torch.Size, chunk_elements: int = DEFAULT_CHUNK_ELEMENTS) -> None:
        if format not in GRADIENT_FORMATS:
            raise unknown_choice("gradient format", format, GRADIENT_FORMATS)
        self.format = format
        self.dtype = GRADIENT_FORMATS[format]
        self.shape = shape
        self.chunk_elements = chunk_elements
        self.codes: Tensor | None = None
        self.scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scale) if tensor is not None)

    @staticmethod
    def predicted_bytes(format: str, elements: int) -> int:
        """Return the bytes of a stored gradient: those of its dtype for each element, and 4 for the scale of FP8."""
        dtype = GRADIENT_FORMATS[format]
        return elements * dtype.itemsize + (4 if dtype.itemsize == 1 else 0)

    @staticmethod
    def add_workspace_bytes(elements: int, chunk_elements: int = DEFAULT_CHUNK_ELEMENTS) -> int:
        """Return what ``add_`` allocates besides the store: two fp32 chunks, and two numbers."""
        return 8 * min(chunk_elements, elements) + 8

    def clear(self) -> None:
        """Forget the gradient and give its memory back."""
        self.codes = self.scale = None

    @torch.no_grad()
    def add_(self, gradient: Tensor) -> None:
        """Add ``gradient``, of the store's shape, to what is stored.

        Raises:
            OptimizerError: If the shape differs.
        """
        if gradient.shape != self.shape:
            raise OptimizerError(f"gradient of shape {tuple(gradient.shape)} for a store of {tuple(self.shape)}")
        fresh = self.codes is None
        if self.codes is None:
            self.codes = torch.empty(self.shape, dtype=self.dtype, device=gradient.device)
            if self.dtype.itemsize == 1:
                self.scale = torch.zeros((), dtype=torch.float32, device=gradient.device)
        flat, codes = gradient.contiguous().view(-1), self.codes.view(-1)
        if self.scale is None:
            total = torch.empty(min(self.chunk_elements, flat.numel()), dtype=torch.float32, device=flat.device)
            part = torch.empty_like(total)
            for start in starts(flat.numel(), self.chunk_elements):
                codes[start : start + self.chunk_elements].copy_(
                    self._sum(flat, codes, None, start, fresh, total, part)
                )
        else:
            self._add_scaled(flat, codes, self.scale, fresh)

    def take_(self, gradient: Tensor) -> None:
        """Add ``gradient``, which the caller gives away: the first of the store's dtype is kept as it is."""
        if self.codes is None and gradient.dtype == self.dtype and gradient.shape == self.shape:
            self.codes = gradient.contiguous()
        else:
            self.add_(gradient)

    def _add_scaled(self, flat: Tensor, codes: Tensor, scale: Tensor, fresh: bool) -> None:
        total = torch.empty(min(self.chunk_elements, flat.numel()), dtype=torch.float32, device=flat.device)
        part = torch.empty_like(total)
        largest = torch.zeros((), dtype=torch.float32, device=flat.device)
        here = torch.zeros((), dtype=torch.float32, device=flat.device)
        limit = torch.finfo(self.dtype).max
        for start in starts(flat.numel(), self.chunk_elements):
            values = self._sum(flat, codes, scale, start, fresh, total, part)
            torch.linalg.vector_norm(values, ord=float("inf"), out=here)
            torch.maximum(largest, here, out=largest)
        largest.div_(limit).clamp_(min=_SMALLEST_SCALE)
        for start in starts(flat.numel(), self.chunk_elements):
            values = self._sum(flat, codes, scale, start, fresh, total, part).div_(largest).clamp_(-limit, limit)
            codes[start : start + self.chunk_elements].copy_(values)
        scale.copy_(largest)

    def _sum(
        self, flat: Tensor, codes: Tensor, scale: Tensor | None, start: int, fresh: bool, total: Tensor, part: Tensor
    ) -> Tensor:
        """Return one chunk of the stored gradient plus the new one, in ``total``."""
        added = flat[start : start + self.chunk_elements]
        total, part = total[: added.numel()], part[: added.numel()]
        if fresh:
            return total.copy_(added)
        self._decoded(codes[start : start + self.chunk_elements], scale, total)
        return total.add_(part.copy_(added))

    @staticmethod
    def _decoded(codes: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
        out.copy_(codes)
        return out if scale is None else out.mul_(scale)

    def read_(self, start: int, out: Tensor) -> None:
        """Decode a stretch into ``out``, fp32."""
        assert self.codes is not None
        self._decoded(self.codes.view(-1)[start : start + out.numel()], self.scale, out)

    def workspace(self, dtype: torch.dtype) -> Tensor | None:
        """Return the stored bf16 tensor where the update is bf16."""
        return self.codes.view(-1) if self.codes is not None and self.codes.dtype == dtype else None

    def largest(self) -> Tensor:
        """Return the scale of FP8, which is not finite if an element was not, or the largest magnitude."""
        assert self.codes is not None
        return _largest(self.codes) if self.scale is None else self.scale

    def norm(self) -> Tensor:
        """Return the norm, summed in fp32; of FP8 a chunk at a time."""
        assert self.codes is not None
        if self.scale is None:
            return _norm(self.codes)
        flat, total = self.codes.view(-1), torch.zeros((), dtype=torch.float32, device=self.codes.device)
        for start in starts(flat.numel(), self.chunk_elements):
            total.hypot_(_norm(flat[start : start + self.chunk_elements].float()))
        return total.mul_(self.scale)

    def scale_(self, factor: Tensor) -> None:
        """Multiply the stored numbers, or their scale where there is one."""
        assert self.codes is not None
        (self.codes if self.scale is None else self.scale).mul_(factor)


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest magnitude; on a CPU by the extremes, since the norm takes ten times as long there."""
    if tensor.device.type == "cpu":
        least, most = torch.aminmax(tensor)
        return torch.maximum(least.neg_(), most)
    norm: Tensor = torch.linalg.vector_norm(tensor, ord=float("inf"))
    return norm


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm
