"""A training job on one device: weights, gradients, optimizers, and one step after another."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from memplan.muon.updates.offload import buffers_on
from memplan.trace.jobs.gradient_lifetimes import Trained
from memplan.trace.jobs.optimizers import Update, update_of
from memplan.trace.recording.trace_result import LATER_MICRO_STEP, Component
from memplan.trace.reference.run_options import TORCH_DTYPES, Probe, Target
from memplan.training.resolved import TrainingSetup


class Watcher(Probe, Protocol):
    """What a job reports to while it runs."""

    def instant(self, name: str, *, backward: bool = False) -> None:
        """Begin a part of the step."""

    def forward_begins(self) -> None:
        """Note that forward begins; what is made from now on and outlives it are activations."""

    def forward_ends(self) -> None:
        """Note that forward ends."""

    def mark(self, tensor: Tensor, component: Component, name: str = "") -> None:
        """Book the storage of ``tensor`` under ``component``."""

    def on_host(self, tensor: Tensor) -> None:
        """Note that the storage of ``tensor`` stands for host memory, whatever its device is called."""


def watch_layers(layers: Iterable[nn.Module], head: nn.Module | None, watcher: Watcher) -> None:
    """Let ``watcher`` see where a model's backward is: at which of its layers, in order, or at its head."""
    for number, layer in enumerate(layers, start=1):
        _watch_layer(layer, number, watcher)
    if head is not None:
        head.register_forward_hook(lambda _m, _i, out: watcher.backward_reaches(out, "head backward"))


def _watch_layer(layer: nn.Module, number: int, watcher: Watcher) -> None:
    def entering(_module: nn.Module, inputs: Any) -> None:
        watcher.recomputing(True)
        first = tensor_of(inputs)
        if number == 1 and first is not None:
            watcher.backward_reaches(first, "end of backward")

    def leaving(_module: nn.Module, _inputs: Any, output: Any) -> None:
        watcher.recomputing(False)
        tensor = tensor_of(output)
        if tensor is not None and torch.is_grad_enabled():
            watcher.backward_reaches(tensor, f"layer {number} backward")

    compiled: Any = layer._compiled_call_impl
    if compiled is None:
        # in front of the hooks that shard it, as where it is compiled in place
        layer.register_forward_pre_hook(entering, prepend=hasattr(layer, "_orig_mod"))
        layer.register_forward_hook(leaving, always_call=True)
        return

    def called(*args: Any, **options: Any) -> Any:  # hooks of the module's own would be compiled with it
        entering(layer, args)
        output = None
        try:
            output = compiled(*args, **options)
        finally:
            leaving(layer, args, output)
        return output

    layer._compiled_call_impl = called


def tensor_of(value: Any) -> Tensor | None:
    """Return a tensor, or the first of several."""
    if isinstance(value, tuple | list) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None


class _Graded:
    """Stands for a parameter whose gradient is stored elsewhere, for functions that read ``.grad``."""

    def __init__(self, gradient: Tensor) -> None:
        self.grad = gradient

    @classmethod
    def all(cls, gradients: list[Tensor]) -> list[Tensor]:
        """Return one such stand-in for each gradient."""
        return [cls(gradient) for gradient in gradients]  # type: ignore[misc]


