"""Rewrite the outputs in the README and in docs/ with what the commands print now: ``python tests/docs/update_pages.py``.

Only the layout is changed: lines are folded at 100 columns. Figures are as printed.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap

from page_blocks import PAGES, ROOT, Block, blocks, example_files

WIDTH = 100
_SCREEN = " | screen"
"""What ends a marker whose output is the default one, a screen, and not all of the answer."""
_PART = re.compile(r"(.+?) \| part (.+)")
_LINES = re.compile(r"(.+?) \| lines (\d+)-(\d+)(, answer)?")


def environment() -> dict[str, str]:
    """Return the caller's environment with this interpreter's commands first, and no settings for ours."""
    kept = {k: v for k, v in os.environ.items() if k not in ("MEMPLAN_CATALOG", "COLUMNS", "FORCE_COLOR")}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one command line in a folder, without standard input."""
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def write_examples(folder: Path) -> None:
    """Write the example files of all pages into a folder."""
    for name, content in example_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def bare(command: str) -> str:
    """Return the command of a marker, without what says which lines of its output are shown."""
    match = _LINES.fullmatch(command) or _PART.fullmatch(command)
    return match[1] if match else command.removesuffix(_SCREEN)


def asked(command: str) -> str:
    """Return the command line that gives the output of a marker."""
    chosen = "--json" in command or "--format" in command or command.endswith(_SCREEN)
    return bare(command) if chosen else f"{bare(command)} --format plain"


def printed(command: str, result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what a command has printed, folded at 100 columns; a refusal is what it writes to standard error."""
    match, part = _LINES.fullmatch(command), _PART.fullmatch(command)
    if result.returncode not in (0, 1) and not result.stdout:
        return folded(result.stderr.splitlines())
    lines = folded(result.stdout.splitlines())
    if part is not None:
        return _part(lines, part[2])
    if match is None:
        return lines
    first, last = int(match[2]), int(match[3])
    shown = [*(["..."] if first > 1 else []), *lines[first - 1 : last], *(["..."] if last < len(lines) else [])]
    return [*shown, "", *_answer(lines)] if match[4] else shown


def _answer(lines: list[str]) -> list[str]:
    """Return the last paragraph."""
    starts = [index + 1 for index, line in enumerate(lines) if not line]
    return lines[starts[-1] if starts else 0 :]


def _part(lines: list[str], start: str) -> list[str]:
    """Return the paragraph that starts with some words."""
    (first,) = (i for i, line in enumerate(lines) if line.startswith(start) and (i == 0 or not lines[i - 1]))
    last = lines.index("", first) if "" in lines[first:] else len(lines)
    return ["...", *lines[first:last], *(["..."] if last < len(lines) else [])]


def folded(lines: list[str]) -> list[str]:
    """Return lines of at most 100 columns; a table's last column is folded within itself."""
    result: list[str] = []
    indent = 0
    for index, line in enumerate(lines):
        if index == 0 or not lines[index - 1]:
            indent = _last_column(line) or (_last_column(lines[index + 1]) if index + 1 < len(lines) else 0)
        hanging = " " * (indent if indent < WIDTH - 20 else 2)
        result += wrap(line, WIDTH, subsequent_indent=hanging, **_WRAP) or [""]
    return result


_WRAP: Mapping[str, bool] = {"break_long_words": False, "break_on_hyphens": False}


def _last_column(line: str) -> int:
    """Return where a table's last column begins, given its headers; 0 for a line of prose."""
    gaps = list(re.finditer(r" {2,}(?=\S)", line))
    return gaps[-1].end() if gaps else 0


def updated(text: str) -> str:
    """Return a page with every output as it is now."""
    lines = text.splitlines()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_examples(folder)
        for block in reversed([block for block in blocks(text) if "output" in block.markers]):
            lines[block.first : block.first + len(block.lines)] = _output(block, folder)
    return "\n".join(lines) + "\n"


def _output(block: Block, folder: Path) -> list[str]:
    """Return a block's lines: the command that it shows, if any, and the output."""
    command = block.markers["output"]
    return [
        *(line for line in block.lines[:1] if line.startswith("$ ")),
        *printed(command, run(asked(command), folder)),
    ]


if __name__ == "__main__":
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = updated(before)
        page.write_text(after, encoding="utf-8")
        print(f"{page.relative_to(ROOT)} {'was current' if before == after else 'rewritten'}")
