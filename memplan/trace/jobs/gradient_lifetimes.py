"""How gradients are stored between backward and the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memplan.model.inventory import Role
from memplan.muon.stores.gradient_stores import GRADIENT_FORMATS, GradientStore
from memplan.trace.recording.trace_result import Component
from memplan.trace.reference.weight_storage import Weight


class Marks(Protocol):
    """What books a tensor's storage under a component."""

    def mark(self, tensor: Tensor, component: Component, name: str = "") -> None:
        """Book the storage of ``tensor``."""


@dataclass(slots=True, eq=False)
class Trained:
    """One weight that is trained, and its gradient as it is stored."""

    name: str  # Its name in the model
    role: Role  # What decides its optimizer
    shape: tuple[int, ...]  # Its dimensions
    tensor: Tensor  # The parameter, or the codes of a coded weight
    weight: Weight | None  # The coded weight, or None for a parameter
    keeps: torch.dtype | None  # Dtype of stored gradients, or None for the dtype that autograd forms
    gradient: Tensor | None = None  # The stored gradient where ``keeps`` is given
    store: GradientStore | None = None  # The gradient store of the bundled library, or None
    fills_store: bool = False  # Whether the job fills the store itself, as beside master weights

    def keep_narrow_gradients(self) -> None:
        """Keep 8-bit gradients in a store of the bundled library; torch adds to none."""
        if self.keeps is not None and self.keeps.itemsize == 1:
            name = next(name for name, dtype in GRADIENT_FORMATS.items() if dtype == self.keeps)
            self.store, self.fills_store = GradientStore(name, torch.Size(self.shape)), True

    def watch(self, marks: Marks, finished: Callable[[Trained], None] | None) -> None:
        """Keep each gradient as it is formed, then call ``finished``, which updates at once.

        Args:
            finished: Updates the weight inside backward; None leaves that to the step.
        """

        def accept(gradient: Tensor) -> None:
            self._accept(gradient, marks)
            if finished is not None:
                finished(self)

        def accumulated(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                self._mark_store(marks, finished)
                return
            if self.fills_store:
                parameter.grad = None
                taken(gradient)
                return
            if self.store is not None or self.keeps in (None, gradient.dtype):
                marks.mark(gradient, "gradients", self.name)
                if finished is not None:
                    finished(self)
                return
            parameter.grad = None
            accept(gradient)

        def taken(gradient: Tensor) -> None:
            assert self.store is not None
            self.store.take_(gradient)
            self._mark_store(marks, finished)

        if self.weight is not None:
            self.weight.sink = accept if self.store is None else taken
        else:
            self.tensor.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def _mark_store(self, marks: Marks, finished: Callable[[Trained], None] | None) -> None:
        """Book the gradient that the optimizer has just moved into its store."""
        if self.store is None or self.store.codes is None:
            return
        for tensor in (self.store.codes, self.store.scale):
            if tensor is not None:
                marks.mark(tensor, "gradients", self.name)
        if finished is not None:
            finished(self)

    def _accept(self, gradient: Tensor, marks: Marks) -> None:
        """Store ``gradient``, or add it to what is stored."""
        wanted = self.keeps or gradient.dtype
        if self.gradient is None:
            self.gradient = gradient if wanted == gradient.dtype else gradient.to(wanted)
        else:
            self.gradient.add_(gradient)
        marks.mark(self.gradient, "gradients", self.name)

    def stored_gradient(self) -> Tensor | None:
        """Return the gradient as it is stored."""
        if self.store is not None and self.store.codes is not None:
            return self.store.codes
        return self.tensor.grad if self.gradient is None else self.gradient

    def release(self, *, fill: bool) -> None:
        """Free the gradient, or fill it with zeros."""
        if fill:
            for gradient in (self.tensor.grad, self.gradient):
                if gradient is not None:
                    gradient.zero_()
            return
        self.tensor.grad = self.gradient = None
        if self.store is not None:
            self.store.clear()
