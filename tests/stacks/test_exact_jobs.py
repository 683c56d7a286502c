"""A few recorded jobs that the formula follows to 16 KiB at every instant, in every run; all of them are replayed by the thorough one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.stack_records import catalog_at, read_records

RECORDS = Path(__file__).parent / "records"
EXACT = {
    "transformers.offload.shards": (2, 4, 5, 7, 9, 10, 14, 19, 22, 23, 25, 34, 37),
    "transformers.fsdp1-offload.shards": (2, 4, 5, 7, 10, 12, 17, 18, 20, 21, 23, 27, 28, 29),
    "plain-loop.latent": (2, 3, 4, 13, 22, 25, 33),
    "transformers": (11, 18, 27),
    "transformers.classification": (8, 45),
    "transformers.earlier": (33, 42),
    "trl.pairs": (25,),
    "trl.frozen": (2, 8, 9, 17, 19, 21, 26, 29, 30, 37, 45, 49, 50, 51),
}
UNCOUNTED_BYTES = 16_384
"""Rotary frequencies, a loop's scalars and scratch of reductions, which no plan counts."""


@pytest.mark.parametrize("name", EXACT)
def test_every_instant_is_the_librarys_own(name):
    versions, records = read_records(RECORDS / f"{name}.json")
    for number in EXACT[name]:
        record = records[number]
        plan = planned(StackJob.read(record.job), catalog_at(versions.get("transformers", "")))
        own = dict(plan.instants)
        off = {key: own[key] - size for key, size in record.instants.items() if abs(own[key] - size) > UNCOUNTED_BYTES}
        assert not off, number
