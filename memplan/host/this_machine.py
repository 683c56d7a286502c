"""What the machine has: GPUs as the NVIDIA driver lists them, and torch as it is installed, or is not."""

import shutil
import subprocess
import warnings
from typing import NamedTuple

from memplan.errors import CannotAnswerError
from memplan.units import MIB

WITHOUT_NUMPY = r"Failed to initialize NumPy: No module named 'numpy'"
"""numpy is no dependency of torch, and nothing here turns tensors into arrays. Where numpy is installed and fails,
the message is another one, and is shown.
Source: torch/csrc/utils/tensor_numpy.cpp (v2.13.0), is_numpy_available
"""


def ignore_missing_numpy() -> None:
    """Ignore that there is no numpy, even where warnings are errors: importing torch would then fail."""
    warnings.filterwarnings("ignore", message=WITHOUT_NUMPY, category=UserWarning)


def require_torch(needs: str = "tracing needs") -> None:
    """Refuse what ``needs`` torch where there is none.

    Raises:
        CannotAnswerError: It is not installed.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise CannotAnswerError(
            f"{needs} torch, which is not installed: pip install '.[torch]' in a checkout of memplan"
        )


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


TIMEOUT_SECONDS = 20


def nvidia_smi_rows(query: str) -> list[list[str]] | None:
    """Return the rows of an ``nvidia-smi`` query, sizes in MiB; None without a driver or for an unknown query.

    Args:
        query: An option of ``nvidia-smi``, such as ``--query-gpu=name,memory.total``.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [[part.strip() for part in line.split(",")] for line in result.stdout.splitlines()]


def driver_version() -> str:
    """Return the version of the driver, such as ``580.159.03``; nothing where none answers."""
    rows = nvidia_smi_rows("--query-gpu=driver_version") or []
    return next((version for row in rows for version in row if version[:1].isdigit()), "")
