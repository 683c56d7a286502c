"""Printed numbers, their decimals, suffixes and signs; and the records of measurements that they are held against."""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import is_file
from memplan.documents.strict_json import read_json

SCALES: dict[str, Fraction] = {
    "K": Fraction(10**3),
    "M": Fraction(10**6),
    "B": Fraction(10**9),
    "MB": Fraction(10**6),
    "GB": Fraction(10**9),
    "%": Fraction(1, 100),
}
"""Suffix or unit -> what one of it is; parameters and bytes are counted in ones, shares in ones."""

_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>(?<!\d)[-+])?(?P<digits>\d+(?:\.(?P<decimals>\d+))?)(?P<suffix> ?(?:MB|GB)\b|[KMB](?!\w)| ?%)?"
)


@dataclass(frozen=True, slots=True)
class Interval:
    """Everything from ``low`` to ``high``."""

    low: Fraction
    high: Fraction


Figure = Fraction | int | Interval
Value = str | tuple[Figure, ...]
"""What a rule gives: text, or the numbers of a cell in reading order."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a printed text.

    Attributes:
        start, end: Where its sign and digits stand.
        signed: Whether it is printed with its sign even where it is positive.
        decimals: Digits behind the point.
        scale: What one of its unit is.
    """

    start: int
    end: int
    signed: bool
    decimals: int
    scale: Fraction
    value: Fraction

    @property
    def half_unit(self) -> Fraction:
        """Half of one in the last printed digit."""
        return self.scale * Fraction(1, 2 * int(10**self.decimals))

    def text(self, figure: Figure) -> str:
        """Return a figure in this number's form; an interval is one number where both ends print alike."""
        if isinstance(figure, Interval):
            low, high = self.text(figure.low), self.text(figure.high)
            between = " to " if low[0] in "+-" else "-"
            return low if low == high else f"{low}{between}{high}"
        return ("+" if self.signed and figure >= 0 else "") + rounded(Fraction(figure) / self.scale, self.decimals)


def rounded(value: Fraction, decimals: int) -> str:
    """Return a number with so many decimals; a tie goes to the even digit, as Python's ``format`` does.

    Example:
        >>> rounded(Fraction(49, 16), 2), rounded(Fraction(5, 2), 0), rounded(Fraction(-1, 37), 3)
        ('3.06', '2', '-0.027')
    """
    return f"{Decimal(round(value * 10**decimals)).scaleb(-decimals):.{decimals}f}"


def numbers(printed: str, unit: str | None = None) -> list[Number]:
    """Return the numbers of a printed text; one without a suffix has that of the next, or the table's unit.

    Example:
        >>> [float(number.value) for number in numbers("8 MB (74.2% reduction)")]
        [8000000.0, 0.742]
    """
    in_reverse: list[Number] = []
    following = ""
    for match in reversed(list(_NUMBER.finditer(printed))):
        suffix = (match["suffix"] or "").strip() or following
        following = suffix
        scale = SCALES.get(suffix or unit or "", Fraction(1))
        end = match.end("digits")
        start = match.start("digits") - len(match["sign"] or "")
        value = Fraction(printed[start:end]) * scale
        in_reverse.append(Number(start, end, match["sign"] == "+", len(match["decimals"] or ""), scale, value))
    return in_reverse[::-1]


def formatted_like(printed: str, value: Value, unit: str | None = None) -> str:
    """Return ``value`` written as ``printed`` is: each of its numbers in the place of one there.

    Args:
        printed: What the notes print, with words, suffix and decimals.
        value: Text, or one figure for each of the first numbers of ``printed``.
        unit: Unit of numbers without a suffix, such as ``GB``.

    Example:
        >>> formatted_like("~2.2", (Fraction(2_256_000_000),), "GB"), formatted_like("833M", (833_222_784,))
        ('~2.3', '833M')
    """
    if isinstance(value, str):
        return value
    text, shift = printed, 0
    for number, figure in zip(numbers(printed, unit), value, strict=False):
        new = number.text(figure)
        text = text[: number.start + shift] + new + text[number.end + shift :]
        shift += len(new) - (number.end - number.start)
    return text


def lies_within(printed: str, intervals: Sequence[Interval], unit: str | None = None) -> bool:
    """Tell whether each printed number lies in its interval, widened by half a unit of its last digit."""
    pairs = list(zip(numbers(printed, unit), intervals, strict=False))
    return bool(pairs) and all(i.low - n.half_unit <= n.value <= i.high + n.half_unit for n, i in pairs)


FOLDER = "configs/evidence"

Select = Mapping[str, str | int | bool]
"""Keys of a row and the values that they have to have."""


class Records:
    """Records below the folder of the shipped data, each read once; one that is missing has no rows."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._read: dict[str, dict[str, Any]] = {}

    def record(self, name: str) -> dict[str, Any]:
        """Return a record, or an empty one."""
        if name not in self._read:
            path = self.root / FOLDER / f"{name}.json"
            self._read[name] = read_json(path) if is_file(path) else {}
        return self._read[name]

    def training_records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every record of training, by name."""
        for path in sorted((self.root / FOLDER).glob("train-*.json")):
            yield path.stem, self.record(path.stem)

    def row(self, name: str, select: Select) -> dict[str, Any] | None:
        """Return the first row whose keys have the values of ``select``."""
        return next(iter(self.rows(name, select)), None)

    def rows(self, name: str, select: Select) -> list[dict[str, Any]]:
        """Return the rows, measured or computed, whose keys have the values of ``select``."""
        record = self.record(name)
        rows = [*record.get("rows", ()), *record.get("computed", ())]
        return [row for row in rows if all(row.get(key) == value for key, value in select.items())]

    def spread(self, name: str, selects: Sequence[Select], measures: Sequence[str]) -> Interval | None:
        """Return the lowest and highest figure of several rows and measures together, or None without rows."""
        intervals = [row[measure] for select in selects for row in self.rows(name, select) for measure in measures]
        if not intervals:
            return None
        return Interval(
            Fraction(str(min(v["low"] for v in intervals))), Fraction(str(max(v["high"] for v in intervals)))
        )

    def interval(self, name: str, select: Select, measure: str) -> Interval | None:
        """Return the lowest and highest figure that the seeds gave, or None where there is none."""
        value = (self.row(name, select) or {}).get(measure)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            return Interval(Fraction(str(value)), Fraction(str(value)))
        if value["low"] is None or value["high"] is None:
            return None
        return Interval(Fraction(str(value["low"])), Fraction(str(value["high"])))

    def verdict(self, name: str) -> str:
        """Return what a record of training says, or nothing where there is none."""
        return str(self.record(name).get("verdict", ""))
