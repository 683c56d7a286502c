"""How far a command is, on standard error."""

from __future__ import annotations

import sys

BAR_WIDTH = 30


class Progress:
    """A bar on a terminal, and a line for every fifth of the parts elsewhere."""

    def __init__(self, title: str, parts: int) -> None:
        self.title, self.parts, self.terminal = title, max(1, parts), sys.stderr.isatty()

    def __call__(self, done: int, note: str = "") -> None:
        """Show how many parts are done, and a word on the last."""
        after = f", {note}" if note else ""
        if self.terminal:
            bar = "#" * (BAR_WIDTH * done // self.parts)
            sys.stderr.write(f"\r\x1b[K{self.title} [{bar:<{BAR_WIDTH}}] {done}/{self.parts}{after}")
        elif done % max(1, self.parts // 5) == 0 or done == self.parts:
            sys.stderr.write(f"memplan: {self.title}: {done}/{self.parts}{after}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the bar's line."""
        if self.terminal:
            sys.stderr.write("\n")
