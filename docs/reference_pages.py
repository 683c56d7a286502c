"""Write the reference pages of the site: what each command takes, and what the catalog and the configs hold."""

import contextlib
import io
import os
from pathlib import Path
from unittest.mock import patch

COLUMNS = 100


def printed(*arguments: str) -> str:
    """Return what a ``memplan`` command prints at 100 columns."""
    from memplan.cli.main import run

    out = io.StringIO()
    environment = patch.dict(os.environ, COLUMNS=str(COLUMNS), NO_COLOR="1")
    with environment, patch("sys.argv", ["memplan", *arguments]), contextlib.redirect_stdout(out):
        try:
            run()
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"memplan {' '.join(arguments)} ended with {ended.code}") from ended
    return out.getvalue()


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
    parts += [
        f"## memplan {name}\n\n```text\n{printed(name, '--help' if name == 'lab' else '--help-all').strip()}\n```\n"
        for name in COMMANDS
    ]
    return "\n".join(parts)


def _catalog() -> str:
    """Return the page of the catalog: a table for each kind of entry."""
    kinds = ("gpus", "models", "stacks", "formats", "gradients", "optimizers")
    return "\n".join(["# The catalog\n", *(_lists(kind.capitalize(), kind, level="##") for kind in kinds)])


def _lists(title: str, kind: str, level: str = "#") -> str:
    return f"{level} {title}\n\n{printed('list', kind, '--format', 'md').strip()}\n"
