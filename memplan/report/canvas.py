"""What a terminal can show: bars, gauges and lines that keep within its width."""

from collections.abc import Iterable, Sequence
from textwrap import wrap

from memplan.documents.frozen_values import dataclass

NARROWEST, WIDEST_BAR = 6, 44
EIGHTHS = " ▏▎▍▌▋▊▉"
"""Parts of a column; a whole one is ``█`` (Unicode, Block Elements)."""


@dataclass(frozen=True, slots=True)
class Canvas:
    """A terminal."""

    width: int = 80  # Its columns
    unicode: bool = False  # Whether it shows block elements; else bars are of ASCII

    def bar(self, value: int, whole: int, columns: int) -> str:
        """Return a bar, of which ``whole`` takes so many columns; what is more than nothing shows.

        Example:
            >>> Canvas().bar(3, 8, 16), Canvas(unicode=True).bar(3, 64, 16), Canvas().bar(1, 1000, 16)
            ('######', '▊', '.')
        """
        if value <= 0 or whole <= 0 or columns <= 0:
            return ""
        if not self.unicode:
            return "#" * _rounded(value * columns, whole) or "."
        full, rest = divmod(max(1, _rounded(8 * value * columns, whole)), 8)
        return "█" * full + (EIGHTHS[rest] if rest else "")

    def gauge(self, expected: int, worst: int, usable: int, columns: int) -> str:
        """Return how much of ``usable`` is taken: as expected, at worst, and what goes beyond it.

        Example:
            >>> Canvas().gauge(6, 7, 8, 16), Canvas().gauge(12, 12, 8, 12)
            ('|############++..|', '|########|####')
        """
        if columns <= 0:
            return ""
        used, maybe, free, left, right = tuple("█▒·├┤" if self.unicode else "#+.||")
        worst = max(expected, worst)
        scale = max(worst, usable, 1)
        cells = [_rounded(size * columns, scale) for size in (expected, worst, usable or scale - worst)]
        track = (used * cells[0]).ljust(cells[1], maybe).ljust(cells[2], free)
        return f"{left}{track[: cells[2]]}{right}{track[cells[2] :]}"

    def bars(self, rows: Sequence[tuple[str, str, int, str]], indent: int = 2) -> tuple[str, ...]:
        """Return a line for each row of label, size in words, size, and a note behind its bar, or below; the largest sets the scale."""
        labels, words = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
        room, most = self.width - indent - labels - words - 4, max(1, *(value for *_, value, _ in rows))
        fitting = [(room - len(note) - 2) * most // value for *_, value, note in rows if note and value]
        fitting = [columns for columns in fitting if columns >= NARROWEST]
        columns = max(NARROWEST, min(WIDEST_BAR, room, *fitting))
        lines: list[str] = []
        for label, text, value, note in rows:
            line = f"{' ' * indent}{label:<{labels}}  {text:>{words}}  {self.bar(value, most, columns)}"
            beside = len(line) + 2 + len(note) <= self.width
            lines.append(f"{line}  {note}".rstrip() if beside else line.rstrip())
            lines += [] if beside else self.folded(note, indent + 2)
        return tuple(lines)

    def joined(self, parts: Iterable[str], between: str = ", ", indent: int = 0) -> list[str]:
        """Return parts on as few lines as hold them; none is broken that fits in one by itself."""
        shown = [part for part in parts if part]
        lines: list[str] = []
        for part in [*(part + between.rstrip() for part in shown[:-1]), *shown[-1:]]:
            if lines and len(lines[-1]) + 1 + len(part) <= self.width:
                lines[-1] += f" {part}"
            else:
                lines += self.folded(part, indent if lines else 0, indent)
        return lines

    def folded(self, text: str, indent: int = 0, hanging: int | None = None) -> list[str]:
        """Return a text folded between words, with its further lines indented as far as ``hanging``."""
        first, after = " " * indent, " " * (indent if hanging is None else hanging)
        room = max(self.width, len(after) + 24)
        return wrap(
            text, room, initial_indent=first, subsequent_indent=after, break_long_words=False, break_on_hyphens=False
        )

    def between(self, left: str, right: str, indent: int = 0) -> list[str]:
        """Return two texts at both ends of a line, or of two where one is too short."""
        gap = self.width - len(left) - len(right)
        return (
            [f"{left}{' ' * gap}{right}"] if gap >= 2 else [*self.folded(left, 0, indent), *self.folded(right, indent)]
        )

    def columns(self, rows: Sequence[tuple[str, str, Sequence[str]]], indent: int = 2) -> list[str]:
        """Return rows of a head, words, and parts of a setting: beside each other where every row is one line, else below.

        Options of a command follow each other on a line; keys of a file have a line each.
        """
        heads, words = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
        whole = [f"{' ' * indent}{head:<{heads}}  {text:<{words}}  {', '.join(parts)}" for head, text, parts in rows]
        one_line = [len(parts) == 1 or parts[0].startswith("--") for _, _, parts in rows if parts]
        if all(one_line) and all(len(line) <= self.width for line in whole):
            return whole
        lines: list[str] = []
        hanging = indent + heads + 2
        if any(hanging + len(part) > self.width for _, _, parts in rows for part in parts):
            hanging = indent + 2
        for head, text, parts in rows:
            lines += self.folded(f"{head:<{heads}}  {text}", indent, hanging)
            options = bool(parts) and parts[0].startswith("--")
            below = Canvas(self.width - hanging).joined(parts, " ") if options else parts
            lines += [" " * hanging + line for line in below]
        return lines


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
