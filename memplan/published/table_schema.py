"""The data files of ``configs/published``: what the notes print, and how each cell comes about.

What holds for a whole table, row or column is said once; a cell may override it. A cell never holds
a recomputed value: those are computed on demand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Literal

from memplan.catalog.entries import Source
from memplan.documents.loading import load_document
from memplan.documents.schemas import build
from memplan.errors import UnknownNameError, match_hint

FOLDER = "configs/published"

Standing = Literal["differs", "not-in-source", "left-out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How a cell comes about; None where nothing is said at this level.

    Attributes:
        config, model, gpu, count, dtype, batch, sequence, iteration, column_of: Inputs of rules.
        shape: A model of ``shapes``.
        elements: Numbers that are stored.
        of, to: Printed cells that a rule starts from: ``[ID |] ROW | COLUMN``; an empty row or column is the own one.
        record, select, measure: A record of our experiments, the row of it, and the figure.
        settled: The record's row that holds for the correction, where it is another than ``select``.
    """

    rule: str | None = None  # Name of the rule that the notes used, or ``none``
    truth: str | None = None  # Name of the correction: how memplan works out the same quantity
    unit: str | None = None  # Unit of the printed number where the text does not carry it
    reason: str | None = None  # Why the cell follows no rule, or not the one named
    says: str | None = None  # What is so instead, where that is a statement and not a figure to work out
    holds: bool | None = None  # False for a claim that our runs support in the notes' own setting and not beyond it
    standing: Standing | None = None  # What a cell without a rule is, where it is not merely out of reach
    quantity: str | None = None  # Which figure of a rule or correction
    config: str | None = None
    model: str | None = None
    gpu: str | None = None
    count: int | None = None
    dtype: str | None = None
    batch: int | None = None
    sequence: int | None = None
    iteration: int | None = None
    index: int | None = None
    shape: str | None = None
    elements: int | None = None
    of: str | None = None
    to: str | None = None
    record: str | None = None
    select: Mapping[str, str | int | bool] | None = None
    measure: str | None = None
    settled: Mapping[str, str | int | bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Origin):
    """One printed cell."""

    row: str
    column: str
    printed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTable(Origin):
    """One table of the notes.

    Attributes:
        rows, columns: What holds for all cells of a row or column.
        notes: What a reader should know of it.
    """

    id: str  # Document and number, such as ``s000.t02``
    title: str  # What it shows
    section: str  # Heading that it stands under
    cells: tuple[Cell, ...]
    rows: Mapping[str, Origin] = field(default_factory=dict)
    columns: Mapping[str, Origin] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model that the notes measured, by its shapes."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    tied: bool
    source: Source


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """One document of the notes."""

    title: str  # What it is about
    source: Source  # Where it was read
    tables: tuple[PublishedTable, ...]
    paper: Source | None = None  # The paper that it reports on, where it does
    shapes: Mapping[str, Shape] = field(default_factory=dict)  # Models that its tables are about
    statements: tuple[str, ...] = ()  # What the paper does say, each with its section


class Library:
    """All documents of the notes, and their tables by id."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {path.stem: _file(path) for path in sorted((root / FOLDER).glob("*.yaml"))}
        tables = sorted(((t, name) for name, f in self.files.items() for t in f.tables), key=lambda pair: pair[0].id)
        self.tables: dict[str, PublishedTable] = {table.id: table for table, _ in tables}
        self.file_of: dict[str, PublishedFile] = {table.id: self.files[name] for table, name in tables}
        self.shapes = {name: shape for f in self.files.values() for name, shape in f.shapes.items()}

    def chosen(self, text: str | None) -> list[PublishedTable]:
        """Return the table called ``text``, the tables of a document (``s000``), or all of them.

        Raises:
            UnknownNameError: No id begins so; the message has the nearest one.
        """
        wanted = (text or "").lower()
        if wanted in self.tables:
            return [self.tables[wanted]]
        documents = {name.split(".")[0] for name in self.tables}
        if text is not None and wanted not in documents:
            hint = match_hint(wanted, [*self.tables, *sorted(documents)])
            raise UnknownNameError(f"unknown table {text!r}{hint} (see: memplan tables)")
        return [table for name, table in self.tables.items() if text is None or name.startswith(f"{wanted}.")]

    def origin(self, table: PublishedTable, cell: Cell) -> Origin:
        """Return all that is said of a cell: by the table, its column, its row, and the cell itself."""
        levels = (table, table.columns.get(cell.column), table.rows.get(cell.row), cell)
        said = {
            name: value
            for level in levels
            if level is not None
            for name in ORIGIN_KEYS
            if (value := getattr(level, name)) is not None
        }
        selects = [level.select for level in levels if level is not None and level.select]
        if selects:
            said["select"] = {key: value for select in selects for key, value in select.items()}
        return Origin(**said)

    def cell(self, table: str, row: str, column: str) -> Cell:
        """Return a cell by its table, row and column."""
        return next(cell for cell in self.tables[table].cells if (cell.row, cell.column) == (row, column))


ORIGIN_KEYS = tuple(item.name for item in fields(Origin))


@cache
def _file(path: Path) -> PublishedFile:
    """Return a document; it ships with memplan, and the tests validate it."""
    return build(PublishedFile, load_document(path).data)
