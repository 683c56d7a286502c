"""Stack records taken again: the library's own code, where it is installed, does what its record says, birth by birth."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.jobs import yaml_data
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import traced
from tests.survey.stacks.stack_records import read_records, recorded

FOLDER = Path(__file__).parent
FILES = [FOLDER / "records" / f"{name}.json" for name in yaml_data(FOLDER / "environments.yaml")]
OWN = ("torchtitan", "torchtune")
INSTALLED = [path for path in FILES if path.is_file() and path.stem in OWN and find_spec(path.stem) is not None]
RECORDS = [(path.stem, number) for path in INSTALLED for number in range(0, 60, 12)]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.skipif(not RECORDS, reason="neither torchtitan nor torchtune is installed beside memplan")
@pytest.mark.parametrize(("stack", "number"), RECORDS)
def test_the_librarys_code_does_what_its_record_says(stack, number, catalog):
    path = next(path for path in INSTALLED if path.stem == stack)
    record = read_records(path)[1][number]
    job = StackJob.read(record.job)
    assert recorded(job, traced(job, catalog)) == record
