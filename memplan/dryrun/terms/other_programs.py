"""Programs that a script may start: those that only tell something of this machine, and ``nvidia-smi``, which tells of the pretended GPU."""

import os
import shlex
from collections.abc import Sequence
from typing import Any

import torch

from memplan.dryrun.terms.outcome import RefusedError

TELLING = frozenset(
    {
        *("df", "echo", "free", "git describe", "git diff", "git log", "git rev-parse", "git show", "git status", "id"),
        *("lscpu", "nproc", "uname", "which", "whoami"),
    }
)
"""Programs, and commands of git, that change nothing, whatever follows them."""
TELLING_ALONE = frozenset({"date", "git branch --show-current", "hostname"})
"""Whole lines that change nothing."""
_MORE_THAN_ONE = frozenset(";|&<>$`\n*")
"""In a shell's line: several programs, or files."""
LAUNCHERS = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)
"""Modules that start a job's processes."""


def refuse_launcher(module: str) -> None:
    """Refuse a module that would start processes in which nothing is pretended."""
    if module in LAUNCHERS:
        raise RefusedError(
            f"{module} starts processes, whose tensors would not be seen; name the script that it starts, and how many (see: --gpus)"
        )


def harmless_program(command: Any) -> str | Sequence[Any] | None:
    """Return what to start in place of a command, as a list or a shell's line as it was given; nothing where it may do anything."""
    is_line = isinstance(command, str | bytes | os.PathLike)
    line = os.fsdecode(command) if is_line else ""
    if _MORE_THAN_ONE & set(line):
        return None
    try:
        words = shlex.split(line) if is_line else [os.fsdecode(word) for word in command]
    except (TypeError, ValueError):
        return None
    name = os.path.basename(words[0]) if words else ""
    if name == "nvidia-smi":
        said = ["echo", _told_by_nvidia_smi(words[1:])]
        return shlex.join(said) if is_line else said
    tells = {name, " ".join([name, *words[1:2]])} & TELLING or " ".join([name, *words[1:]]) in TELLING_ALONE
    return command if tells and not any(word.startswith("--output") for word in words) else None


def _told_by_nvidia_smi(words: Sequence[str]) -> str:
    """Return what ``nvidia-smi --query-gpu`` says of the pretended GPU, ``[N/A]`` for what is not known; else its name and memory."""
    free, total = (value // 2**20 for value in torch.cuda.mem_get_info())
    known = {"index": 0, "count": 1, "name": torch.cuda.get_device_name(), "gpu_name": torch.cuda.get_device_name()}
    sizes = {"memory.total": total, "memory.used": total - free, "memory.free": free}
    query = next((word.partition("=")[2] for word in words if word.startswith("--query-gpu")), "")
    if not query:
        return f"GPU 0: {known['name']} {total - free}MiB / {total}MiB"
    format_ = next((word for word in words if word.startswith("--format")), "")
    unit = "" if "nounits" in format_ else " MiB"
    fields = [field.strip() for field in query.split(",")]
    row = ", ".join(f"{sizes[field]}{unit}" if field in sizes else str(known.get(field, "[N/A]")) for field in fields)
    return row if "noheader" in format_ else f"{', '.join(fields)}\n{row}"
