"""How far a command is, on standard error."""

from __future__ import annotations

import sys
import time

from memplan.documents.writing import say, write_remark
from memplan.errors import escaped

BAR_WIDTH = 30
SOON, MINUTES = 2, 120
"""Seconds before which no time is said, and from which on it is said in minutes."""


class Progress:
    """A bar on a terminal, and a line for every fifth of the parts elsewhere."""

    def __init__(self, title: str, parts: int) -> None:
        self.title, self.parts, self.terminal = escaped(title), max(1, parts), sys.stderr.isatty()
        self.began = time.monotonic()

    def __call__(self, done: int, note: str = "") -> None:
        """Show how many parts are done, and a word on the last."""
        after = f"{self._left(done)}{f', {escaped(note)}' if note else ''}"
        if self.terminal:
            bar = "#" * (BAR_WIDTH * done // self.parts)
            write_remark(f"\r\x1b[K{self.title} [{bar:<{BAR_WIDTH}}] {done}/{self.parts}{after}")
        elif done % max(1, self.parts // 5) == 0 or done == self.parts:
            say(f"{self.title}: {done}/{self.parts}{after}")

    def _left(self, done: int) -> str:
        """Return how long the other parts take if they take what the first ones did; nothing for a few seconds."""
        spent = time.monotonic() - self.began
        seconds = round(spent * (self.parts - done) / done) if done else 0
        if spent < SOON or not seconds:
            return ""
        return f", about {seconds} s left" if seconds < MINUTES else f", about {round(seconds / 60)} min left"

    def end(self) -> None:
        """Leave the bar's line."""
        if self.terminal:
            write_remark("\n")
