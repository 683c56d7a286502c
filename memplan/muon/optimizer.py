"""``Muon``: the thin optimizer around ``steps``, which routes each group to Muon or AdamW.

Muon orthogonalises the running mean of a matrix's gradients; ``update_rule`` has the rule on one screen. It is for
the matrices inside a network; embeddings, the head, norms and biases take AdamW: ``Muon.from_model`` tells them
apart. State is made at construction and holds plain tensors only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, overload

import torch
from torch import Tensor, nn

from memplan.muon.group_options import DEFAULTS, checked_keys, checked_options, diverges, muon_options, own_options
from memplan.muon.parameter_groups import named_groups
from memplan.muon.parameter_state import (
    begins_anew,
    checked_handles,
    first_not_finite,
    follow_parameter,
    initial_state,
    parameter_name,
    restore,
    share_states,
)
from memplan.muon.parameter_updates import batches_of, needs_exchange, rounds_of, update_parameter_, update_together_
from memplan.muon.registered_parameters import RegisteredParameters
from memplan.muon.sharded.divisions import anywhere, draw_number, is_divided
from memplan.muon.stores.optimizer_errors import OptimizerError
from memplan.muon.stores.rounding_noise import SEED_STEP, Phases, phases_of, seed_of
from memplan.muon.updates.backward_hooks import BackwardHooks, clip_gradients_
from memplan.muon.updates.handles import Handle, SplitHandle
from memplan.muon.updates.offload import buffers_on, finish_copies
from memplan.muon.updates.rounds import Shard, update_round_

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
        **options: The other keys of ``group_options.DEFAULTS``; ``docs/muon.md`` explains those most used.

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
        if not isinstance(seed, int) or not isinstance(check_finite, bool):
            raise OptimizerError(f"expected a whole seed, check_finite True or False; got {seed!r}, {check_finite!r}")
        given = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        self.seed = seed
        self.gradient_format = gradient_format
        self.check_finite = check_finite
        self._parameters = RegisteredParameters()
        self._backward = BackwardHooks(self._use_gradient)
        defaults = {**DEFAULTS, **own_options(options), **given, "momentum_format": momentum_format}
        super().__init__(params, defaults)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        *,
        assign: Mapping[str, str] | None = None,
        adamw: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Muon:
        """Return the optimizer of all parameters of ``model``: hidden matrices under Muon, all others under AdamW.

        Args:
            model: Any module; quantised layers too.
            assign: ``muon`` or ``adamw`` by name or pattern, for what no rule knows (``split_parameters``).
            adamw: Options of AdamW's groups alone, such as its own ``lr``.
            **options: Those of the class, for all groups.

        Raises:
            OptimizerError: If no rule knows a parameter, or if there is no matrix for Muon.

        Example:
            >>> layers = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)
            >>> optimizer = Muon.from_model(torch.nn.Sequential(*layers), lr=0.02, adamw={"lr": 3e-4})
            >>> [(group["algorithm"], group["lr"], group["param_names"]) for group in optimizer.param_groups]
            [('muon', 0.02, ['1.weight']), ('adamw', 0.0003, ['0.weight', '1.bias', '2.weight', '2.bias'])]
        """
        return cls(named_groups(model, assign, adamw), **options)

    def add_param_group(self, param_group: Group) -> None:
        """Check a group, then add it and make the state of its parameters."""
        checked_keys(param_group)
        param_group = own_options(param_group)
        group = {**self.defaults, **param_group}
        checked_options(group)
        if diverges(group):
            warnings.warn(f"{group['momentum_format']!r} diverges; it shows the notes' own quantiser", stacklevel=3)
        handles, names = checked_handles(group, self.gradient_format)
        keys = [(name, handle.key) if name else handle.key for handle, name in zip(handles, names, strict=True)]
        super().add_param_group({**param_group, "params": keys})
        for handle in handles:
            self._adopt(handle, self.param_groups[-1])

    def _adopt(self, handle: Handle, group: Group) -> None:
        """Make the state of a new parameter."""
        state = self.state[handle.key] = initial_state(handle, group)
        if "mantissa" in state:
            handle = SplitHandle(handle.key, state["mantissa"], handle.store)
        self._parameters.add(handle, group)
        if self.gradient_format or self._backward.releasing:
            self._backward.listen([(handle, group)])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; a gradient in a store is consumed.

        A compiled caller runs it as it is: its scratch is planned, and its kernels are chosen.

        Args:
            closure: Computes the gradients anew and returns the loss.

        Raises:
            OptimizerError: If a gradient is not finite or is sparse, or a group's state cannot follow its options.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [(handle, group) for handle, group in self.handles() if handle.gradient(False) is not None]
        self._refuse_changed(ready)
        self._refuse_unusable([handle for handle, _ in ready])
        for handles, group in rounds_of(ready):
            self._update_round(handles, group)
        for handles, group in batches_of([entry for entry in ready if not needs_exchange(*entry)]):
            if len(handles) > 1:
                for handle in handles:
                    follow_parameter(handle, group, self.state[handle.key])
                keys = [handle.key for handle in handles]
                generators = [self._seeded_generator(key) for key in keys]
                phases = [self._phases(key, group) for key in keys]
                update_together_(handles, group, [self.state[key] for key in keys], generators, phases)
                continue
            self._update(handles[0], group)
            if handles[0].store is not None:
                handles[0].store.clear()
        return loss

    def _refuse_changed(self, ready: list[tuple[Handle, Group]]) -> None:
        """Raise if a group was given options since that cannot be run, or that its parameters' states do not fit."""
        if any(handle.key.is_cuda for handle, _ in ready) and torch.cuda.is_current_stream_capturing():
            raise OptimizerError("a step reads counters on the host, and cannot be captured in a CUDA graph")
        self._parameters.refuse_changes(ready, self.param_groups)
        self._make_missing(ready)

    def _make_missing(self, parameters: Iterable[tuple[Handle, Group]]) -> None:
        """Make the states that parameters lack."""
        for handle, group in parameters:
            if begins_anew(handle, self.state.get(handle.key, {})):
                self.state[handle.key] = initial_state(handle, group)

    def _refuse_unusable(self, handles: list[Handle]) -> None:
        """Raise if a gradient is not finite; the host waits once for each device."""
        if not self.check_finite:
            return
        broken = first_not_finite(handles)
        elsewhere = anywhere(broken is not None, [handle.key for handle in handles])
        if broken is not None:
            name = parameter_name(self.param_groups, broken.key)
            raise OptimizerError(f"the gradient of {name} is not finite; no parameter or state was changed")
        if elsewhere:
            raise OptimizerError("a gradient is not finite on another rank; no parameter or state was changed")

    def _update(self, handle: Handle, group: Group) -> None:
        key, state = handle.key, self.state[handle.key]
        follow_parameter(handle, group, state)
        buffers = self._buffers_on(key.device) if group["offload"] else 0
        update_parameter_(handle, group, state, self._seeded_generator(key), self._phases(key, group), buffers)

    def _update_round(self, handles: list[Handle], group: Group) -> None:
        shards = []
        for handle in handles:
            follow_parameter(handle, group, self.state[handle.key])
            generator, phases = self._seeded_generator(handle.key), self._phases(handle.key, group)
            shards.append(Shard(handle, self.state[handle.key], generator, phases))
        update_round_(shards, muon_options(group), self._buffers_on(handles[0].key.device) if group["offload"] else 0)

    def _phases(self, key: Tensor, group: Group) -> Phases | None:
        """Return the phases of a parameter's rounding, where its group asks for them."""
        if group["rounding"] != "golden":
            return None
        return phases_of(key.device, self.seed, draw_number(self._parameters.places[key], key), self.state[key]["step"])

    def _buffers_on(self, device: torch.device) -> int:
        """Return how many buffers stretches of offloaded state pass through."""
        return buffers_on(device)

    def _seeded_generator(self, key: Tensor) -> torch.Generator:
        """Return a generator seeded by the seed, the parameter's place and its step alone."""
        step = int(self.state[key]["step"])
        place = draw_number(self._parameters.places[key], key)
        return torch.Generator(key.device).manual_seed(seed_of(self.seed * SEED_STEP + step, place))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients, those in stores too, so that their norm is at most ``max_norm``; return the norm before.

        Raises:
            OptimizerError: If gradients are released inside backward, or, where asked for, the norm is not finite.
        """
        if self._backward.releasing:
            raise OptimizerError("gradients are released one by one inside backward: no norm over all of them exists")
        given = {handle.key: handle.gradient(False) for handle, _ in self.handles()}
        ready = {key: gradient for key, gradient in given.items() if gradient is not None}
        return clip_gradients_(list(ready.values()), list(ready), max_norm, error_if_nonfinite)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, those in stores too; ``set_to_none=False`` zeroes ``.grad`` in place."""
        super().zero_grad(set_to_none)
        for handle in self._parameters.handles.values():
            if set_to_none or handle.key.grad is None:
                handle.clear_gradient()

    def enable_gradient_release(self) -> None:
        """Update each parameter inside backward, as soon as its gradient is complete, and free that.

        Of all gradients only those of one layer exist at a time. There can be no clipping by a norm over all
        gradients. Backwards inside ``accumulating`` only add up. Source: https://arxiv.org/abs/2306.09782 (LOMO).

        Raises:
            OptimizerError: If ranks orthogonalise each other's matrices, a round at a time.
        """
        if any(is_divided(handle.key) or group["share_replicas"] for handle, group in self.handles()):
            raise OptimizerError(
                "gradients of DTensors, or with share_replicas, cannot be released inside backward: ranks exchange matrices in a step"
            )
        self._backward.release(self.handles())

    def accumulating(self) -> AbstractContextManager[None]:
        """Within, backward adds to gradients and updates nothing; the first backward after it releases the sum."""
        return self._backward.sums_only()

    def _use_gradient(self, handle: Handle, group: Group) -> None:
        """Update a parameter inside backward, and free its gradient."""
        self._refuse_changed([(handle, group)])
        self._refuse_unusable([handle])
        self._update(handle, group)
        handle.clear_gradient()

    def state_dict(self) -> Group:
        """Return state and options, as torch does, once offloaded state has arrived on the CPU."""
        for handle, group in self.handles():
            if group["offload"]:
                finish_copies(handle.key.device)
        content: Group = super().state_dict()
        share_states(content, self.handles())
        return content

    def load_state_dict(self, state_dict: Group) -> None:
        """Copy a checkpoint into the existing state, whose dtypes, devices and storages stay.

        torch's own version casts every state to the parameter's dtype, which destroys codes.

        Raises:
            OptimizerError: If the checkpoint's groups, shapes or formats are others; nothing has changed then.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._make_missing(self.handles())
        keys = [handle.key for handle, _ in self.handles()]
        for device in {key.device for key in keys}:
            finish_copies(device)
        restore(state_dict, self.param_groups, [self.state[key] for key in keys])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> Group:
        """Return what a copy or a pickle takes along; its hooks are made anew."""
        own = ("seed", "gradient_format", "check_finite", "_parameters")
        copied = {name: self.__dict__[name] for name in own}
        return {**super().__getstate__(), **copied, "releasing": self._backward.releasing}

    def __setstate__(self, state: Group) -> None:
        """Become a copy, which listens to the gradients of its own parameters."""
        releasing = state.pop("releasing")
        super().__setstate__(state)
        self._parameters.checked.clear()
        self._backward = BackwardHooks(self._use_gradient)
        self._backward.releasing = releasing
        if self.gradient_format or releasing:
            self._backward.listen(self.handles())

    def handles(self) -> Iterator[tuple[Handle, Group]]:
        """Yield every parameter's handle with its group."""
        yield from self._parameters.of(self.param_groups)

    def state_bytes(self) -> int:
        """Return the bytes of all state, which is ``sum(t.nbytes)`` over its tensors."""
        return sum(tensor.nbytes for state in self.state.values() for tensor in state.values())
