"""Where the measured records are."""

from pathlib import Path

import pytest

RECORDS = Path(__file__).parent.parent / "records"


@pytest.fixture(scope="session")
def record_folder() -> Path:
    return RECORDS
