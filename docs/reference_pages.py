"""Write the reference pages of the site: what each command takes, and what the catalog and the configs hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COLUMNS = 100


def printed(*arguments: str) -> str:
    """Return what a ``memplan`` command prints at 100 columns."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "memplan", *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def write_reference(folder: Path) -> None:
    """Write the pages into a folder, which is made where it is missing; equal pages are left alone."""
    pages = {"commands": _commands(), "configs": _lists("Training configs", "configs"), "catalog": _catalog()}
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _commands() -> str:
    """Return the page of the commands: the help of each."""
    from memplan.cli.main import COMMANDS

    parts = ["# Every option of every command\n"]
    parts += [f"## memplan {name}\n\n```text\n{printed(name, '--help').strip()}\n```\n" for name in COMMANDS]
    return "\n".join(parts)


def _catalog() -> str:
    """Return the page of the catalog: a table for each kind of entry."""
    kinds = ("gpus", "models", "stacks", "formats", "gradients", "optimizers")
    return "\n".join(["# The catalog\n", *(_lists(kind.capitalize(), kind, level="##") for kind in kinds)])


def _lists(title: str, kind: str, level: str = "#") -> str:
    return f"{level} {title}\n\n{printed('list', kind, '--format', 'md').strip()}\n"
