"""Every cell of the notes: its rule gives the printed digits, or it is marked and says why."""

import json
from collections import Counter
from pathlib import Path

import pytest

from memplan.catalog.catalog import data_directory
from memplan.documents.loading import load_document
from memplan.documents.printed_numbers import Records
from memplan.documents.schemas import validate
from memplan.published.judged_tables import STATUSES, counts_of
from memplan.published.judgement import Judge
from memplan.published.notes_accounting import FILE, NotesRules, notes_rules
from memplan.published.rules import MEASURED, RULES
from memplan.published.table_schema import FOLDER, Library, Origin, PublishedFile
from tests.jobs import yaml_data

ROOT = data_directory()
FILES = sorted((ROOT / FOLDER).glob("*.yaml"))
LIBRARY = Library(ROOT)
TABLES = list(LIBRARY.tables)
AUDIT = yaml_data(Path(__file__).with_name("audit.yaml"))
RECORDED = {*MEASURED, "training-record"}
OURS = {"no-record", "within-spread", "differs"}
ALLOWED: dict[str, set[str]] = {
    "F": {"reproduces", "within-spread"},
    "S": OURS,
    "X": OURS,
    "C": OURS | {"not-computable"},
    "D": {"differs", "not-in-source", "left-out"},
    "R": {"differs", "reproduces"},
    "N": {"not-computable", "reproduces"},
    "K": {"differs"},
    "A": {"not-in-source"},
    "O": {"left-out"},
}
"""Letter of the audit -> what memplan may find."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_document_passes_the_strict_schema_and_is_the_value_that_is_used(path):
    document = load_document(path)
    assert document.problems == ()
    assert validate(PublishedFile, document) == LIBRARY.files[path.stem]


def test_what_the_rules_count_with_passes_its_strict_schema():
    document = load_document(ROOT / FILE)
    assert document.problems == ()
    assert validate(NotesRules, document) == notes_rules()


def test_there_are_49_tables_and_603_cells():
    assert set(AUDIT) == set(TABLES)
    assert (len(TABLES), sum(len(table.cells) for table in LIBRARY.tables.values())) == (49, 603)


def test_cells_are_named_once_and_every_row_and_column_that_is_described_is_there():
    for name, table in LIBRARY.tables.items():
        assert max(Counter((cell.row, cell.column) for cell in table.cells).values()) == 1, name
        assert set(table.rows) <= {cell.row for cell in table.cells}, name
        assert set(table.columns) <= {cell.column for cell in table.cells}, name


def test_every_rule_and_correction_that_is_named_exists(judge):
    for name, table in LIBRARY.tables.items():
        for cell in table.cells:
            origin = LIBRARY.origin(table, cell)
            assert origin.rule in {None, "none", *RULES}, name
            assert origin.truth is None or judge.corrections.correction(origin.truth), name


def test_cells_are_what_the_audit_found(judged):
    for name in TABLES:
        for letter, cell in zip(AUDIT[name], judged[name].cells, strict=True):
            allowed = ALLOWED[letter] | ({"no-record"} if cell.rule in RECORDED else set())
            assert cell.status in allowed, (name, cell, letter)


def test_a_cell_without_a_figure_of_its_own_says_why(judged):
    for name in TABLES:
        for cell in judged[name].cells:
            assert cell.status in ("reproduces", "within-spread") or cell.reason, (name, cell)


def test_what_does_not_follow_is_wrong_and_what_is_right_agrees_with_memplan(judged):
    for name in TABLES:
        for cell in judged[name].cells:
            if cell.status in ("differs", "not-in-source", "left-out"):
                assert cell.wrong, (name, cell)
            if cell.status == "reproduces":
                assert cell.recomputed == cell.printed, (name, cell)
                assert cell.wrong == (cell.corrected not in (None, cell.printed)), (name, cell)


def test_the_counts_add_up(judged):
    counts = counts_of(list(judged.values()))
    assert (counts["tables"], counts["cells"]) == (49, 603)
    assert sum(counts[status] for status in STATUSES) == 603
    decided = Counter(c.status for table in judged.values() for c in table.cells if c.rule not in RECORDED)
    assert decided == DECIDED


DECIDED = {"reproduces": 359, "not-computable": 109, "not-in-source": 34, "differs": 28, "left-out": 6}
"""Cells that no record of ours decides, by status; the other 67 follow our runs."""


def test_every_measured_cell_has_its_record_once_the_record_is_there(judged):
    records = Records(ROOT)
    for name, table in judged.items():
        for cell, printed in zip(table.cells, LIBRARY.tables[name].cells, strict=True):
            record = LIBRARY.origin(LIBRARY.tables[name], printed).record
            if cell.status == "no-record":
                assert record is not None
                assert not records.record(record), (name, cell.row, cell.column)


def a_record(folder: Path, low: float, high: float) -> Records:
    """Return records of which one has a row for cell 5 | Muon of the orthogonality table."""
    row = {"schedule": "you-jiacheng", "iterations": 5, "rows": 512, "columns": 512}
    record = {"rows": [row | {"frobenius": {"low": low, "high": high}}]}
    (folder / "configs/evidence").mkdir(parents=True)
    (folder / "configs/evidence/lab-orthogonality.json").write_text(json.dumps(record), encoding="utf-8")
    return Records(folder)


@pytest.mark.parametrize(
    ("low", "high", "status"),
    [(0.14, 0.15, "within-spread"), (0.1454, 0.15, "within-spread"), (0.1456, 0.15, "differs")],
)
def test_a_measurement_is_held_against_the_spread_of_the_record(catalog, tmp_path, low, high, status):
    judge = Judge(catalog)
    judge.records = a_record(tmp_path, low, high)
    table = judge.library.tables["s000.t09"]
    found = {(cell.row, cell.column): cell.status for cell in judge.table(table, remarks=False).cells}
    assert found["5", "Muon"] == status
    assert found["7", "Muon"] == "no-record"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_recomputed_value_stands_beside_its_inputs(path):
    """A cell holds what is printed and where it comes from; figures that can be worked out are not stored."""
    for table in LIBRARY.files[path.stem].tables:
        for cell in table.cells:
            assert not ({"recomputed", "corrected", "reproduced"} & set(Origin.__dataclass_fields__))
            assert cell.says is None or not any(character.isdigit() for character in cell.says) or cell.says == "7"


def test_claims_that_are_not_in_the_paper_are_listed_and_what_it_says_has_its_section(judged):
    claimed = [cell for name, table in judged.items() if name.startswith("s004") for cell in table.cells]
    assert Counter(cell.status for cell in claimed) == {"not-in-source": 34, "left-out": 6}
    paper = LIBRARY.files["moonlight"]
    assert paper.paper is not None
    assert paper.paper.url == "https://arxiv.org/abs/2502.16982"
    assert all(statement.startswith("Section ") for statement in paper.statements)
    assert {statement.split(":")[0].split(",")[0] for statement in paper.statements} == {
        "Section 2.2", "Section 2.3", "Section 3.2", "Section 3.3", "Section 3.5"
    }  # fmt: skip
