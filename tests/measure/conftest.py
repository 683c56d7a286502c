from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from memplan.catalog.catalog import Catalog, data_directory

RECORDS = Path(__file__).parent.parent / "records"


@cache
def shipped_catalog() -> Catalog:
    return Catalog(data_directory())


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return shipped_catalog()


@pytest.fixture(scope="session")
def record_folder() -> Path:
    return RECORDS
