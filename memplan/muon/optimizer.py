"""``Muon``: the thin optimizer around ``steps``, which routes each group to Muon or AdamW.

Muon orthogonalises the running mean of a matrix's gradients. It is for the matrices inside a
network; embeddings, the head, norms and biases take AdamW: ``split_parameters`` tells them apart.
State is made at construction and holds plain tensors only.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from memplan.muon.group_options import DEFAULTS, adamw_options, checked_keys, checked_options, diverges, muon_options
from memplan.muon.parameter_state import (
    checked_parameter,
    checked_state_dict,
    first_not_finite,
    float_options,
    initial_state,
    parameter_name,
    restored,
)
from memplan.muon.stores.gradient_stores import GradientStore
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.updates.handles import FloatHandle, Handle, SplitHandle
from memplan.muon.updates.offload import Stager, buffers_on, finish_copies, stager_of
from memplan.muon.updates.projection import projected_step_
from memplan.muon.updates.steps import adamw_chunk_length, adamw_step_, chunk_length, muon_step_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memplan.muon.state_codecs.codecs import Codec

Group = dict[str, Any]


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, with states of few bits and bounded temporaries.

    Every argument but ``gradient_format``, ``check_finite`` and ``seed`` is a default for the groups, and any
    group may override it. With the defaults matrices are updated as ``torch.optim.Muon`` does.

    Args:
        params: Groups ``{"params": [...], "algorithm": "muon" | "adamw", ...}``, as ``split_parameters``
            returns them, or matrices for Muon. An entry is a parameter or a quantised weight.
        lr: Learning rate of either algorithm.
        weight_decay: Decoupled weight decay of either algorithm.
        momentum: Decay of Muon's running mean of gradients.
        nesterov: Whether Muon looks one step ahead.
        momentum_format: One of ``state_formats.MOMENTUM_FORMATS``, such as ``fp32``, ``bf16``, ``int8``, ``gauss4``.
        gradient_format: None leaves gradients in ``.grad``; ``bf16``, ``fp8-e4m3`` or ``fp8-e5m2`` moves
            each into a store as soon as backward has formed it, and adds there.
        check_finite: Whether a step refuses gradients that are not finite; on CUDA that synchronises once.
        seed: Seed of stochastic rounding, which depends on it, the parameter and the step alone.
        **options: The other keys of ``group_options.DEFAULTS``. Those most used: ``block_elements`` (128),
            ``scale_dtype`` (``fp32``), ``adamw_format`` (``fp32``, ``bf16`` or ``int8``), ``betas``, ``adjust_lr_fn``,
            ``ns_coefficients``, ``ns_steps``, ``ns_workspace`` (``min``, ``fast`` or ``gram``), ``rounding``
            (of weights that are not fp32), ``master`` (``split``: bf16 weights with their other 16 bits),
            ``offload`` (states on the CPU), ``reuse_gradient`` (a bf16 gradient is overwritten by
            the update), ``projection_rank`` (GaLore), ``low_rank`` (a part of momentum in int8).

    Raises:
        OptimizerError: If a parameter or option cannot be handled.
        UnknownNameError: If a key, format or schedule is not known.

    Example:
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> optimizer = Muon([{"params": [layer.weight], "algorithm": "muon"}], lr=0.02, momentum_format="int8")
        >>> sorted(optimizer.state[layer.weight])
        ['codes', 'scales', 'step']
    """

    def __init__(
        self,
        params: Any,
        lr: float = DEFAULTS["lr"],
        weight_decay: float = DEFAULTS["weight_decay"],
        momentum: float = DEFAULTS["momentum"],
        nesterov: bool = DEFAULTS["nesterov"],
        *,
        momentum_format: str = DEFAULTS["momentum_format"],
        gradient_format: str | None = None,
        check_finite: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        checked_keys(options)
        given = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        self.seed = seed
        self.gradient_format = gradient_format
        self.check_finite = check_finite
        self._handles: dict[Tensor, Handle] = {}
        self._places: dict[Tensor, int] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._hooks: list[Any] = []
        self._releasing = False
        self._accumulating = False
        super().__init__(params, {**DEFAULTS, **options, **given, "momentum_format": momentum_format})

    def add_param_group(self, param_group: Group) -> None:
        """Check a group, then add it and make the state of its parameters."""
        checked_keys(param_group)
        group = {**self.defaults, **param_group}
        checked_options(group)
        if diverges(group):
            warnings.warn(f"{group['momentum_format']!r} diverges; it shows the notes' own quantiser", stacklevel=3)
        entries = group["params"]
        single = isinstance(entries, Tensor) or hasattr(entries, "as_handle")
        named = [entry if isinstance(entry, tuple) else ("", entry) for entry in ([entries] if single else entries)]
        handles = [self._handle(entry) for _, entry in named]
        for handle, (name, _) in zip(handles, named, strict=True):
            checked_parameter(handle, group, name)
        keys = [(name, handle.key) if name else handle.key for handle, (name, _) in zip(handles, named, strict=True)]
        super().add_param_group({**param_group, "params": keys})
        for handle in handles:
            self._adopt(handle, self.param_groups[-1])

    def _handle(self, entry: Any) -> Handle:
        if hasattr(entry, "as_handle"):
            handle: Handle = entry.as_handle()
            if self.gradient_format:
                handle.store = GradientStore(self.gradient_format, handle.shape)
            return handle
        if not isinstance(entry, Tensor):
            raise OptimizerError(f"a parameter must be a tensor or a quantised weight, got {type(entry).__name__}")
        store = GradientStore(self.gradient_format, entry.shape) if self.gradient_format else None
        return FloatHandle(entry, store)

    def _adopt(self, handle: Handle, group: Group) -> None:
        """Make the state of a new parameter."""
        state = initial_state(handle, group)
        if group["master"] == "split":
            state["mantissa"] = torch.zeros(handle.shape, dtype=torch.int16, device=handle.key.device)
            assert isinstance(handle, FloatHandle)
            handle = SplitHandle(handle.parameter, state["mantissa"], handle.store)
        self.state[handle.key] = state
        self._handles[handle.key] = handle
        self._places[handle.key] = len(self._places)
        if self.gradient_format or self._releasing:
            self._listen(handle, group)

    def _listen(self, handle: Handle, group: Group) -> None:
        """Register a hook for each gradient that backward completes."""
        optimizer = weakref.ref(self)  # an optimizer that is gone must not act on gradients any more

        def call() -> None:
            alive = optimizer()
            if alive is not None:
                alive._after_backward(handle, group)

        self._hooks.append(handle.on_gradient(call))

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; a gradient in a store is consumed.

        Args:
            closure: Computes the gradients anew and returns the loss.

        Raises:
            OptimizerError: If a gradient is not finite or is sparse; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [(handle, group) for handle, group in self.handles() if handle.gradient(False) is not None]
        self._refuse_unusable([handle for handle, _ in ready])
        for handle, group in ready:
            self._update(handle, group)
            if handle.store is not None:
                handle.store.clear()
        return loss

    def _refuse_unusable(self, handles: list[Handle]) -> None:
        """Raise if a gradient is not finite; the host waits once for each device."""
        broken = first_not_finite(handles) if self.check_finite else None
        if broken is not None:
            name = parameter_name(self.param_groups, broken.key)
            raise OptimizerError(f"the gradient of {name} is not finite; no parameter or state was changed")

    def _update(self, handle: Handle, group: Group) -> None:
        state = self.state[handle.key]
        gradient = handle.gradient(group["reuse_gradient"])
        assert gradient is not None
        generator = self._seeded_generator(handle.key)
        if group["algorithm"] == "adamw":
            moments = adamw_options(group, handle.shape.numel())
            stager = self._stager(handle, group, moments.codecs[0], adamw_chunk_length(handle, moments))
            adamw_step_(handle, gradient, state, moments, generator, stager)
            return
        options = muon_options(group)
        length = chunk_length(handle.shape.numel(), options.chunk_elements, options.codec.block_elements)
        stager = self._stager(handle, group, options.codec, length)
        if group["projection_rank"]:
            projected_step_(handle, gradient, state, options, generator, stager, group)
        else:
            muon_step_(handle, gradient, state, options, generator, stager)
        state["step"] += 1

    def _stager(self, handle: Handle, group: Group, codec: Codec, length: int) -> Stager:
        """Return the stager of a parameter's state, in stretches of ``length`` elements."""
        buffers = self._buffers_on(handle.key.device) if group["offload"] else 0
        return stager_of(handle, self.state[handle.key], codec, length, buffers)

    def _buffers_on(self, device: torch.device) -> int:
        """Return how many buffers stretches of offloaded state pass through."""
        return buffers_on(device)

    def _seeded_generator(self, key: Tensor) -> torch.Generator:
        """Return a generator seeded by the seed, the parameter's place and its step alone."""
        generator = self._generators.get(key.device)
        if generator is None:
            generator = self._generators[key.device] = torch.Generator(key.device)
        step = int(self.state[key]["step"])
        return generator.manual_seed((self.seed * 1_000_003 + step) * 1_000_003 + self._places[key])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, those in stores too; ``set_to_none=False`` zeroes ``.grad`` in place."""
        super().zero_grad(set_to_none)
        for handle in self._handles.values():
            if set_to_none or handle.key.grad is None:
                handle.clear_gradient()

    def enable_gradient_release(self) -> None:
        """Update each parameter inside backward, as soon as its gradient is complete, and free that.

        Of all gradients only those of one layer exist at a time. There can be no clipping by a norm
        over all gradients. Backwards inside ``accumulating`` only add up.

        Source:
            https://arxiv.org/abs/2306.09782 (LOMO).
        """
        if not self._hooks:
            for handle, group in self.handles():
                self._listen(handle, group)
        self._releasing = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within, backward adds to gradients and updates nothing; the first backward after it releases the sum."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @torch.no_grad()
    def _after_backward(self, handle: Handle, group: Group) -> None:
        release = self._releasing and not self._accumulating
        handle.collect(keep=not release)
        if release:
            self._refuse_unusable([handle])
            self._update(handle, group)
            handle.clear_gradient()

    def state_dict(self) -> Group:
        """Return state and options, as torch does, once offloaded state has arrived on the CPU."""
        for handle, group in self.handles():
            if group["offload"]:
                finish_copies(handle.key.device)
        content: Group = super().state_dict()
        return content

    def load_state_dict(self, state_dict: Group) -> None:
        """Copy a checkpoint into the existing state, whose dtypes, devices and storages stay.

        torch's own version casts every state to the parameter's dtype, which destroys codes.

        Raises:
            OptimizerError: If the checkpoint's groups, shapes or formats are others; nothing has changed then.
        """
        keys = [key for group in self.param_groups for key in group["params"]]
        states = [self.state[key] for key in keys]
        checked_state_dict(state_dict, self.param_groups, states)
        for key in keys:
            finish_copies(key.device)
        restored(state_dict, states)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(float_options(saved))

    def handles(self) -> Iterator[tuple[Handle, Group]]:
        """Yield every parameter's handle with its group."""
        for group in self.param_groups:
            for key in group["params"]:
                yield self._handles[key], group

    def state_bytes(self) -> int:
        """Return the bytes of all state, which is ``sum(t.nbytes)`` over its tensors."""
        return sum(tensor.nbytes for state in self.state.values() for tensor in state.values())
