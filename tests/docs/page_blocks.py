"""The fenced blocks of the README and of the pages in docs/, and the comments above them that say what they are.

A comment directly above a block is a marker:

    <!-- command: run -->       the block is one of the two commands of the first screen, by name
    <!-- output: COMMAND -->    the block is what a command prints, or what a suffix keeps of it: "| lines 3-9",
                                "| lines 3-9, answer" (and the last paragraph), "| part Instants" (that paragraph)
    <!-- file: NAME -->         the block is a file, which the commands of every page find in their folder
    <!-- not run: REASON -->    the block's commands are not run by the tests
    <!-- needs: MODULE -->      they are run where the module is installed

A command's exit code is 0 unless a comment behind it says otherwise: "# exit 1". Only the standard library is used, so
that ``python3 tests/docs/page_blocks.py run`` prints a first-screen command before anything is installed.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
"""Where commands are shown: the README, and the pages that are written by hand."""
SHELLS = ("console", "bash")
_MARKER = re.compile(r"<!-- ([a-z ]+): (.+) -->")
_OURS = re.compile(r"([A-Z_]+=\S+ )?memplan ")
_EXIT = re.compile(r"\s+# exit (\d+)$")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``first`` is the index of its first line between the fences."""

    language: str
    lines: tuple[str, ...]
    first: int
    markers: dict[str, str]


@dataclass(frozen=True)
class Command:
    """A command line and the exit code that its page gives it; ``line`` is its line number."""

    text: str
    exit_code: int
    line: int
    needs: str | None


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text."""
    lines = text.splitlines()
    found, index = [], 0
    while index < len(lines):
        if not lines[index].startswith("```"):
            index += 1
            continue
        end = next(i for i in range(index + 1, len(lines)) if lines[i].startswith("```"))
        content = tuple(lines[index + 1 : end])
        found.append(Block(lines[index][3:].strip(), content, index + 1, _markers(lines[:index])))
        index = end + 1
    return found


def _markers(above: list[str]) -> dict[str, str]:
    markers = {}
    for line in reversed(above):
        match = _MARKER.fullmatch(line.strip())
        if match is None:
            break
        markers[match[1]] = match[2]
    return markers


def shell_lines(block: Block) -> list[tuple[int, str]]:
    """Return the command lines of a block with their line numbers, counted from one."""
    numbered = [(block.first + 1 + offset, line) for offset, line in enumerate(block.lines)]
    if block.language == "console":
        return [(number, line[2:]) for number, line in numbered if line.startswith("$ ")]
    joined: list[tuple[int, str]] = []
    for number, line in numbered:
        if joined and joined[-1][1].endswith("\\"):
            first, start = joined.pop()
            number, line = first, f"{start.rstrip(chr(92))} {line.strip()}"
        joined.append((number, line))
    return [(number, line) for number, line in joined if line.strip() and not line.startswith("#")]


def memplan_commands(text: str) -> list[Command]:
    """Return every ``memplan`` command that is to be run."""
    found = []
    for block in blocks(text):
        if block.language not in SHELLS or "not run" in block.markers:
            continue
        for number, line in shell_lines(block):
            match = _EXIT.search(line)
            code = int(match[1]) if match else 0
            parts = [part.strip() for part in re.sub(r"\s+#.*$", "", line).split(" && ")]
            ours = " && ".join(part for part in parts if _OURS.match(part))
            if ours:
                found.append(Command(ours, code, number, block.markers.get("needs")))
    return found


def named_command(text: str, name: str) -> str:
    """Return a command of the first screen."""
    block = next(block for block in blocks(text) if block.markers.get("command") == name)
    ((_, line),) = shell_lines(block)
    return line


def example_files() -> dict[str, str]:
    """Return the files that the pages show; no two show one of the same name."""
    shown = [b for page in PAGES for b in blocks(page.read_text(encoding="utf-8")) if "file" in b.markers]
    files = {block.markers["file"]: "\n".join(block.lines) + "\n" for block in shown}
    assert len(files) == len(shown), "two pages show a file of the same name"
    return files


if __name__ == "__main__":
    print(named_command(README.read_text(encoding="utf-8"), sys.argv[1]))
