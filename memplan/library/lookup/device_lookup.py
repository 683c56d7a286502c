"""Devices: from a GPU's name, a size of memory or this machine's driver to what a job has to fit on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import Gpu
from memplan.documents.loading import load_document
from memplan.errors import CannotAnswerError, InvalidFileError, normalised_name, printable, shown_value
from memplan.plan.allowances import MachineProfile
from memplan.plan.memory_plan import UNLISTED, Device
from memplan.units import parse_bytes

if TYPE_CHECKING:
    from memplan.host.this_machine import NvidiaDevice


def find_device(name: str | None, memory: str | None, count: int, catalog: Catalog) -> Device:
    """Return the device that ``--gpu``, ``--gpu-memory`` or the machine itself names.

    Raises:
        CannotAnswerError: No GPU was named and none is here.
    """
    if name is not None and memory is not None:
        raise InvalidFileError(["both --gpu and --gpu-memory given: give one of them"])
    if memory is not None:
        return Device(custom_gpu(parse_bytes(memory), memory), f"{UNLISTED}{memory}", count)
    if name is None or normalised_name(name) == "local":
        return Device(*local_gpu(catalog), count)
    name = _of_instance(name, catalog)
    counted = re.fullmatch(r"\s*([1-9]\d{0,8})\s*[xX*]\s*(.+)", name)
    if counted and name not in catalog.gpus and counted[2] in catalog.gpus:
        known = catalog.gpus.name_of(counted[2])
        raise InvalidFileError([f'--gpu {printable(name)} names one GPU; several: --gpus "{counted[1]}x {known}"'])
    sized = re.fullmatch(r"\s*(\d{1,3}|\d{1,6}(?=\s*g))\s*(?:g|gb|gib)?\s*", name, re.IGNORECASE)
    if sized and name not in catalog.gpus:
        raise InvalidFileError(
            [f"--gpu {printable(name)} names no GPU; for one of that size: --gpu-memory {sized[1]}GiB"]
        )
    return Device(catalog.gpus[name], catalog.gpus.name_of(name), count)


def _of_instance(name: str, catalog: Catalog) -> str:
    """Return the GPU of a cloud's instance that has one, and any other name as it is.

    Raises:
        InvalidFileError: The instance has several, so that its name says neither one nor all.
    """
    instance = None if name in catalog.gpus else catalog.tables.instance(name)
    if instance is None:
        return name
    gpu, each = instance
    if each == 1:
        return gpu
    raise InvalidFileError([f'{printable(name)} has {each} {gpu}: --gpus "{each}x {gpu}" for all, --gpu {gpu} for one'])


def custom_gpu(size: int, shown: str) -> Gpu:
    """Return a catalog entry for a GPU of which only the memory is known."""
    if size <= 0:
        raise InvalidFileError([f"--gpu-memory {shown}: expected a size above 0"])
    return Gpu.of_memory(f"GPU with {shown}", size, "stated")


def local_gpu(catalog: Catalog) -> tuple[Gpu, str]:
    """Return the first GPU of this machine as its driver describes it, and its name.

    Raises:
        CannotAnswerError: No driver, or no device.
    """
    from memplan.host.this_machine import nvidia_devices

    devices = nvidia_devices()
    if not devices:
        raise CannotAnswerError(
            "no GPU found on this machine; name one with --gpu (memplan list gpus) or give --gpu-memory 24GiB"
        )
    device = devices[0]
    return _closest_entry(device, catalog), device.name


def _closest_entry(device: NvidiaDevice, catalog: Catalog) -> Gpu:
    """Return the catalog entry of a card with the driver's own totals, or one made from these."""
    name, total, usable = device
    key = normalised_name(name.removeprefix("NVIDIA "))
    for entry in catalog.gpus.entries.values():
        names = (normalised_name(one.removeprefix("NVIDIA ")) for one in (entry.name, *entry.aliases))
        alike = any(one == key or re.fullmatch(rf"{re.escape(key)}\d+gb", one) for one in names)
        if alike and abs(entry.memory_bytes - total) < 2**30:
            return replace(entry, memory_bytes=total, cuda_total_bytes=min(entry.cuda_total_bytes, usable))
    return replace(custom_gpu(usable, "its driver's total"), name=name, memory_bytes=total)


SCHEMA = "memplan/profile/1"
MOST_OF_A_CARD = 2**42
"""No card has more bytes; a larger figure of a profile is a slip."""


def with_profile(device: Device, path: Path | None) -> Device:
    """Return a device with the profile in a file, or as it is without one.

    Raises:
        InvalidFileError: The file cannot be read, or is no profile of a CUDA device.
    """
    return device if path is None else replace(device, profile=_profile(path))


def _profile(path: Path) -> MachineProfile:
    document = load_document(path)
    data, name = document.data, document.name
    if document.problems:
        raise InvalidFileError(document.problems)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InvalidFileError([f"{name}: not a profile of memplan validate --calibrate (schema {SCHEMA})"])
    problems = []
    hints = get_type_hints(MachineProfile)
    for key, hint in hints.items():
        value, text = data.get(key), hint is str
        good = isinstance(value, str) if text else type(value) is int and 0 <= value <= MOST_OF_A_CARD
        if not good:
            problems.append(
                f"{name}: {key}: expected {'text' if text else 'whole bytes, at most 4 TiB'}, got {shown_value(value, 60)}"
            )
    if not problems and data["upper_context_bytes"] < data["context_bytes"]:
        problems.append(f"{name}: upper_context_bytes: expected at least context_bytes, of which it is the greatest")
    if problems:
        raise InvalidFileError(problems)
    return MachineProfile(**{key: data[key] for key in hints})