class Job:
    """A training job without its model, which a subclass has.

    Args:
        trained: The weights that are trained, in the order of the model.
        device: ``meta`` to trace, ``cpu`` or ``cuda`` to run.

    Attributes:
        notes: What the job leaves out, one sentence each.
    """

    def __init__(
        self, model: nn.Module, setup: TrainingSetup, trained: list[Trained], device: str, target: Target = "cuda"
    ) -> None:
        self.model, self.setup, self.config, self.device = model, setup, setup.config, device
        self.staged = buffers_on(torch.device(target)) if setup.offloads_states else 0
        self.trained = trained
        self.masters = self._copies(self.config.master_weights)
        self.average = self._copies(self.config.weight_average)
        self.scaling = self._scaling()
        self.updates = self._updates()
        self.notes = tuple(dict.fromkeys(update.note for _, update in self.updates if update.note))

    def loss(self) -> Tensor:
        """Return the loss of one micro-batch."""
        raise NotImplementedError

    def evaluate(self) -> None:
        """Run the model on what it is evaluated on."""
        self.loss()

    def tensors(self) -> Iterator[tuple[str, Tensor, Component]]:
        """Yield every tensor that the model and its data hold, with name and component."""
        raise NotImplementedError

    def _copies(self, dtype: str) -> list[Tensor]:
        """Return one more copy of every trained weight, or nothing."""
        if dtype == "none":
            return []
        return [torch.empty(item.shape, dtype=TORCH_DTYPES[dtype], device=self.device) for item in self.trained]

    def _scaling(self) -> tuple[Tensor, ...]:
        """Return the dynamic loss scale and the count of steps since it grew, or nothing."""
        if not self.config.loss_scaling:
            return ()
        return torch.ones((), device=self.device), torch.zeros((), dtype=torch.int32, device=self.device)

    def _updates(self) -> list[tuple[list[Trained], Update]]:
        """Return one update for each optimizer, or for each weight where each is updated alone."""
        alone = self.config.gradients.lifetime == "layer"
        groups: dict[str, list[int]] = {}
        for index, item in enumerate(self.trained):
            name = self.setup.optimizer_names[item.role]
            groups.setdefault(f"{name} {index}" if alone else name, []).append(index)
        updates = []
        for key, members in sorted(groups.items(), key=self._follows_muon):
            items, name = [self.trained[index] for index in members], key.split()[0]
            entry = self.setup.optimizers[items[0].role]
            masters = [self.masters[index] for index in members] if self.masters else []
            updates.append((items, update_of(name, entry, items, self.setup, masters, self.staged)))
        return updates

    def _follows_muon(self, group: tuple[str, list[int]]) -> bool:
        """Tell whether a group is stepped after Muon's matrices, as in ``memplan.muon.split_parameters``."""
        return self.setup.optimizers[self.trained[group[1][0]].role].takes == "all"

    def watch(self, watcher: Watcher) -> None:
        """Let ``watcher`` see what there is, in the order in which it was made, and every gradient as it is finished."""
        for name, tensor, component in self.tensors():
            watcher.mark(tensor, component, name)
        for tensor in self.masters:
            watcher.mark(tensor, "master_weights")
        for tensor in (*self.average, *self.scaling):
            watcher.mark(tensor, "buffers")
        for _, update in self.updates:
            for tensor, key in update.states():
                if update.on_host:
                    watcher.on_host(tensor)
                watcher.mark(tensor, "optimizer_states", key)
        owners = {id(item): update for items, update in self.updates for item in items}
        alone = self.config.gradients.lifetime == "layer"

        def finished(item: Trained) -> None:
            self._apply(owners[id(item)], [item], watcher)
            item.release(fill=False)

        for item in self.trained:
            item.watch(watcher, finished if alone else None)

    def step(self, watcher: Watcher) -> None:
        """Run one optimizer step."""
        accumulated = self.config.gradient_accumulation_steps
        for micro_step in range(accumulated):
            later = LATER_MICRO_STEP if micro_step else ""
            watcher.instant(later or "forward")
            watcher.forward_begins()
            loss = self.loss()
            watcher.forward_ends()
            watcher.instant(later or "loss backward", backward=True)
            self._backward(loss)
            del loss
        self._update(watcher)
        if self.config.evaluation:
            watcher.instant("evaluation")
            with torch.no_grad():
                self.evaluate()
        if self.config.save_checkpoint:
            watcher.instant("checkpoint saving")
            self.model.state_dict()

    def _backward(self, loss: Tensor) -> None:
        """Run backward from the loss, divided and scaled as configured."""
        accumulated = self.config.gradient_accumulation_steps
        if accumulated > 1:
            loss = loss / accumulated
        if self.scaling:
            loss = loss * self.scaling[0]
        loss.backward()  # type: ignore[no-untyped-call]

    def _unscale(self) -> None:
        """Divide the gradients by the loss scale, in place, as ``GradScaler.unscale_`` does."""
        scale = self.scaling[0]
        overflow, inverse = torch.zeros_like(scale), scale.reciprocal()
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for item in self.trained:
            gradient = item.stored_gradient()
            if gradient is not None and gradient.dtype.itemsize > 1:
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, inverse)

    def _update(self, watcher: Watcher) -> None:
        """Clip where configured, step, and free the gradients."""
        if self.config.gradients.lifetime == "layer":
            return
        if self.config.clip_gradients:
            watcher.instant("gradient clipping")
            self._clip()
        watcher.instant("optimizer step")
        if self.scaling:
            self._unscale()
        for items, update in self.updates:
            self._apply(update, items, watcher)
        for item in self.trained:
            item.release(fill=self.config.zero_gradients == "fill")
        for average, item in zip(self.average, self.trained, strict=False):
            current = item.tensor.detach() if item.weight is None else item.weight.decoded()
            average.lerp_(current.to(average.dtype), 0.001)

    def _clip(self) -> None:
        """Clip by the norm of all gradients, those of coded weights included."""
        gradients = [gradient for item in self.trained if (gradient := item.stored_gradient()) is not None]
        plain = [gradient for gradient in gradients if gradient.dtype.itemsize > 1]
        clip_grads_with_norm_(_Graded.all(plain), 1.0, get_total_norm(plain))

    def _apply(self, update: Update, items: list[Trained], watcher: Watcher) -> None:
        """Step ``items``, through their master weights where there are any."""
        index = {id(item): position for position, item in enumerate(self.trained)}
        masters = [(self.masters[index[id(item)]], item) for item in items if self.masters]
        for master, item in masters:
            gradient = item.stored_gradient()
            master.grad = None if gradient is None else gradient.to(master.dtype)
        update.step()
        for master, item in masters:
            master.grad = None
            if item.weight is None:
                item.tensor.detach().copy_(master)
        for tensor, key in update.states():
            watcher.mark(tensor, "optimizer_states", key)
