"""The notes' tables, judged once."""

from __future__ import annotations

import pytest

from memplan.published.judged_tables import JudgedTable
from memplan.published.judgement import Judge


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
