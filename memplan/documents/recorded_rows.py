"""Committed records of experiments, looked up by the keys of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from memplan.documents.opening import is_file
from memplan.documents.printed_numbers import Interval
from memplan.documents.strict_json import read_json

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
