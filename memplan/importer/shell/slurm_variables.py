"""Variables that Slurm sets by a script's directives, and for a step that srun starts."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

_DIRECTIVE = re.compile(r"^#SBATCH\s+(?:--|-)([A-Za-z-]+)[=\s]+(\S+)", re.MULTILINE)
_SCHEDULED = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS",),
    "n": ("SLURM_NTASKS",),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
"""Slurm's directives -> variables that it sets by them (sbatch's manual, OUTPUT ENVIRONMENT VARIABLES)."""


def scheduled_variables(text: str) -> dict[str, str]:
    r"""Return the variables that Slurm sets by a script's directives.

    Example:
        >>> scheduled_variables("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n")["SLURM_NTASKS"]
        '8'
    """
    variables: dict[str, str] = {}
    for directive, value in _DIRECTIVE.findall(text):
        last = value.rpartition(":")[2]
        variables |= dict.fromkeys(_SCHEDULED.get(directive, ()), last) if last.isdigit() else {}
    if first := next((one[1] for one in map(_ARRAY.match, _array_values(text)) if one), None):
        variables["SLURM_ARRAY_TASK_ID"] = first  # the task that is answered for
    if each := variables.get("SLURM_NTASKS_PER_NODE"):
        variables.setdefault("SLURM_NTASKS", str(int(each) * int(variables.get("SLURM_NNODES", "1"))))
    return variables


_ARRAY = re.compile(r"(\d{1,6})(?:[-,:%]|$)")
"""The first index of ``--array=0-7%2`` or ``--array=3,5``."""


def _array_values(text: str) -> list[str]:
    return [value for directive, value in _DIRECTIVE.findall(text) if directive in ("array", "a")]


def step_variables(words: Sequence[str], known: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable of Slurm for the tasks of a step that srun starts, where its flags or the script's directives say it.

    Example:
        >>> step_variables(["srun", "-N", "2", "--ntasks-per-node=8", "sh", "-c"], {})
        {'SLURM_STEP_NUM_TASKS': '16'}
    """
    if not words or words[0].rpartition("/")[2] != "srun":
        return {}
    given = dict(pairwise(part for word in words for part in word.split("=", 1)))
    count = given.get("-n") or given.get("--ntasks") or known.get("SLURM_NTASKS")
    if each := given.get("--ntasks-per-node"):
        nodes = given.get("-N") or given.get("--nodes") or known.get("SLURM_NNODES") or "1"
        count = str(int(each) * int(nodes)) if each.isdigit() and str(nodes).isdigit() else None
    return {"SLURM_STEP_NUM_TASKS": count} if isinstance(count, str) and count.isdigit() else {}
