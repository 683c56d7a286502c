"""The bundled optimizer in a training job, on tensors that may have no memory."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from memplan.catalog import entries
from memplan.catalog.update_classes import BUNDLED
from memplan.errors import CannotAnswerError
from memplan.muon import Muon
from memplan.muon.state_codecs.codecs import SCALE_DTYPES
from memplan.muon.state_codecs.state_formats import (
    ADAMW_EXEMPT_BELOW,
    ADAMW_FORMATS,
    DEFAULT_BLOCK,
    MOMENTUM_FORMATS,
    adamw_codecs,
    momentum_codec,
)
from memplan.muon.stores.chunk_loops import first_turns
from memplan.muon.stores.gradient_stores import GRADIENT_FORMATS
from memplan.muon.updates.handles import Handle
from memplan.trace.jobs.gradient_lifetimes import Trained
from memplan.training.resolved import TrainingSetup

TURNS = 2
"""Turns of a loop over chunks that are traced: the second runs with the tensors that the first has left alive."""


def short_loops() -> AbstractContextManager[None]:
    """Run only the first turns of the bundled optimizer's loops over chunks of a tensor."""
    return first_turns(TURNS)


class MetaMuon(Muon):
    """The bundled optimizer without what needs values: the check for overflow and random seeds.

    Where tensors have no memory, only the first of several weights of one shape is updated:
    the others would take and give back the same memory again. Offloaded states then pass through
    as many buffers as they would on the device that is traced.
    """

    staged = 0

    def _buffers_on(self, device: torch.device) -> int:
        return self.staged if device.type == "meta" else super()._buffers_on(device)

    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        self._seen: set[tuple[Any, ...]] = set()
        return super().step(closure)

    def _refuse_unusable(self, handles: list[Handle]) -> None:
        if not any(handle.key.is_meta for handle in handles):
            super()._refuse_unusable(handles)
            return

    def _update(self, handle: Handle, group: dict[str, Any]) -> None:
        kind = (tuple(handle.shape), handle.key.dtype, getattr(handle.layout, "name", ""), id(group))
        if handle.key.is_meta and kind in self._seen:
            return
        self._seen.add(kind)
        super()._update(handle, group)

    def _seeded_generator(self, key: Tensor) -> torch.Generator:
        if key.is_meta:
            return torch.Generator()
        return super()._seeded_generator(key)


class BundledUpdate:
    """What steps some of the weights by the bundled optimizer.

    Attributes:
        on_host: Whether its states are offloaded.
    """

    note = ""

    def __init__(
        self, name: str, entry: entries.Optimizer, weights: Sequence[Trained], setup: TrainingSetup, staged: int = 0
    ) -> None:
        formats = {dtype: name for name, dtype in GRADIENT_FORMATS.items()}
        other = (_gradient_dtype(weight) for weight in weights if _gradient_dtype(weight) != _default_dtype(weight))
        keeps = next((formats[dtype] for dtype in other), None)
        options = update_options(name, entry)
        muon = {
            "ns_workspace": setup.profile.newton_schulz,
            "batch_bytes": setup.profile.muon_batch_bytes,
            "share_replicas": setup.config.parallel.shared_muon,
        }
        products = muon if entry.orthogonalises else {}
        group = {"params": [_entry(weight) for weight in weights], "rounding": "stochastic", **products, **options}
        with warnings.catch_warnings():  # of formats that diverge: what is traced has no numbers
            warnings.simplefilter("ignore")
            self.optimizer = MetaMuon([group], gradient_format=keeps, offload=staged > 0)
        self.optimizer.staged, self.on_host = staged, staged > 0
        for weight, (handle, _) in zip(weights, self.optimizer.handles(), strict=True):
            weight.store = handle.store

    def step(self) -> None:
        """Update the weights from their gradients."""
        self.optimizer.step()

    def states(self) -> Iterator[tuple[Tensor, str]]:
        """Yield every tensor of the optimizer's state."""
        return state_tensors(self.optimizer)


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str]]:
    """Yield the tensors of an optimizer's state, as far as it has made them, with their names."""
    for state in optimizer.state.values():
        yield from ((value, key) for key, value in state.items() if isinstance(value, Tensor))


def _gradient_dtype(weight: Trained) -> torch.dtype:
    """Return the dtype in which a gradient is stored: by default that in which it is formed."""
    return weight.keeps or (weight.tensor.dtype if weight.weight is None else weight.weight.run.options.compute_dtype)


def _default_dtype(weight: Trained) -> torch.dtype:
    """Return the dtype in which the library stores a gradient by default: bf16 for coded weights."""
    return weight.tensor.dtype if weight.weight is None else torch.bfloat16


def _entry(weight: Trained) -> Any:
    """Return what stands for a weight in the optimizer's groups."""
    return weight.tensor if weight.weight is None else weight.weight.matrix


def update_options(name: str, entry: entries.Optimizer) -> dict[str, Any]:
    """Return the options of a group whose states have the layout of an entry's slots: those it names, or the first that fit.

    Raises:
        CannotAnswerError: The library has no states of that layout.
    """
    algorithm = {"algorithm": "muon" if entry.orthogonalises else "adamw"}
    if entry.options and entry.implementation == BUNDLED:
        return {**algorithm, **entry.options}
    slot = next(slot for slot in entry.slots if slot.layout == "elementwise")
    for options in _adamw_options() if not entry.orthogonalises else _muon_options(slot):
        if _layout(options) == (slot.block_elements, slot.block_bytes, slot.codebook_bytes):
            return {**algorithm, **options}
    raise CannotAnswerError(
        f"{name}: the bundled optimizer has no states of {slot.block_bytes} bytes for {slot.block_elements} elements"
    )


def _adamw_options() -> Iterator[dict[str, Any]]:
    return ({"adamw_format": name} for name in ADAMW_FORMATS)


def _muon_options(slot: entries.StateSlot) -> Iterator[dict[str, Any]]:
    scale = next(name for name, dtype in SCALE_DTYPES.items() if dtype.itemsize == slot.scale_bytes)
    blocks = slot.block_elements if slot.block_elements > 1 else DEFAULT_BLOCK
    return ({"momentum_format": name, "block_elements": blocks, "scale_dtype": scale} for name in MOMENTUM_FORMATS)


def _layout(options: dict[str, Any]) -> tuple[int, int, int]:
    """Return elements and bytes of a block, and bytes of the codebook, of the states that options ask for."""
    if "adamw_format" in options:
        codec = adamw_codecs(options["adamw_format"], ADAMW_EXEMPT_BELOW)[0]
    else:
        codec = momentum_codec(options["momentum_format"], options["block_elements"], options["scale_dtype"])
    return codec.block_elements, codec.block_bytes, getattr(codec, "codebook_bytes", 0)
