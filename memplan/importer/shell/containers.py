"""Programs that start another: containers with their variables and images, and wrappers with flags of their own."""

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile

SHELLS = frozenset(("bash", "sh", "zsh"))
CONTAINERS = frozenset(("docker", "podman", "nerdctl", "singularity", "apptainer", "enroot", "docker-compose"))
WRAPPERS = frozenset(("hf", "timeout", "conda", "mamba", "micromamba", "uv", "poetry", "pipenv", "pixi", "numactl", "stdbuf", "nice", "ionice", "taskset", "nsys", "ssh", "tmux", "screen", "xargs", "unbuffer", "script", "dotenv", "infisical", "doppler", "op", "aim", "mlflow"))  # fmt: skip
"""Programs that take flags and the words of another command."""
QUOTED = frozenset(("tmux", "ssh"))
"""Those of them that hand a command in one word to a shell."""
PROGRAMS = frozenset(
    [
        "python",
        "python3",
        "torchrun",
        "accelerate",
        "deepspeed",
        "axolotl",
        "llamafactory-cli",
        "lmf",
        "swift",
        "megatron",
        "trl",
        "tune",
        "litgpt",
        "composer",
        "autotrain",
        "deepspeed.launcher",
    ]
)
"""Words that begin the command of a container that trains: flags of the container, and its image, stand in front of them."""
NAMING = frozenset(("--with", "--from", "--package", "--extra", "--name"))
"""Flags of wrappers and containers whose value is no program, though it may be called so."""
_ASSIGNED = re.compile(r"(?:--env=)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def container_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that a container is given: ``-e NAME=value``, ``--env NAME=value`` or ``--env=NAME=value``.

    Example:
        >>> container_variables(["docker", "run", "-e", "A=1", "--env=B=2", "image", "python", "C=3"])
        {'A': '1', 'B': '2'}
        >>> container_variables(["srun", "apptainer", "exec", "--env", "A=1", "image", "trl", "sft"])
        {'A': '1'}
    """
    names = [word.rpartition("/")[2] for word in words]
    inside = any(name in CONTAINERS for name in takewhile(lambda name: name not in PROGRAMS, names))
    given = [word for before, word in pairwise(words) if before in ("-e", "--env") and inside]
    given += [word for word in words if word.startswith("--env=") and inside]
    return {match[1]: match[2] for word in given if (match := _ASSIGNED.fullmatch(word))}


def started_inside(words: Sequence[str]) -> int:
    """Return where the command begins that a container or a wrapper runs; 0 for one that starts none, or nothing that is known here.

    Example:
        >>> started_inside(["docker", "run", "--gpus", "all", "image", "trl", "sft"])
        5
        >>> started_inside(["hf", "jobs", "uv", "run", "--flavor", "l4x1", "sft.py", "--bf16"])
        6
    """
    first = words[0].rpartition("/")[2] if words else ""
    if not is_container(words) and first not in WRAPPERS:
        return 0
    of_script = ".py" if "uv" in words[:3] else "\n"  # uv runs a script itself
    return next(
        (
            at
            for at, word in enumerate(words)
            if (word.rpartition("/")[2] in PROGRAMS or word.endswith(of_script)) and words[at - 1] not in NAMING
        ),
        0,
    )


def is_container(words: Sequence[str]) -> bool:
    """Whether a command starts a container, or runs something in one."""
    return bool(words) and words[0].rpartition("/")[2] in CONTAINERS


def reads_script(words: Sequence[str]) -> bool:
    """Tell whether a command runs the script that its input is: a shell, or ``sbatch`` without a file.

    Example:
        >>> reads_script(["sbatch", "--gres=gpu:1", "-N", "1"]), reads_script(["sbatch", "run.sh"])
        (True, False)
    """
    if words[0].rpartition("/")[2] != "sbatch":
        return words[-1].rpartition("/")[2] in SHELLS
    return all(
        word.startswith("-") or (before.startswith("-") and "=" not in before) for before, word in pairwise(words)
    )


def script_within(words: Sequence[str]) -> str | None:
    """Return the script that ``eval``, ``bash -c``, ``tmux`` or ``sbatch --wrap`` is given; None where there is none.

    Example:
        >>> script_within(["sbatch", "--gres=gpu:1", "--wrap=trl sft"])
        'trl sft'
        >>> script_within(["tmux", "send-keys", "-t", "a", "trl sft", "Enter"])
        'trl sft'
    """
    if words and words[0].rpartition("/")[2] in QUOTED:
        typed = [word for word in words[1:] if word not in ("Enter", "C-m")]
        return typed[-1] if typed and " " in typed[-1].strip() else None
    if words[:1] == ["eval"]:
        return " ".join(words[1:])
    if words and words[0].rpartition("/")[2] == "sbatch":
        text = next((after for word, after in pairwise([*words, ""]) if word == "--wrap"), "")
        return text or next((word.partition("=")[2] for word in words if word.startswith("--wrap=")), None)
    for place, word in enumerate(words[:-2]):
        if word.rpartition("/")[2] in SHELLS and words[place + 1] in ("-c", "-lc", "-ec", "-cx", "-xc"):
            return words[place + 2]
    return None
