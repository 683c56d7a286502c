"""Files that start a trainer and are no shell's: PowerShell scripts, Makefiles and Dockerfiles, each line as a shell would have it."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path


def shell_text(path: Path, text: str) -> str | None:
    """Return a launcher's text as a shell script with the same lines, or None where its name is that of none."""
    name = path.name.lower()
    kind = path.suffix.lower() if path.suffix.lower() in LAUNCHERS else name.partition(".")[0]
    read = LAUNCHERS.get(kind)
    return None if read is None else read(text.replace("\r\n", "\n"))


_VARIABLE = re.compile(r"^\s*\$(env:)?(\w+)\s*=\s*(.*)$", re.IGNORECASE)


def _power_shell(text: str) -> str:
    """Return PowerShell's lines: ``$env:NAME = "value"``, ``&`` in front of a program, and a grave accent where a line goes on."""
    lines = []
    for line in text.split("\n"):
        told = _VARIABLE.match(line)
        if told and not told[3].startswith("@"):
            line = f"{'export ' if told[1] else ''}{told[2]}={told[3]}"
        line = re.sub(r"\$env:(\w+)", r"$\1", re.sub(r"^\s*& ", "", line), flags=re.IGNORECASE)
        lines.append(re.sub(r"`[ \t]*$", r"\\", line))
    return "\n".join(lines)


_ASSIGNED = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)\s*(\?|:{1,2})?=\s*(.*)$")


def _makefile(text: str) -> str:
    """Return the recipes of all targets, and the variables before them."""
    lines, goes_on = [], False
    for line in text.split("\n"):
        told = None if line.startswith("\t") or goes_on else _ASSIGNED.match(line)
        shown = line.strip() if goes_on else line.strip().lstrip("@-+") if line.startswith("\t") else ""
        if told:
            value = told[3].partition("#")[0].strip().replace('"', '\\"')
            shown = f'{told[1]}="${{{told[1]}:-{value}}}"' if told[2] == "?" else f'{told[1]}="{value}"'
        goes_on = line.endswith("\\") and bool(shown)
        lines.append(re.sub(r"\$\((\w+)\)", r"${\1}", shown).replace("$$", "$"))
    return "\n".join(lines)


_INSTRUCTION = re.compile(r"^\s*(ENV|ARG|RUN|CMD|ENTRYPOINT)\s+(.*)$", re.IGNORECASE)


def _dockerfile(text: str) -> str:
    """Return what a container runs, and its variables; a list's words are quoted, those of CMD follow an entry point's."""
    lines: list[str] = []
    entry, entered, inside = "", 0, False
    for line in text.split("\n"):
        told = None if inside else _INSTRUCTION.match(line)
        shown = line if inside else ""
        if told:
            kind, rest = told[1].upper(), told[2]
            words = _words(rest)
            shown = rest if words is None else shlex.join(words)
            if kind in ("ENV", "ARG"):
                pairs = rest if "=" in rest else "=".join(rest.split(maxsplit=1))
                shown = f"export {pairs}"
            elif kind == "ENTRYPOINT" and words is not None:
                entry, entered = shown, len(lines)
            elif kind == "CMD" and entry and words is not None:
                shown, lines[entered] = f"{entry} {shown}", ""
        inside = line.rstrip().endswith("\\") and bool(shown)
        lines.append(shown)
    return "\n".join(lines)


def _words(text: str) -> list[str] | None:
    """Return the words of a list in JSON, or None where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return [str(word) for word in value] if isinstance(value, list) else None


LAUNCHERS: Mapping[str, Callable[[str], str]] = {
    ".ps1": _power_shell,
    ".mk": _makefile,
    "makefile": _makefile,
    "gnumakefile": _makefile,
    ".dockerfile": _dockerfile,
    "dockerfile": _dockerfile,
    "containerfile": _dockerfile,
}
"""Ends of files' names, or whole ones -> how such a file is read."""
