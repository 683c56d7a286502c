"""A printed cell with all that the data says of it, as rules and corrections take it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import cast

from memplan.documents.printed_numbers import numbers
from memplan.documents.recorded_rows import Records
from memplan.published.table_schema import Cell, Library, Origin, PublishedTable


@dataclass(frozen=True, slots=True)
class CellInputs:
    """A cell and all that is said of it."""

    library: Library
    records: Records
    table: PublishedTable
    cell: Cell
    origin: Origin

    def named(self, name: str) -> str:
        """Return an input that is text."""
        return cast("str", self._input(name))

    def counted(self, name: str) -> int:
        """Return an input that is a whole number."""
        return cast("int", self._input(name))

    def _input(self, name: str) -> object:
        value = getattr(self.origin, name)
        if value is None:
            raise LookupError(f"{self.table.id}: {self.cell.row} | {self.cell.column}: no {name}")
        return value

    def printed(self, reference: str) -> tuple[Cell, list[Fraction]]:
        """Return the cell that ``[ID |] ROW | COLUMN`` means, and its printed numbers."""
        *ids, row, column = (part.strip() for part in reference.split(" | "))
        table = self.library.tables[ids[0]] if ids else self.table
        cell = self.library.cell(table.id, row or self.cell.row, column or self.cell.column)
        unit = self.library.origin(table, cell).unit
        return cell, [number.value for number in numbers(cell.printed, unit)]


LARGEST_MODELS = "s000.t02"
"""The notes' table of the largest parameter count for each GPU."""


def printed_maxima(library: Library) -> dict[tuple[str, str, int], int]:
    """Return what the notes print as the largest parameter counts: (config, GPU, how many of them) -> parameters."""
    table = library.tables[LARGEST_MODELS]
    maxima = {}
    for cell in table.cells:
        origin = library.origin(table, cell)
        key = (origin.config or "", origin.gpu or "", origin.count or 1)
        maxima[key] = int(numbers(cell.printed)[0].value)
    return maxima
