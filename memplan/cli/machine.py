"""What the machine has: GPUs as the NVIDIA driver lists them."""

from __future__ import annotations

import shutil
import subprocess
from typing import NamedTuple

from memplan.units import MIB

QUERIES = ("name,memory.total,memory.reserved", "name,memory.total")
"""The second for drivers before 510, which know no ``memory.reserved``."""

FORMAT = "--format=csv,noheader,nounits"


class NvidiaDevice(NamedTuple):
    """A GPU as its driver lists it.

    Attributes:
        memory_bytes: All of its memory.
        usable_bytes: What CUDA can have of that; the rest is the driver's and the firmware's.
    """

    name: str
    memory_bytes: int
    usable_bytes: int


def nvidia_devices() -> list[NvidiaDevice]:
    """Return every GPU that ``nvidia-smi`` lists; empty where there is none.

    Source:
        On an H200 (driver 580.159): 143,771 MiB in all, 616 MiB reserved, and ``cudaMemGetInfo`` has
        150,109,880,320 bytes in all: their difference, 143,155 MiB, and less than one more.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    for query in QUERIES:
        try:
            command = [program, f"--query-gpu={query}", FORMAT]
            result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return [device for line in result.stdout.splitlines() if (device := _device(line)) is not None]
    return []


def _device(line: str) -> NvidiaDevice | None:
    """Return the device of one line: a name, and one or two numbers in MiB."""
    name, *sizes = (part.strip() for part in line.split(","))
    if not name or not sizes or not sizes[0].isdigit():
        return None
    total = int(sizes[0]) * MIB
    reserved = int(sizes[1]) * MIB if len(sizes) > 1 and sizes[1].isdigit() else 0
    return NvidiaDevice(name, total, max(0, total - reserved))
