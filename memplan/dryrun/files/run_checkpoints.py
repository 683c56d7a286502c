"""Checkpoints that a script saves and loads again: what is loaded has the shapes of what was saved.

In the place of what is saved a file is written that has all of it but the bytes of tensors, and goes wherever the script moves or copies it; nothing
is remembered besides. A file that is really there is read into ordinary memory, mapped where its format allows, and what belongs on the GPU has
no memory. Tensors that shared a storage share one again, as torch's do.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_LOAD = torch.load
_MARK = b"a checkpoint of memplan's dry run " + uuid4().hex.encode() + b"\n"
"""Begins what is written, of this run alone: ``--allow-writes`` leaves it where the script saves."""


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """What is written of a tensor: where it lay, and values only of those that are known or not many."""

    number: int
    storage: int
    storage_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str
    values: bytes | None
    is_parameter: bool
    is_trained: bool


class RunCheckpoints:
    """Writes what stands for a checkpoint, and makes again what it stands for."""

    def __init__(self) -> None:
        self.values: Callable[[Tensor], Tensor | None] = lambda _: None

    def written(self, thing: Any) -> tuple[bytes, int]:
        """Return what is to be written in the place of what is saved, and the bytes of the tensors in that."""
        stream = BytesIO()
        pickler = _Pickler(stream, self.values)
        pickler.dump(thing)
        return _MARK + stream.getvalue(), sum(pickler.storages.values())

    def load(self, f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        """Load what ``torch.load`` would: of this run, or from a file that is there."""
        if (saved := _saved_in(f)) is not None:
            return _Unpickler(BytesIO(saved), map_location).load()
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

    def without_tensors(self, file: Any) -> Any:
        """Return what a file of this run holds, with None in the place of tensors; None where there is no such file."""
        with suppress(FileNotFoundError):
            if (saved := _saved_in(file)) is not None:
                return _Bare(BytesIO(saved)).load()
        return None

    def load_tensors(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what loads a file of safetensors: of this run, or one that is there."""

        def loaded(filename: Any, device: Any = "cpu", *args: Any, **options: Any) -> Any:
            if (saved := _saved_in(filename)) is not None:
                return _Unpickler(BytesIO(saved), device).load()
            return {name: tensor.to(device) for name, tensor in original(filename, "cpu", *args, **options).items()}

        return loaded


class _Pickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, but for the bytes of tensors.

    Args:
        values: Returns the values of a tensor, where they are known.
    """

    def __init__(self, stream: BytesIO, values: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._values = values
        self._tensors: dict[int, tuple[Tensor, _SavedTensor]] = {}
        self.storages: dict[int, int] = {}

    def persistent_id(self, thing: Any) -> _SavedTensor | None:
        """Return what is written of a tensor; all else is pickled as ever."""
        if not isinstance(thing, Tensor):
            return None
        if id(thing) not in self._tensors:
            tensor = getattr(thing, "_local_tensor", thing)
            self._tensors[id(thing)] = (thing, self._saved(tensor, len(self._tensors)))
        return self._tensors[id(thing)][1]

    def _saved(self, tensor: Tensor, number: int) -> _SavedTensor:
        storage, known = tensor.untyped_storage(), self._values(tensor)
        self.storages[storage._cdata] = storage.nbytes()
        many = known is None or (tensor.is_floating_point() and tensor.numel() > _MOST_VALUES)
        return _SavedTensor(
            number,
            storage._cdata,
            storage.nbytes(),
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            str(tensor.device),
            None if many or known is None else _bytes_of(known),
            isinstance(tensor, torch.nn.Parameter),
            tensor.requires_grad and tensor.is_leaf,
        )


_MOST_VALUES = 2**16
"""Numbers up to which values are written: losses, states of a schedule; of ids, labels and masks all are."""


class _Unpickler(pickle.Unpickler):
    """Makes what was saved again, where it is to be loaded."""

    def __init__(self, stream: BytesIO, map_location: Any) -> None:
        super().__init__(stream)
        self._target = _target(map_location)
        self._tensors: dict[int, Tensor] = {}
        self._storages: dict[tuple[int, str, torch.dtype], Tensor] = {}

    def persistent_load(self, saved: _SavedTensor) -> Tensor:
        """Return a tensor, the same each time that it is met."""
        if saved.number not in self._tensors:
            tensor = self._tensor(saved)
            self._tensors[saved.number] = (
                torch.nn.Parameter(tensor, saved.is_trained)
                if saved.is_parameter
                else tensor.requires_grad_(saved.is_trained)
            )
        return self._tensors[saved.number]

    def _tensor(self, saved: _SavedTensor) -> Tensor:
        device = self._target(saved.device)
        if saved.values is not None:
            flat = torch.frombuffer(bytearray(saved.values or b"0" * 16), dtype=saved.dtype)
            return flat[: math.prod(saved.shape)].reshape(saved.shape).to(device)
        place = (saved.storage, device, saved.dtype)
        if place not in self._storages:
            self._storages[place] = torch.empty(
                saved.storage_bytes // saved.dtype.itemsize, dtype=saved.dtype, device=device
            )
        return self._storages[place].as_strided(saved.shape, saved.stride, saved.offset)


class _Bare(pickle.Unpickler):
    """Leaves tensors out."""

    def persistent_load(self, saved: _SavedTensor) -> None:
        """Return nothing for a tensor."""
        del saved


def _bytes_of(values: Tensor) -> bytes:
    return values.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy().tobytes()


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


def _saved_in(file: Any) -> bytes | None:
    """Return what a file or a stream holds of what this run saved; the stream of another stays where it is."""
    if isinstance(file, str | bytes | os.PathLike):
        with open(file, "rb") as stream:
            return stream.read() if stream.read(len(_MARK)) == _MARK else None
    place = file.tell()
    if file.read(len(_MARK)) == _MARK:
        return bytes(file.read())
    file.seek(place)
    return None
