"""The formula beside what the libraries' own code did: stack records, replayed without the libraries."""

import json
from functools import cache
from pathlib import Path

import pytest

from tests.golden.test_recorded_jobs import hold
from tests.jobs import yaml_data
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.stack_records import catalog_at, read_records, runs_as_now

pytestmark = pytest.mark.thorough

FOLDER = Path(__file__).parent
FILES = sorted((FOLDER / "records").glob("*.json"))
PEAK_SHARE, WORST_SHARE, INSTANT_SHARE = 0.001, 0.01, 0.02
UNCOUNTED_BYTES = 600
"""Rotary frequencies and a loop's scalars, which no plan counts: all that the update of states in host memory has on a device."""

RECORDS = yaml_data(FOLDER / "records.yaml")
"""Each record, its row of the page and its gaps: jobs that the formula does not follow yet. All are drawn at random, and none was left out
for how it agrees, but for some quantised mixtures and GPT-NeoX in `trl.pairs`, `trl.pairs-0-29` and `plain-loop.4-48`, which did not and are refused since.

Known causes: with `llama-factory-v1` 25 it is 60 kB after backward of a tiny Phi with adapters; with `llama-factory-v1.shards` 12 GPT-NeoX with a tied head, below the peak;
with `llama-factory.ends` it is what lasts of towers beside adapters on fp32 weights, which LLaMA-Factory never loads so, and with
`llama-factory.reference` the forward of two models whose weights outweigh their rows, 4 and 7 % high below the peak;
with `trl.evaluated.shards` 4 the optimizer's step of a StableLM with adapters that has 20 kB there, 3.7 kB low;
with `trl.preferences-zero-3.shards` 8 the padding of what a reference model's engine gathers alone and keeps, 512 bytes;
with `llama-factory.kto` 5 Granite's scaled logits under fp16;
with `transformers.vision-deepspeed.shards` 28 what the rank that was traced keeps, 41 kB more than the fullest of the formula;
with `transformers.ends` 1 a mixture whose layers have experts by turns, and with 20 LLM.int8 of a model with three features within,
both without trained ends too;
with `plain-loop.4-51`, `transformers.4-51`, `transformers.4-57` and `trl.0-28` instants below the peak, whose causes were not followed;
with `plain-loop.4-51.experts` it is the mask of eager attention, which reentrant checkpointing up to 4.51 is given by itself, saves, and lets go
of in backward: the plan has it until the graph goes (`called_again`), and so have other records of that time, below the limit;
with `plain-loop.latent` 23 the last norm of a model of 97 words, beside which it still has a name for its embeddings;
with `transformers.4-44` it is the end of backward, 5 and 3 % high below the peak, and with `trl.0-19` BLOOM's probabilities, which it returned to none up to 4.57;
with `llama-factory.hosted` 0 and 23 Llama 4's first layer and EXAONE 4 below the peak, as off where nothing is offloaded;
with `transformers.5-24` instants below the peak of small Gemma 4 models, and forward of two GPT-J of less than 6 MB, 6 and 72 kB low;
with `transformers.newer` 17 it is an instant below the peak of Ministral 3 with attention step by step, which was not followed;
in `axolotl.kto-reward` 6 a reward model of 20 features, 10 kB low; in `axolotl.staged.shards` 30 it is Gemma 3's layer, 2 % low below it. Of the others the
instants were not followed further.
"""
PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"


@cache
def plan_of(job: str, transformers: str):
    """Return the plan of a job with models of a version of transformers; those of the newest one are mostly the same."""
    stack_job = StackJob.read(job)
    if transformers and runs_as_now(stack_job, transformers):
        return plan_of(job, "")
    return planned(stack_job, catalog_at(transformers))


def planned_records(path: Path):
    """Return plans of a file's jobs, with models of the transformers that ran, and the records."""
    versions, records = read_records(path)
    return [(plan_of(record.job, versions.get("transformers", "")), record) for record in records]


