"""Answers to different questions about one job agree, whatever the job: drawn from models, stacks, configs and cards."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import memplan
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
MODELS = (
    "gpt2", "pythia-160m", "smollm2-135m", "qwen3-0.6b", "gemma-2-2b", "llama-3.1-8b", "qwen3-30b-a3b",
    "deepseek-v2-lite",
)  # fmt: skip
STACKS = (
    "bundled", "plain-loop", "transformers", "trl", "axolotl", "llama-factory", "torchtune", "torchtitan", "litgpt",
)  # fmt: skip
CONFIGS = ("bf16-adamw", "bf16-adamw-8bit", "mixed-adamw", "lora", "qlora", "muon", "tier1")
GPUS = ("rtx3050", "rtx4090", "a100-40gb", "h100", "b200")
KEYS = st.fixed_dictionaries(
    {},
    optional={
        "gradient_accumulation_steps": st.sampled_from([1, 2, 4]),
        "clip_gradients": st.booleans(),
        "evaluation": st.booleans(),
        "gradients.lifetime": st.sampled_from(["step", "layer"]),
        "kernels.attention": st.sampled_from(["flash", "math", "efficient"]),
        "kernels.loss": st.sampled_from(["bf16", "fp32", "chunked"]),
        "adapter.rank": st.sampled_from([1, 16, 64]),
        "dropout": st.sampled_from([0.0, 0.1]),
    },
)
JOBS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS),
        "config": st.sampled_from(CONFIGS),
        "stack": st.sampled_from(STACKS),
        "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
        "micro_batch_size": st.integers(1, 6),
        "sequence_length": st.integers(1, 1000),
        "set": KEYS,
    }
)
CARDS = st.sampled_from(GPUS)


def laws(examples: int, *, derandomize: bool = True) -> Any:
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, derandomize=derandomize, suppress_health_check=quiet)


def job_of(drawn: dict[str, Any]) -> memplan.Job:
    """The job, where the stack has it; one that is refused says nothing here."""
    options = dict(drawn)
    try:
        return memplan.job(options.pop("model"), catalog=CATALOG, **options)
    except memplan.MemplanError:
        assume(False)
        raise


def planned(job: memplan.Job, gpu: str, **numbers: Any) -> memplan.Plan:
    try:
        return job.plan(gpu, **numbers)
    except memplan.MemplanError:
        assume(False)
        raise


def figures(plan: memplan.Plan) -> dict[str, Any]:
    """All of a plan's figures, whatever its job is called."""
    data = plan.to_dict()
    return {key: data[key] for key in ("verdict", "components", "instants", "peak", "persistent_bytes", "host")}


def command(drawn: dict[str, Any], gpu: str) -> list[str]:
    """The command line of the same job."""
    sets = [word for key, value in drawn["set"].items() for word in ("--set", f"{key}={str(value).lower()}")]
    sizes = ["-b", str(drawn["micro_batch_size"]), "-s", str(drawn["sequence_length"])]
    loop = ["--stack", drawn["stack"], "--checkpointing", drawn["activation_checkpointing"]]
    return [drawn["model"], "--gpu", gpu, "--config", drawn["config"], *loop, *sizes, *sets]


# ------------------------------------------------------------------ one job, asked in several ways
def same_from_everywhere(drawn, gpu, cli) -> None:
    plan = planned(job_of(drawn), gpu, simulated=True)
    printed = cli("fit", *command(drawn, gpu), "--json").data
    assert {key: printed[key] for key in figures(plan)} == figures(plan)
    explained = cli("explain", *command(drawn, gpu), "--json").data
    assert (
        sum(line["bytes"] for line in explained["components"])
        == explained["peak"]["device_bytes"]
        == plan.expected_bytes
    )
    again = memplan.plan(drawn["model"], gpu=gpu, config=plan.training, catalog=CATALOG)
    assert figures(again) == figures(plan)


@laws(6)
@given(JOBS, CARDS)
def test_a_plan_is_the_same_from_python_the_command_and_its_own_json(cli, drawn, gpu):
    same_from_everywhere(drawn, gpu, cli)


@pytest.mark.slow
@laws(200, derandomize=False)
@given(JOBS, CARDS)
def test_any_plan_is_the_same_from_python_the_command_and_its_own_json(cli, drawn, gpu):
    same_from_everywhere(drawn, gpu, cli)


# ------------------------------------------------------------------ more never takes less
def more_takes_no_less(drawn, gpu, more, longer) -> None:
    """torchtune forms logits of a sequence in eight chunks, of which the last is shorter for some lengths than for one less."""
    chunks = 8 if drawn["stack"] == "torchtune" else 1
    batch, length, longer = drawn["micro_batch_size"], chunks * drawn["sequence_length"], chunks * longer
    job = job_of({**drawn, "sequence_length": length})
    here = planned(job, gpu).memory
    for numbers in ({"micro_batch_size": batch + more}, {"sequence_length": length + longer}):
        there = planned(job, gpu, **numbers).memory
        assert there.requested_bytes >= here.requested_bytes
        assert there.upper_bytes >= here.upper_bytes


@laws(25)
@given(JOBS, CARDS, st.integers(1, 4), st.integers(1, 500))
def test_more_sequences_or_tokens_take_no_less_under_any_stack(drawn, gpu, more, longer):
    more_takes_no_less(drawn, gpu, more, longer)


