"""The notes' tables with every cell judged, as values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal, cast

from memplan.documents.frozen_values import dataclass
from memplan.documents.printed_numbers import Records, numbers
from memplan.published.table_schema import Cell, Library, Origin, PublishedFile, PublishedTable

Status = Literal["reproduces", "within-spread", "differs", "not-in-source", "left-out", "not-computable", "no-record"]
STATUSES: dict[Status, str] = {
    "reproduces": "the rule gives the printed digits",
    "within-spread": "a measurement that lies in the spread of our own runs",
    "differs": "the rule, or our own runs, give something else",
    "not-in-source": "ascribed to a paper that does not say it",
    "left-out": "the paper says it and the notes do not",
    "not-computable": "an opinion, or a measurement on their machine; the reason says which",
    "no-record": "a measurement that we have not run",
}
"""Status -> what it means, in the order of every count."""


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """A printed cell and what became of it."""

    row: str
    column: str
    printed: str
    rule: str | None  # Name of its rule, or None
    recomputed: str | None  # What its rule gives, in the printed form; None without a rule or a record
    # What memplan holds true, in the printed form where it is a figure; None where it has nothing to say.
    corrected: str | None
    status: Status  # Whether the printed figure follows its rule
    # Whether it follows no rule, is not in its source, differs from what memplan holds true, or holds in the notes' own
    # setting only.
    wrong: bool
    reason: str  # Why it is what it is, where that needs saying


@dataclass(frozen=True, slots=True)
class JudgedTable:
    """A table of the notes with its cells judged."""

    table: PublishedTable
    file: PublishedFile  # The document that it stands in
    cells: tuple[JudgedCell, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Cells by status, and those that are wrong."""
        return counts_of([self])


@dataclass(frozen=True, slots=True)
class ShapeFigures:
    """A shape of the notes under one optimizer, planned to the byte."""

    document: str  # Title of the document that gives the shape
    shape: str
    optimizer: str
    parameters: int
    matrix_parameters: int  # Parameters of hidden matrices
    weight_bytes: int
    gradient_bytes: int
    matrix_state_bytes: int  # Optimizer states of hidden matrices
    state_bytes: int
    persistent_bytes: int  # Weights, gradients and states


@dataclass(frozen=True, slots=True)
class JudgedTables:
    """Tables of the notes, and what goes with them."""

    tables: tuple[JudgedTable, ...]
    files: tuple[PublishedFile, ...]  # The documents that they stand in, each once
    shapes: tuple[ShapeFigures, ...]  # The shapes of those documents, planned
    rules: Mapping[str, str]  # Name of a rule -> what it does, in a sentence

    @property
    def counts(self) -> dict[str, int]:
        """Tables, cells by status, and those that are wrong."""
        return counts_of(self.tables)


def counts_of(tables: Sequence[JudgedTable]) -> dict[str, int]:
    """Return how many tables and cells there are, how many cells of each status, and how many are wrong."""
    cells = [cell for table in tables for cell in table.cells]
    counts = Counter(cell.status for cell in cells)
    statuses: dict[str, int] = {status: counts[status] for status in STATUSES}
    return {"tables": len(tables), "cells": len(cells), **statuses, "wrong": sum(cell.wrong for cell in cells)}


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
