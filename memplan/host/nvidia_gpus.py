"""What the machine has: GPUs as the NVIDIA driver lists them."""

from __future__ import annotations

from typing import NamedTuple

from memplan.host.nvidia_driver import nvidia_smi_rows
from memplan.units import MIB

QUERIES = ("name,memory.total,memory.reserved", "name,memory.total")
"""The second for drivers before 510, which know no ``memory.reserved``."""


class NvidiaDevice(NamedTuple):
    """A GPU as its driver lists it."""

    name: str
    memory_bytes: int  # All of its memory
    usable_bytes: int  # What CUDA can have of that; the rest is the driver's and the firmware's


def nvidia_devices() -> list[NvidiaDevice]:
    """Return every GPU that ``nvidia-smi`` lists; empty where there is none.

    Source:
        On an H200 (driver 580.159): 143,771 MiB in all, 616 MiB reserved, and ``cudaMemGetInfo`` has
        150,109,880,320 bytes in all: their difference, 143,155 MiB, and less than one more.
    """
    for query in QUERIES:
        rows = nvidia_smi_rows(f"--query-gpu={query}")
        if rows is not None:
            return [device for row in rows if (device := _device(*row)) is not None]
    return []


def _device(name: str, *sizes: str) -> NvidiaDevice | None:
    """Return the device of one row: a name, and one or two numbers in MiB."""
    if not name or not sizes or not sizes[0].isdigit():
        return None
    total = int(sizes[0]) * MIB
    reserved = int(sizes[1]) * MIB if len(sizes) > 1 and sizes[1].isdigit() else 0
    return NvidiaDevice(name, total, max(0, total - reserved))