@pytest.mark.slow
@laws(2000, derandomize=False)
@given(JOBS, CARDS, st.integers(1, 4), st.integers(1, 500))
def test_more_sequences_or_tokens_take_no_less_in_any_job(drawn, gpu, more, longer):
    more_takes_no_less(drawn, gpu, more, longer)


# ------------------------------------------------------------------ the largest fits, and the next does not
def largest_is_the_last_that_fits(drawn, gpu, of, key) -> None:
    job = job_of(drawn)
    planned(job, gpu)
    options = {name: value for name, value in drawn.items() if name not in ("model", key)} | {"gpu": gpu}
    row = memplan.largest(drawn["model"], of=of, catalog=CATALOG, **options).rows[0]
    if row.fits.value:
        assert memplan.plan(drawn["model"], catalog=CATALOG, **options, **{key: row.fits.value}).verdict == "fits"
    if not row.fits.bounded:
        following = row.fits.value + row.fits.apart
        assert memplan.plan(drawn["model"], catalog=CATALOG, **options, **{key: following}).verdict != "fits"


@laws(4)
@given(JOBS, CARDS, st.sampled_from([("batch", "micro_batch_size"), ("sequence", "sequence_length")]))
def test_the_largest_fits_and_one_more_does_not_under_any_stack(drawn, gpu, sought):
    largest_is_the_last_that_fits(drawn, gpu, *sought)


@pytest.mark.slow
@laws(100, derandomize=False)
@given(JOBS, CARDS, st.sampled_from([("batch", "micro_batch_size"), ("sequence", "sequence_length")]))
def test_the_largest_fits_and_one_more_does_not_in_any_job(drawn, gpu, sought):
    largest_is_the_last_that_fits(drawn, gpu, *sought)


# ------------------------------------------------------------------ what changes nothing, and what a card changes
def card_changes_its_own(drawn) -> None:
    """Both are of compute capability 9.0: kernels and workspaces are the same."""
    job = job_of(drawn)
    first, second = (planned(job, gpu) for gpu in ("h100-sxm-80gb", "h200-sxm-141gb"))
    outside = ("device_context", "nccl_buffers")
    ours, theirs = ({n: b for n, b in plan.components.items() if n not in outside} for plan in (first, second))
    assert (ours, first.instants, first.host_bytes) == (theirs, second.instants, second.host_bytes)
    assert first.training == second.training
    assert first.usable_bytes < second.usable_bytes


@laws(10)
@given(JOBS)
def test_a_larger_card_of_the_same_kind_changes_its_own_lines_alone(drawn):
    card_changes_its_own(drawn)


@laws(10)
@given(JOBS, CARDS)
def test_degrees_of_one_are_no_parallelism(drawn, gpu):
    plain = planned(job_of(drawn), gpu)
    degrees = dict.fromkeys(("data", "replicate", "tensor", "pipeline", "virtual", "context", "expert"), 1)
    alone = {**drawn, "set": {**drawn["set"], **{f"parallel.{name}": 1 for name in degrees}}}
    assert figures(planned(job_of(alone), gpu)) == figures(plain)


# ------------------------------------------------------------------ what is suggested is what is planned
@laws(3)
@given(st.sampled_from(MODELS[:6]), CARDS, st.integers(1, 4), st.sampled_from([128, 1000]))
def test_what_is_suggested_takes_what_was_promised(model, gpu, batch, length):
    answer = memplan.suggest(model, gpu=gpu, min_batch=batch, min_sequence=length, most=2, catalog=CATALOG)
    for row in answer.rows:
        again = memplan.plan(model, gpu=gpu, config=row.training, catalog=CATALOG)
        assert figures(again) == figures(row)
        assert row.training["micro_batch_size"] >= batch
        assert row.training["sequence_length"] >= length


def test_settings_whose_allocator_takes_more_than_its_share_are_no_answer():
    """The one answer took 25 GiB of an RTX 4090 as ``fit`` plays it, and was said to fit."""
    answer = memplan.suggest("qwen2.5-0.5b", gpu="rtx4090")
    assert answer.verdict == "fits"
    assert {memplan.plan("qwen2.5-0.5b", gpu="rtx4090", config=row.training).verdict for row in answer.rows} == {"fits"}


def test_settings_none_of_which_fits_once_simulated_are_no_answer(monkeypatch):
    """Those of the last search were still said to fit; the nearest miss is what ``fit`` says of it."""
    kept = ["weights", "gradients", "master", "lifetime", "optimizer", "offload", "checkpointing", "kernels"]
    job = {"keep": kept, "sequence_length": 128, "catalog": CATALOG}
    miss = memplan.suggest("gpt2", gpu_memory="900MiB", **job).search.miss.plan
    again = memplan.plan("gpt2", gpu_memory="900MiB", config=miss.training, catalog=CATALOG)
    assert (miss.verdict, miss.upper_bytes, miss.reserve_by_share) == ("no", again.upper_bytes, "")

    def too_much(plan, **_):
        return replace(plan, verdict="no", upper_bytes=2 * plan.upper_bytes)

    monkeypatch.setattr("memplan.library.several.played_search.simulated", too_much)
    answer = memplan.suggest("gpt2", gpu_memory="6GiB", **job)
    assert (answer.verdict, answer.rows, answer.search.miss.plan.verdict) == ("no", (), "no")
    assert "NO: none of" in str(answer.document().blocks[-1])
