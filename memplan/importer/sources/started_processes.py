"""How many processes a command starts, one for each GPU: what its launcher is told, or what it sees."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memplan.importer.sources.argument_vectors import CommandLine
from memplan.importer.sources.given_keys import GivenKeys

STARTERS = ("accelerate", "axolotl", "deepspeed", "llamafactory-cli", "lmf", "trl")
"""Commands that start a process for each GPU that they see, where nothing says how many."""
COUNTS = (("nproc_per_node", "nnodes"), ("num_processes", ""), ("num_gpus", "num_nodes"))
"""Flags of launchers for processes of a machine, and for machines."""


AS_MANY_AS_SEEN: Mapping[str, tuple[str | int, ...]] = {
    "nproc_per_node": ("gpu", "auto", "cpu"),
    "num_gpus": (-1,),
    "num_nodes": (-1,),
}
"""Values of these for as many as there are (torch/distributed/run.py; deepspeed/launcher/runner.py)."""


COUNTED = ("NPROC_PER_NODE", "NNODES")
"""Variables of the environment for processes of a machine, and for machines."""


def unknown_processes(command: CommandLine) -> tuple[str, Any] | None:
    """Return the flag of a launcher for processes or machines, or the variable, whose value is no number of them; None for none."""
    flags, variables = command.launched.data, command.job.environment or {}
    given = [(flag, flags.get(flag, "")) for pair in COUNTS for flag in pair if flag]
    if not any(value for _, value in given) and variables.get(COUNTED[0]):
        given = [(name, variables.get(name, "")) for name in COUNTED]
    known = [value in ("", *AS_MANY_AS_SEEN.get(name, ())) or _whole(value) > 0 for name, value in given]
    unknown = next((pair for pair, one in zip(given, known, strict=True) if not one), None)
    listed = processes(command.launched, {}) if "include" in flags or flags.get("num_nodes") else None
    if unknown is None and command.launcher == HOSTED and HOSTFILE in flags and not listed:
        return HOSTFILE, flags[HOSTFILE]
    return unknown


HOSTED, HOSTFILE = "deepspeed", "hostfile"
"""The launcher, and its flag, for a file that lists machines and how many processes each has."""
_SLOTS = re.compile(r"(\S+)\s+slots=(\d{1,5})\b", re.ASCII)
_SLOT = re.compile(r"\d{1,5}", re.ASCII)


def with_hosts(command: CommandLine, lines: Sequence[str]) -> CommandLine:
    """Return a command of deepspeed's launcher that lists the GPUs which its file of machines leaves it.

    Args:
        lines: The file's; none where it is not there.

    Source:
        ``_parse_hostfile``, ``parse_resource_filter`` and ``apply_num_nodes_and_gpus`` in deepspeed/launcher/runner.py (0.19.8).
    """
    flags = command.launched.data
    pool = {match[1]: range(int(match[2])) for line in lines if (match := _SLOTS.match(line.strip()))}
    per_node = _whole(flags.get("num_gpus"))
    if sum(per_node or len(every) for every in pool.values()) >= 10**LARGEST_DIGITS:
        return command
    chosen, left = _hosts(flags.get("include")), _hosts(flags.get("exclude"))
    slots: dict[str, list[int]] = {}
    for host, every in pool.items():
        wanted = (chosen[host] or every) if host in chosen else () if chosen else every
        excluded = (left[host] or every) if host in left else ()
        slots[host] = [slot for slot in wanted if slot not in excluded]
    started = [(host, numbers) for host, numbers in slots.items() if numbers]
    started = started[: _whole(flags.get("num_nodes")) or None]
    words = [f"{host}:{','.join(map(str, range(per_node) if per_node else numbers))}" for host, numbers in started]
    if not words:
        return command
    return replace(command, launched=replace(command.launched, data={**flags, "include": "@".join(words)}))


def _hosts(text: Any) -> dict[str, list[int]]:
    """Return machines of a list like ``worker-0@worker-1:0,2`` and the GPUs that it names of each, -1 for what is no number; none of them for all."""
    parts = [part.partition(":") for part in _listed(text).split("@") if part.strip()]
    return {
        host.strip(): [int(slot) if _SLOT.fullmatch(slot) else -1 for slot in slots.replace(" ", "").split(",") if slot]
        for host, _, slots in parts
    }


LISTED = ("include", "gpu_ids")
"""Flags of deepspeed and accelerate that list the GPUs which are used: ``localhost:0,1@other:0,1`` and ``0,1``."""
TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
"""Variables of Slurm for the tasks that srun starts, one process each."""


def processes(keys: GivenKeys, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return how many processes a launcher starts, and the flag or variable that says so."""
    for flag in LISTED:
        hosts = [host.rpartition(":")[2].split(",") for host in _listed(keys.data.get(flag)).split("@")]
        if all(slot.isdigit() for slots in hosts for slot in slots):
            return flag, sum(map(len, hosts))
    for per_node, nodes in COUNTS:
        count = _whole(keys.data.get(per_node))
        if count:
            return per_node, count * ((_whole(keys.data.get(nodes)) or 1) if nodes else 1)
    for name in (COUNTED[0], "NGPU"):
        if count := _whole(environment.get(name)):
            return name, count * (_whole(environment.get(COUNTED[1])) or 1)
    started = TASKS if keys.words[:1] == ("srun",) else TASKS[:1] if keys.words[:1] == ("",) else ()
    return next(((name, count) for name in started if (count := _whole(environment.get(name)))), None)


def _listed(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


GIVEN_GPUS = "GPUs of the machine"
"""Where a file of a scheduler says how many GPUs a job sees, beside the variables of the environment."""


def visible_gpus(command: CommandLine) -> tuple[str, int] | None:
    """Return how many GPUs a command that starts a process for each is shown, and what shows them; None where nothing does.

    Source:
        accelerate/commands/launch.py (1.15.0); llamafactory/launcher.py (0.9.5); deepspeed/launcher/runner.py (0.19.8).
    """
    environment = command.job.environment or {}
    names = [word.rsplit("/", 1)[-1] for word in command.job.words]
    first = next((name for name in names if name != "srun"), "")
    if first not in STARTERS and command.launched.data.get("nproc_per_node") not in ("gpu", "auto"):
        return None
    nodes = _whole(environment.get("NNODES")) if first in ("llamafactory-cli", "lmf") else 1
    scheduled = (SCHEDULED, _whole(environment.get(SCHEDULED)))
    counted = [*((name, listed_gpus(environment, name)) for name in ("CUDA_VISIBLE_DEVICES", GIVEN_GPUS)), scheduled]
    return next(((name, count * (nodes or 1)) for name, count in counted if count), None)


SCHEDULED = "SLURM_GPUS_ON_NODE"
"""Slurm's variable for the GPUs of a machine that a job sees."""


def listed_gpus(environment: Mapping[str, str], name: str = "CUDA_VISIBLE_DEVICES") -> int | None:
    """Return how many GPUs a variable lists, ``0,1,2``; None where it lists none."""
    shown = str(environment.get(name, "")).strip("'\"").split(",")
    return len([part for part in shown if part.strip()]) or None


LARGEST_DIGITS = 6
"""No number of processes has as many: 16,384 GPUs are planned."""


def _whole(value: Any) -> int:
    text = str(value).strip("'\"")
    return int(text) if text.isascii() and text.isdigit() and len(text) < LARGEST_DIGITS else 0
