"""Each printed cell beside what its rule gives and what memplan holds true, and what follows for it."""

from functools import cached_property

from memplan.catalog.catalog import Catalog
from memplan.documents.printed_numbers import Interval, Records, Value, formatted_like, lies_within
from memplan.published.corrections import Corrections
from memplan.published.judged_tables import CellInputs, JudgedCell, JudgedTable, JudgedTables, Status
from memplan.published.planned import shape_figures
from memplan.published.rules import MEASURED, RULES
from memplan.published.table_schema import Cell, Library, PublishedTable

IN_WORDS = frozenset(("status", "training", "gap"))
"""Corrections that say something about a cell and give no other figure for it."""

TRAINS = frozenset(("learns", "level", "indistinct", "close"))
"""Verdicts of a record of training that support a claim that it works."""


class Judge:
    """Judges tables; every figure is computed on first use."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.records = Records(catalog.root)

    @cached_property
    def library(self) -> Library:
        """The notes' tables."""
        return Library(self.catalog.root)

    @cached_property
    def corrections(self) -> Corrections:
        """What memplan holds true."""
        return Corrections(self.catalog, self.records)

    def table(self, table: PublishedTable, remarks: bool = True) -> JudgedTable:
        """Return a table with its cells judged.

        Args:
            remarks: Whether to look for what stands beside a correction, such as the largest model that fits.
        """
        cells = tuple(self.cell(table, cell, remarks) for cell in table.cells)
        return JudgedTable(table, self.library.file_of[table.id], cells)

    def cell(self, table: PublishedTable, cell: Cell, remarks: bool = True) -> JudgedCell:
        """Return a cell beside its rule's figure and memplan's."""
        inputs = CellInputs(self.library, self.records, table, cell, self.library.origin(table, cell))
        unit = inputs.origin.unit
        name = inputs.origin.rule if inputs.origin.rule != "none" else None
        given = RULES[name].value(inputs) if name is not None else None
        status = _status(inputs, name, given)
        recomputed = None if given in (None, (), "") else formatted_like(cell.printed, given or "", unit)
        truth = self.corrections.value(inputs)
        corrected = None if truth is None else formatted_like(cell.printed, truth, unit)
        follows = status in ("reproduces", "within-spread", "not-computable", "no-record")
        figure = inputs.origin.truth not in IN_WORDS or inputs.origin.says is not None
        wrong = (
            not follows
            or inputs.origin.holds is False
            or (corrected is not None and figure and corrected != cell.printed)
        )
        if corrected is None and status == "differs":
            corrected = recomputed
        if remarks and (remark := self.corrections.remark(inputs)):
            corrected = remark if corrected is None else f"{corrected}; {remark}"
        reason = _reason(inputs, status, given)
        return JudgedCell(
            row=cell.row,
            column=cell.column,
            printed=cell.printed,
            rule=name,
            recomputed=recomputed,
            corrected=corrected,
            status=status,
            wrong=wrong,
            reason=reason,
        )


def _status(inputs: CellInputs, name: str | None, given: Value | None) -> Status:
    printed, unit = inputs.cell.printed, inputs.origin.unit
    if name is None:
        return inputs.origin.standing or "not-computable"
    if name == "training-record":
        return "no-record" if not given else "within-spread" if given in TRAINS else "differs"
    if name in MEASURED:
        intervals = [item for item in given or () if isinstance(item, Interval)]
        if not intervals:
            return "no-record"
        return "within-spread" if lies_within(printed, intervals, unit) else "differs"
    return "reproduces" if formatted_like(printed, given or "", unit) == printed else "differs"


def _reason(inputs: CellInputs, status: Status, given: Value | None) -> str:
    said = inputs.origin.reason or ""
    if status == "no-record":
        return f"No record {inputs.origin.record} of ours yet."
    if status == "differs" and inputs.origin.rule in MEASURED and given and not said:
        return "Outside the spread of our runs."
    if status == "within-spread":
        return inputs.cell.reason or ""
    return said if status != "reproduces" else ""


def judged_tables(text: str | None, catalog: Catalog, remarks: bool = True) -> JudgedTables:
    """Return the notes' tables with their cells judged, and the shapes of their documents planned.

    Args:
        text: Id of a table, or of a document such as ``s000``; None for all.
        remarks: Whether to look for what stands beside a correction, such as the largest model that fits.

    Raises:
        UnknownNameError: No table or document has the id.
    """
    judge = Judge(catalog)
    tables = tuple(judge.table(table, remarks) for table in judge.library.chosen(text))
    files = {id(table.file): table.file for table in tables}.values()
    shapes = tuple(row for file in files for row in shape_figures(file, catalog))
    return JudgedTables(tables, tuple(files), shapes, {name: rule.text for name, rule in RULES.items()})
