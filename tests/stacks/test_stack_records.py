"""The formula beside what the libraries' own code did: stack records, replayed without the libraries."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")

from memplan.lab.stack_survey.drawn_stack_jobs import StackJob, planned
from memplan.lab.stack_survey.stack_records import read_records
from tests.jobs import shipped_catalog

pytestmark = pytest.mark.thorough

FOLDER = Path(__file__).parent
FILES = sorted((FOLDER / "records").glob("*.json"))
PEAK_SHARE, WORST_SHARE, INSTANT_SHARE = 0.001, 0.01, 0.02

KNOWN_GAPS: dict[str, set[int]] = {
    "axolotl.pairs": {3},
    "axolotl.shards": {3, 17},
    "litgpt.adapters": {9, 27, 36, 44, 48},
    "plain-loop": {21, 38},
    "transformers": {18},
    "torchtitan.shards": {5, 12, 19},
    "torchtitan.tensor.shards": {6, 25},
    "trl.shards": {1, 5, 9, 14, 17},
    "transformers.shards": {1, 3, 22},
    "transformers.deepspeed": {2},
    "transformers.hsdp.shards": {17, 19, 24},
    "transformers.fsdp1.shards": {25, 28, 29, 34, 37},
    "transformers.towers.shards": {15, 18},
    "torchtitan.hsdp.tensor.shards": {11},
    "transformers.zero-3.shards": {2, 14, 27},
    "trl.flash-attn": {42},
    "trl.grpo": {17, 23, 33},
    "trl.grpo-0-29": {8, 40},
    "trl.pairs": {47},
    "trl.pairs-0-29": {11, 37},
    "trl.reward": {12},
}
"""Records that the formula does not follow yet; one that it follows must leave the list. All are drawn at random, and none was left out
for how it agrees, but for some quantised mixtures and GPT-NeoX in `trl.pairs` and `trl.pairs-0-29`, which did not and are refused since.

Known causes: under tensor parallelism it is token ids of later micro-steps; with `trl.flash-attn` 42 LLM.int8's scales of GPT-2's weights, which lie
the other way;
in `trl.reward` 12 Starcoder2's dropout, a function that TRL's ``disable_dropout_in_model`` does not reach. Of the others the
instants, and with `litgpt.adapters` 27, `plain-loop` 38, `trl.grpo` 23 and ZeRO 3 the peaks, were not followed further.
"""

NEAR = {
    "transformers.deepspeed": 1.0,
    "transformers.hsdp.shards": 1.0,
    "transformers.fsdp1.shards": 1.0,
    "transformers.towers.shards": 1.0,
    "torchtitan.hsdp.tensor.shards": 1.0,
    "transformers.zero-3.shards": 0.96,
    "axolotl": 0.98,
    "axolotl.cut": 0.95,
    "axolotl.shards": 1.0,
    "axolotl.pairs": 1.0,
    "axolotl.preferences": 1.0,
    "torchtitan": 0.95,
    "torchtune": 1.0,
    "torchtune.adapters": 1.0,
    "litgpt": 1.0,
    "litgpt.adapters": 0.94,
    "llama-factory": 1.0,
    "llama-factory.pairs": 0.97,
    "plain-loop": 0.98,
    "transformers": 0.96,
    "torchtitan.shards": 1.0,
    "torchtitan.tensor.shards": 1.0,
    "torchtitan.pipeline.shards": 1.0,
    "trl.shards": 0.95,
    "transformers.shards": 1.0,
    "trl": 0.98,
    "trl.0-29": 0.98,
    "trl.grpo": 0.95,
    "trl.grpo-0-29": 1.0,
    "trl.pairs": 0.97,
    "trl.pairs-0-29": 1.0,
    "trl.preferences": 0.98,
    "trl.reward": 0.93,
    "trl.vision": 1.0,
    "trl.flash-attn": 1.0,
}
"""Share of a stack's records whose peak the formula has within 0.1 %, which may grow and not shrink."""


@cache
def plan_of(job: str):
    return planned(StackJob.read(job), shipped_catalog())


def follows(record) -> bool:
    """Whether the formula has a record's peak, what persists and every instant within the limits."""
    plan = plan_of(record.job)
    instants = dict(plan.instants)
    return (
        abs(plan.requested_bytes - record.peak_bytes) <= WORST_SHARE * record.peak_bytes
        and plan.persistent_bytes == record.persistent_bytes
        and all(abs(instants.get(name, size) - size) <= INSTANT_SHARE * size for name, size in record.instants.items())
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_formula_agrees_with_the_librarys_own_code_but_for_known_gaps(path):
    records = read_records(path)[1]
    assert {StackJob.read(record.job).stack for record in records} == {path.stem.partition(".")[0]}
    assert {n for n, record in enumerate(records) if not follows(record)} == KNOWN_GAPS.get(path.stem, set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_formula_is_near_the_librarys_own_code_in_nearly_all_jobs(path):
    records = read_records(path)[1]
    pairs = [(plan_of(record.job).requested_bytes, record.peak_bytes) for record in records]
    assert sum(abs(own - peak) <= PEAK_SHARE * peak for own, peak in pairs) >= NEAR[path.stem] * len(pairs)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_records_are_of_the_versions_that_the_environments_install(path):
    versions, records = read_records(path)
    environments = yaml.safe_load((FOLDER / "environments.yaml").read_text(encoding="utf-8"))
    groups = environments.get(path.stem, environments[path.stem.partition(".")[0]]).values()
    pinned = dict(package.split("==") for group in groups for package in group)
    assert {name: number.split("+")[0] for name, number in versions.items()}.items() <= pinned.items()
    assert len({record.job for record in records}) == len(records) >= (20 if path.stem.endswith(".shards") else 40)
    assert all(len(record.events) == 64 for record in records)


def test_a_record_of_other_bytes_would_be_noticed():
    record = read_records(FILES[0])[1][0]
    data = json.loads(record.job)
    data["training"]["micro_batch_size"] += 1
    assert plan_of(json.dumps(data)).requested_bytes != record.peak_bytes
