"""Rows that a collator pads: when there are any, and where they are refused; records/trl.padded.json has what TRL's own code did."""

from typing import Any

import pytest

import memplan
from memplan.errors import MemplanError
from memplan.library.answers.planned_job import plan_by_share
from memplan.plan.memory_plan import MemoryPlan
from memplan.plan.reserve.simulation import events_of
from memplan.report.canvas import Canvas
from memplan.report.screens.plan_screen import plan_screen


def planned(stack: str = "trl", rows: int = 2, model: str = "llama-3.2-1b", **keys: Any) -> memplan.Plan:
    setting = {"activation_checkpointing": "none", **keys}
    return memplan.plan(
        model,
        gpu="a100-80gb",
        config="lora",
        stack=stack,
        micro_batch_size=rows,
        sequence_length=512,
        set=setting,
    )


def test_a_micro_batch_of_one_row_has_no_padding_and_no_mask():
    own, padded = planned(rows=1), planned(rows=1, padded_rows=True)
    assert (padded.instants, padded.expected_bytes) == (own.instants, own.expected_bytes)
    assert planned(rows=1, padded_rows="multiple").memory.requested_bytes > own.memory.requested_bytes


def test_rows_with_padding_that_are_evaluated_alone_have_their_mask_among_the_events_too():
    job, mask = {"rows": 1, "evaluation": True, "evaluation_batch_size": 7}, 7 * 512 * 512
    plans = [planned("transformers", padded_rows=said, **job).memory for said in (False, True)]
    full, padded = (events_of(plan, 1).sizes.count(mask) for plan in plans)
    assert full < padded  # without it a small job had 14 % less in segments


