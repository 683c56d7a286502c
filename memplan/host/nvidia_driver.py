"""Queries of the NVIDIA driver through ``nvidia-smi``."""

from __future__ import annotations

import shutil
import subprocess

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
