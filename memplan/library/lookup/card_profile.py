"""``--profile``: a card's own workspaces and context, as ``memplan validate --calibrate`` wrote them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from memplan.documents.loading import load_document
from memplan.errors import InvalidFileError, printable
from memplan.plan.allowances import MachineProfile
from memplan.plan.memory_plan import Device
from memplan.units import MAXIMUM_BYTES

SCHEMA = "memplan/profile/1"


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
    for item in fields(MachineProfile):
        value, text = data.get(item.name), item.type == "str"
        good = isinstance(value, str) if text else type(value) is int and 0 <= value <= MAXIMUM_BYTES
        if not good:
            problems.append(
                f"{name}: {item.name}: expected {'text' if text else 'whole bytes'}, got {printable(repr(value), 60)}"
            )
    if problems:
        raise InvalidFileError(problems)
    return MachineProfile(**{item.name: data[item.name] for item in fields(MachineProfile)})
