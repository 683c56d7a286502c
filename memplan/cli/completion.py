"""The command's entry: names are completed at once, from names of shipped files; all else is the command's own work.

Shells ask at every press of a key, so that nothing is imported here but the standard library. The protocol is typer's
(``memplan --install-completion``; typer/_completion_classes.py, 0.29); what is no name is left to it.
"""

import gc
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "_MEMPLAN_COMPLETE"
FOLDERS = {"models": "configs/models", "configs": "configs/training", "stacks": "configs/stacks"}
OPTIONS = {"--gpu": "gpus", "-g": "gpus", "--config": "configs", "-c": "configs", "--stack": "stacks"}
MODEL_COMMANDS = [
    "fit", "max", "where", "frontier", "suggest", "compare", "explain", "why", "report", "trace", "validate", "emit",
]  # fmt: skip
_GPU = re.compile(r"^(\w[\w.-]*):$", re.MULTILINE)
_ALIASES = re.compile(r"^ *aliases: \[(.*)\]", re.MULTILINE)


def run() -> None:
    """Complete a name where a shell asks for one; else run the command."""
    shell = os.environ.get(VARIABLE, "").removeprefix("complete_")
    line = _line(shell)
    if line is None and shell == "bash":
        _put("stderr", "memplan: completion: COMP_WORDS and COMP_CWORD do not say what is typed\n")
        sys.exit(2)
    result = None if line is None else completed(*line)
    if result is None:
        gc.disable()  # what is imported stays, so that looking through it frees nothing
        from memplan.cli.main import run as run_command

        gc.enable()
        words = os.environ.get("_TYPER_COMPLETE_ARGS", "").split()[1:] if line is None else line[0]
        run_command(words if shell else None)
        return
    if shell == "fish" and os.environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        sys.exit(0 if result else 1)
    text = "\n".join(f'"{name}"' if shell == "zsh" else name for name in result)
    if shell == "zsh":
        text = f"_arguments '*: :(({text}))'" if result else "_files"
    _put("stdout", f"{text}\n" if text else "")


def _put(name: str, text: str) -> None:
    """Write to a standard stream; where it is closed or full, nobody waits for names, and nothing is said."""
    try:
        if (stream := getattr(sys, name)) is not None:
            print(text, end="", file=stream, flush=True)
    except OSError:
        setattr(sys, name, None)  # or Python would try once more at its end


def _line(shell: str) -> tuple[list[str], str] | None:
    """Return the words before the one that is typed, without the command's own, and what is there of that one."""
    try:
        if shell == "bash":
            words, place = os.environ["COMP_WORDS"].split(), int(os.environ["COMP_CWORD"])
            return words[1:place], words[place] if place < len(words) else ""
        if shell in ("zsh", "fish"):
            text = os.environ["_TYPER_COMPLETE_ARGS"]
            words = shlex.split(text)[1:]
            return (words, "") if text.endswith(" ") or not words else (words[:-1], words[-1])
    except (KeyError, ValueError):
        return None
    return None


def completed(before: Sequence[str], typed: str) -> list[str] | None:
    """Return the names that a word may become; None where no name is called for.

    Args:
        before: The words before it, the command's first.

    Example:
        >>> completed(["fit", "gpt2", "--gpu"], "rtx409")
        ['rtx4090', 'rtx4090-laptop']
    """
    kind = OPTIONS.get(before[-1], "") if before else ""
    if not kind:
        if typed.startswith("-") or not before or before[0] not in MODEL_COMMANDS or _has_model(before[1:]):
            return None
        kind = "models"
    start = typed.lower()
    return sorted({name for name in names(kind) if name.lower().startswith(start)})


def _has_model(words: Sequence[str]) -> bool:
    """Tell whether a word stands that is neither an option nor behind one."""
    options = [word.startswith("-") for word in words]
    return any(not own and not behind for own, behind in zip(options, [False, *options], strict=False))


def names(kind: str) -> set[str]:
    """Return the shipped names of a kind and their aliases: ``models``, ``gpus``, ``configs`` or ``stacks``."""
    package = Path(__file__).parents[1]
    root = package / "data" if (package / "data").is_dir() else package.parent
    if kind == "gpus":
        texts = [(root / "gpu_catalog.yaml").read_text(encoding="utf-8")]
        result = set(_GPU.findall(texts[0]))
    else:
        files = list((root / FOLDERS[kind]).glob("*.yaml"))
        texts = [path.read_text(encoding="utf-8") for path in files] if kind == "models" else []
        result = {path.stem for path in files}
    aliases = (alias.strip(" '\"") for text in texts for line in _ALIASES.findall(text) for alias in line.split(","))
    return result | {alias for alias in aliases if alias and " " not in alias}
