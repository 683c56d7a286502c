"""The notes' tables, judged once."""

import pytest

from memplan.published.judged_tables import JudgedTable
from memplan.published.judgement import Judge


@pytest.fixture(scope="package", autouse=True)
def judged_once():
    """Judge a table once for all commands: what is beside its corrections plans every model on every GPU."""
    known: dict[tuple[object, str, bool], JudgedTable] = {}
    real = Judge.table

    def once(judge, table, remarks=True):
        key = judge.records.root, table.id, remarks
        if key not in known:
            known[key] = real(judge, table, remarks)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "table", once)
        yield


@pytest.fixture(scope="session")
def judge(catalog) -> Judge:
    return Judge(catalog)


@pytest.fixture(scope="session")
def judged(judge) -> dict[str, JudgedTable]:
    return {name: judge.table(table, remarks=False) for name, table in judge.library.tables.items()}


@pytest.fixture(scope="session")
def cell(judged):
    """A judged cell by table, row and column."""
    return lambda table, row, column: next(c for c in judged[table].cells if (c.row, c.column) == (row, column))