def test_padded_rows_repeat_keys_and_values_and_form_a_bias_in_each_layer():
    own, padded = (planned(padded_rows=said).memory for said in (False, True))
    rows, length, layers, width = 2, 512, 16, 32 * 64
    repeated, groups = 2 * rows * length * width * 2, 4  # keys and values of eight heads for all 32, in bf16
    bias = rows * length * length * 2
    more = layers * (repeated - repeated // groups + bias) + rows * length * length
    assert padded.requested_bytes - own.requested_bytes == pytest.approx(more, rel=0.05)


@pytest.mark.parametrize(
    ("stack", "keys", "said"),
    [
        ("litgpt", {}, "litgpt .*gives attention no mask of padding"),
        ("transformers@4.52", {}, "masks of transformers 4.52 are not modelled"),
        ("trl", {"kernels.attention": "flash"}, "flash-attn takes padding out"),
        ("trl", {"joined_rows": True}, "have no padding"),
        ("transformers", {"compile": "model"}, "compile"),
    ],
)
def test_padded_rows_are_refused_where_they_were_not_traced(stack, keys, said):
    with pytest.raises(MemplanError, match=said):
        planned(stack, padded_rows=True, **keys)


def test_a_mask_of_floats_that_an_older_model_makes_itself_is_refused():
    with pytest.raises(MemplanError, match="makes a mask of floats, which is not modelled"):
        planned("transformers@4.57", model="falcon-7b", padded_rows=True)


def test_an_answer_names_the_kernel_that_runs_under_the_mask():
    own, padded = planned().memory, planned(padded_rows=True).memory
    assert (own.attention, padded.attention) == ("flash", "efficient")
    assert any("attention efficient, norm" in line for line in padded.assumptions)
    assert planned(rows=1, padded_rows=True).memory.attention == "flash"


def ends(model: str, plan: Any = plan_by_share, **options: Any) -> list[MemoryPlan]:
    """Return plans of a job with full rows, with rows of which nobody says whether they are padded, and with padded ones."""
    settings = dict(options.pop("set", {}))
    said = ({"padded_rows": False}, {}, {"padded_rows": True})
    return [plan(model, **options, set={**settings, **more}).memory for more in said]


@pytest.mark.parametrize(
    ("model", "stack", "gpu", "more"),
    [
        ("llama-3.1-8b", "trl", "a100-80gb", {"activation_checkpointing": "none"}),
        ("llama-3.1-8b", "trl", "h100", {}),
        ("qwen2.5-7b", "transformers", "rtx4090", {"evaluation": True, "activation_checkpointing": "none"}),
        ("gemma-3-4b", "axolotl", "l40s", {"parallel.data": 4, "parallel.zero_stage": 3}),
        ("mistral-7b", "llama-factory", "a100-40gb", {"method.stage": "dpo"}),
        ("qwen3-30b-a3b", "plain-loop", "b200", {"sequence_length": 500}),
        ("phi-4", "ms-swift", "a100-40gb", {"activation_checkpointing": "none", "parallel.data": 2}),
        ("deepseek-v2-lite", "trl", "a100-80gb", {"activation_checkpointing": "none"}),
        ("qwen3-4b", "plain-loop", "l40s", {"weights.hidden_matrix": "nf4-dq"}),  # a mask leads torch away from math
    ],
)
def test_the_upper_end_of_rows_that_may_be_padded_is_that_of_padded_rows(model, stack, gpu, more):
    full, own, padded = ends(model, gpu=gpu, config="lora", stack=stack, micro_batch_size=3, set=more)
    assert own.device_bytes == full.device_bytes
    assert own.upper_bytes == max(full.upper_bytes, padded.upper_bytes) > padded.device_bytes
    assert own.padding_bytes == pytest.approx(own.upper_bytes - full.upper_bytes, abs=1)  # rounded down


@pytest.mark.parametrize(
    ("keys", "covered"),
    [
        ({}, True),
        ({"rows": 1}, False),
        (
            {"rows": 1, "evaluation": True, "evaluation_batch_size": 64},
            False,
        ),  # the mask has room in segments of other blocks
        ({"rows": 1, "evaluation": True, "evaluation_batch_size": 96}, True),
        ({"rows": 1, "method.stage": "dpo"}, True),
        ({"padded_rows": False}, False),
        ({"joined_rows": True}, False),
        ({"kernels.attention": "eager"}, False),
        ({"kernels.attention": "flash"}, False),
        ({"stack": "transformers@4.52"}, False),
        ({"stack": "litgpt"}, False),
        ({"stack": "bundled"}, False),
        ({"stack": "unsloth"}, False),
    ],
)
def test_an_answer_names_what_its_upper_end_has_for_rows_that_may_be_padded(keys, covered):
    plan = planned(**keys)
    memory = plan.memory
    lines = [line for block in plan_screen(memory, Canvas(80), "", {}) for line in block]
    assert (memory.padding_bytes > 0) == covered == any(str(line).startswith("Worst case: ") for line in lines)
    assert plan.to_dict()["peak"].get("padding_bytes", 0) == memory.padding_bytes
    assert any("the upper end has" in line and "padded_rows" in line for line in memory.assumptions) == covered


def test_the_largest_batch_is_the_one_that_fits_as_its_own_plan_says():
    job: dict[str, Any] = {"gpu": "rtx4090", "config": "lora", "stack": "trl", "sequence_length": 1024}
    job["set"] = {"activation_checkpointing": "none"}
    (batch,) = memplan.largest("llama-3.2-1b", "batch", **job).values.values()
    verdicts = [memplan.plan("llama-3.2-1b", micro_batch_size=batch + more, **job).verdict for more in (0, 1)]
    assert verdicts[0] == "fits" != verdicts[1]


def test_a_grid_of_batches_has_the_verdicts_and_ends_of_the_plans_themselves():
    job: dict[str, Any] = {
        "gpu": "rtx4090",
        "config": "lora",
        "stack": "trl",
        "set": {"activation_checkpointing": "none"},
    }
    grid = memplan.frontier("llama-3.2-1b", batches=(1, 4, 5), lengths=(1024, 1280), **job)
    for cell in (cell for row in grid.frontier.cells for cell in row):
        plan = plan_by_share("llama-3.2-1b", micro_batch_size=cell.batch, sequence_length=cell.length, **job).memory
        assert (cell.verdict, cell.upper_bytes) == (plan.verdict, plan.upper_bytes)


def test_on_a_card_that_is_nearly_full_the_run_of_padded_rows_is_played_too():
    job: dict[str, Any] = {"gpu_memory": "131GiB", "config": "lora", "stack": "trl", "micro_batch_size": 8}
    job["sequence_length"], none = 2048, {"activation_checkpointing": "none", "kernels.attention": "auto"}
    full, own, padded = (
        memplan.plan("qwen2.5-7b", **job, set={**none, **said}).memory
        for said in ({"padded_rows": False}, {}, {"padded_rows": True})
    )
    assert full.upper_bytes < own.usable_bytes < padded.upper_bytes == own.upper_bytes
    assert own.padding_bytes == own.upper_bytes - full.upper_bytes
    assert (full.verdict, own.verdict, padded.verdict) == ("fits", "tight", "no")


@pytest.mark.parametrize(("rows", "length", "share_says"), [(8, 1024, "less"), (2, 512, "more")])
def test_the_upper_end_is_that_of_the_run_with_padded_rows_where_its_bytes_lie_otherwise_than_a_share_says(
    rows, length, share_says
):
    job: dict[str, Any] = {"gpu": "h100", "config": "lora", "stack": "trl", "micro_batch_size": rows}
    job |= {"sequence_length": length, "set": {} if share_says == "less" else {"activation_checkpointing": "none"}}
    full, own, padded = ends("smollm2-135m", memplan.plan, **job)
    share = full.upper_bytes + own.allowances.upper_reserved_bytes(own.doubt_bytes)
    assert share < padded.upper_bytes if share_says == "less" else share > padded.upper_bytes
    assert own.upper_bytes == padded.upper_bytes