def follows(plan, record) -> bool:
    """Whether the formula has a record's peak, what persists and every instant within the limits."""
    instants = dict(plan.instants)
    uncounted = UNCOUNTED_BYTES if plan.host.tensors else 0
    return (
        abs(plan.requested_bytes - record.peak_bytes) <= WORST_SHARE * record.peak_bytes
        and plan.persistent_bytes == record.persistent_bytes
        and all(
            abs(instants.get(name, size) - size) <= max(uncounted, INSTANT_SHARE * size)
            for name, size in record.instants.items()
        )
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_formula_agrees_with_the_librarys_own_code_as_the_page_says_but_for_known_gaps(path, request):
    planned_jobs = planned_records(path)
    assert {StackJob.read(record.job).stack for _, record in planned_jobs} == {path.stem.partition(".")[0]}
    assert {n for n, pair in enumerate(planned_jobs) if not follows(*pair)} == set(RECORDS[path.stem].get("gaps", []))
    pairs = [(plan.requested_bytes, record.peak_bytes) for plan, record in planned_jobs]
    assert sum(abs(own - peak) <= PEAK_SHARE * peak for own, peak in pairs) >= RECORDS[path.stem]["near"] * len(pairs)
    if not request.config.getoption("--update-golden"):
        assert page_parts()[1][list(RECORDS).index(path.stem)] == row_of(path)
    jobs = [record.job for _, record in planned_jobs]
    for quarter in range(4):
        hold(path.stem, quarter, jobs, lambda number: plan_of(jobs[number], ""), request)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_records_are_of_the_versions_that_the_environments_install(path):
    versions, records = read_records(path)
    environments = yaml_data(FOLDER / "environments.yaml")
    groups = environments.get(path.stem, environments[path.stem.partition(".")[0]]).values()
    pinned = dict(package.split("==") for group in groups for package in group)
    assert {name: number.split("+")[0] for name, number in versions.items()}.items() <= pinned.items()
    assert len({record.job for record in records}) == len(records) >= (20 if path.stem.endswith(".shards") else 40)
    assert all(len(record.events) == 64 for record in records)


def test_a_record_of_other_bytes_would_be_noticed():
    record = read_records(FILES[0])[1][0]
    data = json.loads(record.job)
    data["training"]["micro_batch_size"] += 1
    assert plan_of(json.dumps(data), "").requested_bytes != record.peak_bytes


def row_of(path: Path) -> str:
    """Return a record's row of the page: jobs, and those whose peak, instants and persistent bytes the formula has."""
    plans = planned_records(path)
    off = [abs(plan.requested_bytes - record.peak_bytes) / record.peak_bytes for plan, record in plans]
    near = [
        all(abs(dict(plan.instants).get(name, size) - size) <= 0.01 * size for name, size in record.instants.items())
        for plan, record in plans
    ]
    equal = [plan.persistent_bytes == record.persistent_bytes for plan, record in plans]
    shares = [f"{sum(part) / len(plans):.1%}" for part in ([one <= PEAK_SHARE for one in off], near, equal)]
    cells = (RECORDS[path.stem]["row"], str(len(plans)), shares[0], f"{max(off):.2%}", *shares[1:])
    return f"| {' | '.join(cells)} |".replace("%", " %")


def page_parts() -> tuple[list[str], list[str], list[str]]:
    """Return the lines of the page before the rows of the table of records, these, and those behind."""
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    first = next(n for n, line in enumerate(lines) if line.startswith("| stack | jobs | peak in 0.1 % |")) + 2
    end = lines.index("", first)
    return lines[:first], lines[first:end], lines[end:]


def test_the_page_has_a_row_for_every_record(request):
    """What a row says is judged where its jobs are planned."""
    assert {path.stem for path in FILES} == RECORDS.keys()
    before, rows, behind = page_parts()
    if request.config.getoption("--update-golden"):
        rows = [row_of(next(path for path in FILES if path.stem == stem)) for stem in RECORDS]
        PAGE.write_text("\n".join([*before, *rows, *behind]), encoding="utf-8")
    assert len(rows) == len(RECORDS)
