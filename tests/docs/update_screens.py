"""Draw terminals of 80 and 120 columns for docs/pictures: ``python tests/docs/update_screens.py``."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
COMMANDS = {
    "terminal-fits-80": (80, "memplan fit llama-8b --gpu rtx4090 --config qlora"),
    "terminal-no-80": (80, "memplan fit llama-8b --gpu rtx4090 --config lora -b 6"),
    "terminal-methods-120": (120, "memplan fit llama-8b --gpu rtx4090"),
}
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""What would be fetched from elsewhere; the reader's own monospaced font is used instead."""


def printed(command: str, columns: int) -> str:
    """Return what a command writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    words = [sys.executable, "-m", *command.split()]
    with subprocess.Popen(words, stdout=theirs, stdin=subprocess.DEVNULL, env=environment):
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        except OSError:
            pass  # the terminal's other end is closed
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def picture(command: str, columns: int) -> str:
    """Return a terminal as SVG, which loads nothing."""
    console = Console(record=True, width=columns, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text(f"$ {command}"))
    console.print(Text.from_ansi(printed(command, columns)))
    drawn = console.export_svg(title=f"{columns} columns", theme=MONOKAI, unique_id="memplan")
    return FONTS.sub("", drawn).replace("Fira Code", "DejaVu Sans Mono")


if __name__ == "__main__":
    for name, (columns, command) in COMMANDS.items():
        (PICTURES / f"{name}.svg").write_text(picture(command, columns), encoding="utf-8")
