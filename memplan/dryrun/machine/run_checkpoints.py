"""Checkpoints that a script saves and loads again: what is loaded has the shapes of what was saved.

In the place of what is saved a mark is written, which goes wherever the script moves or copies the file. A file that is really there is read into ordinary memory, mapped where its format allows, and what belongs on the GPU has
no memory. Tensors that shared a storage share one again, as torch's do.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_LOAD = torch.load
_MARK = b"a checkpoint of memplan's dry run " + uuid4().hex.encode() + b", number %012d\n"
"""What is written, of this run alone: ``--allow-writes`` leaves it where the script saves."""


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """What is remembered of a tensor: a reference to its storage would keep that alive."""

    storage: int
    storage_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str
    values: Tensor | None
    is_parameter: bool


class RunCheckpoints:
    """Remembers what was saved."""

    def __init__(self) -> None:
        self._saved: dict[bytes, Any] = {}
        self.values: Callable[[Tensor], Tensor | None] = lambda _: None

    def mark(self, thing: Any) -> bytes:
        """Remember what is saved; return what is to be written in its place."""
        mark = _MARK % len(self._saved)
        self._saved[mark] = self._frozen(thing)
        return mark

    def load(self, f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        """Load what ``torch.load`` would: of this run, or from a file that is there."""
        if (mark := _mark_in(f)) in self._saved:
            return _Thawed(map_location).thawed(self._saved[mark])
        places: dict[int, str] = {}

        def noted(storage: Any, location: str) -> Any:
            places[storage._cdata] = location
            return storage

        mapped = {"mmap": True} if isinstance(f, str | os.PathLike) else {}
        with _disable_current_modes():
            try:
                whole = _LOAD(f, noted, *args, **{**options, **mapped})
            except RuntimeError:  # of the older format, which cannot be mapped
                places.clear()
                whole = _LOAD(f, noted, *args, **options)
        return _Moved(map_location, places).moved(whole)

    def load_tensors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what loads a file of safetensors: of this run, or one that is there."""

        def loaded(filename: Any, device: Any = "cpu", *args: Any, **options: Any) -> Any:
            if (mark := _mark_in(filename)) in self._saved:
                return _Thawed(device).thawed(self._saved[mark])
            return {name: tensor.to(device) for name, tensor in original(filename, "cpu", *args, **options).items()}

        return loaded

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._frozen_tensor(getattr(value, "_local_tensor", value))
        if isinstance(value, dict | list | tuple):
            return _each(value, self._frozen)
        if isinstance(value, torch.nn.Module):
            return value
        with suppress(Exception):
            return copy.deepcopy(value)
        return value

    def _frozen_tensor(self, tensor: Tensor) -> _SavedTensor:
        storage, known = tensor.untyped_storage(), self.values(tensor)
        return _SavedTensor(
            storage._cdata,
            storage.nbytes(),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            str(tensor.device),
            None if known is None or tensor.numel() > _MOST_VALUES else known.detach().clone(),
            isinstance(tensor, torch.nn.Parameter),
        )


_MOST_VALUES = 2**16
"""Elements up to which values are remembered: counters, states of generators."""


class _Thawed:
    """Makes what was saved again, where it is to be loaded."""

    def __init__(self, map_location: Any) -> None:
        self._target = _target(map_location)
        self._storages: dict[tuple[int, str, torch.dtype], Tensor] = {}

    def thawed(self, value: Any) -> Any:
        """Return a tensor, or what holds some, made again."""
        if isinstance(value, _SavedTensor):
            tensor = self._tensor(value)
            return torch.nn.Parameter(tensor, tensor.is_floating_point()) if value.is_parameter else tensor
        if isinstance(value, torch.nn.Module):
            return copy.deepcopy(value).to(self._target("cpu"))
        return _each(value, self.thawed)

    def _tensor(self, saved: _SavedTensor) -> Tensor:
        device = self._target(saved.device)
        if saved.values is not None:
            return saved.values.clone().to(device)
        place = (saved.storage, device, saved.dtype)
        if place not in self._storages:
            self._storages[place] = torch.empty(
                saved.storage_bytes // saved.dtype.itemsize, dtype=saved.dtype, device=device
            )
        return self._storages[place].as_strided(saved.shape, saved.stride, saved.offset)


class _Moved:
    """Moves what was read to where it is to be loaded.

    Args:
        places: Where each storage was when it was saved.
    """

    def __init__(self, map_location: Any, places: dict[int, str]) -> None:
        self._target, self._places = _target(map_location), places
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def moved(self, value: Any) -> Any:
        """Return a tensor, or what holds some, moved."""
        if isinstance(value, Tensor):
            moved = self._tensor(value)
            trained = isinstance(value, torch.nn.Parameter) and moved is not value
            return torch.nn.Parameter(moved, value.requires_grad) if trained else moved
        if isinstance(value, torch.nn.Module):
            return value.to(self._target("cpu"))
        return _each(value, self.moved)

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        device = self._target(self._places.get(storage._cdata, "cpu"))
        if device == "cpu":
            return tensor
        place = (storage._cdata, tensor.dtype)
        if place not in self._storages:
            length = storage.nbytes() // tensor.element_size()
            self._storages[place] = tensor.detach().as_strided((length,), (1,), 0).to(device)
        return self._storages[place].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Probe:
    """Stands for a storage where ``map_location`` is a function, and remembers where that would put it."""

    def __init__(self) -> None:
        self.device = "cpu"

    def cuda(self, device: Any = 0, **_: Any) -> _Probe:
        """Go to a GPU."""
        self.device = str(torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda"))
        return self

    def cpu(self) -> _Probe:
        """Go to the CPU."""
        self.device = "cpu"
        return self


def _target(map_location: Any) -> Callable[[str], str]:
    """Return what tells where a storage that was on a device is loaded to (torch/serialization.py, ``_get_restore_location``)."""
    if map_location is None:
        return lambda place: place
    if isinstance(map_location, dict):
        return lambda place: str(map_location.get(place, place))
    if isinstance(map_location, str | torch.device):
        return lambda _: str(map_location)
    if isinstance(map_location, int):
        return lambda _: f"cuda:{map_location}"

    def called(place: str) -> str:
        probe = map_location(_Probe(), place)
        return probe.device if isinstance(probe, _Probe) else place

    return called


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a container with a function applied to what it holds; what is none is itself."""
    if isinstance(value, dict):
        changed = copy.copy(value)
        for name, item in value.items():
            changed[name] = function(item)
        return changed
    if isinstance(value, list | tuple):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _mark_in(file: Any) -> bytes:
    """Return what a file or a stream begins with, as long as a mark; the stream stays where it is."""
    if isinstance(file, str | bytes | os.PathLike):
        with open(file, "rb") as stream:
            return stream.read(len(_MARK % 0))
    place = file.tell()
    begins = file.read(len(_MARK % 0))
    file.seek(place)
    return bytes(begins)
