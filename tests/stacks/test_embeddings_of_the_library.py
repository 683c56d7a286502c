"""The formula beside what Sentence Transformers' own code did: jobs drawn with seed 2026, replayed without the library.

``python tests/stacks/survey.py sentence-transformers --stage embedding --seed 2026 --jobs 12 --record tests/stacks/embeddings.json``
"""

from pathlib import Path

import pytest

from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.stack_records import catalog_at, read_records

FOLDER = Path(__file__).parent
VERSIONS, DRAWN = read_records(FOLDER / "embeddings.json")
RECORDS = [*DRAWN, *read_records(FOLDER / "embeddings_as_stored.json")[1]]
"""Those drawn, and models that store or multiply weights otherwise than most: GPT-2, gpt-oss, Falcon and GPT-J, all of which trains."""
PEAK_SHARE, INSTANT_SHARE = 0.001, 0.005


@pytest.mark.parametrize("number", range(len(RECORDS)))
def test_every_instant_is_sentence_transformers_own(number):
    record = RECORDS[number]
    plan = planned(StackJob.read(record.job), catalog_at(VERSIONS["transformers"]))
    assert plan.requested_bytes == pytest.approx(record.peak_bytes, rel=PEAK_SHARE)
    assert plan.persistent_bytes == record.persistent_bytes
    own = dict(plan.instants)
    off = {
        key: own[key] - size
        for key, size in record.instants.items()
        if key in own and abs(own[key] - size) > INSTANT_SHARE * size
    }
    assert not off


def test_records_have_full_and_adapted_models_plain_and_cached_losses():
    jobs = [StackJob.read(record.job) for record in DRAWN]
    assert {"full", "lora", "nf4"} <= {job.method for job in jobs}
    texts = [job.job.training["method"]["embedding"] for job in jobs]
    assert {text["pooling"] for text in texts} == {"mean", "last", "cls"}
    assert any("mini_batch_size" in text for text in texts)
