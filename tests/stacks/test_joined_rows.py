"""Rows that TRL's collator joins to one, beside what its own code did.

Each record was traced by ``stack_trace`` (what ``memplan trace --stack trl`` runs) of TRL 1.16.0 on transformers 5.24.0, with ``packing`` in
``SFTConfig``: TRL's own collator joined two sequences of each row, and transformers made their mask. No record was left out for how it
agrees but those of jobs that are refused: selective checkpointing and soft caps, which are off by more.
"""

import json
import re
from pathlib import Path

import pytest

from memplan.errors import CannotAnswerError
from memplan.plan.assumptions import assumptions
from memplan.plan.components import components
from memplan.plan.planner import CompiledPlan
from memplan.solver.largest_value import largest_batch, longest_sequence
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned, stack_setup
from tests.survey.stacks.stack_records import catalog_at, read_records

_, RECORDS = read_records(Path(__file__).parent / "joined_rows.json")
FAST = (0, 1, 2, 3, 4, 9, 11, 12)
ADAMW = {"default": "adamw-fp32"}
PEAK_SHARE, INSTANT_SHARE = 1e-3, 1e-2


def changed(number: int, **keys: object) -> StackJob:
    """Return a recorded job with other keys of its training config."""
    data = json.loads(RECORDS[number].job)
    return StackJob.read(json.dumps({**data, "training": {**data["training"], **keys}}))


def follows(number: int) -> None:
    """Hold the plan of a record's job against its peak and instants."""
    record = RECORDS[number]
    plan = planned(StackJob.read(record.job), catalog_at(""))
    assert abs(plan.requested_bytes - record.peak_bytes) <= PEAK_SHARE * record.peak_bytes
    assert plan.persistent_bytes == record.persistent_bytes
    instants = dict(plan.instants)
    assert all(
        re.fullmatch(r"layer \d+ backward", name) for name in record.instants.keys() - instants.keys()
    )  # between others
    off = {
        name for name, size in record.instants.items() if abs(instants.get(name, size) - size) > INSTANT_SHARE * size
    }
    assert not off


@pytest.mark.parametrize("number", FAST)
def test_joined_rows_are_planned_as_trls_own_code_ran(number):
    follows(number)


@pytest.mark.thorough
@pytest.mark.parametrize("number", sorted(set(range(len(RECORDS))).difference(FAST)))
def test_all_recorded_jobs_of_joined_rows_are_planned_as_trls_own_code_ran(number):
    follows(number)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"stack": "transformers"}, "not modelled for transformers"),
        ({"stack": "trl@1.14"}, "not modelled for trl 1.14"),
        ({"kernels": {"attention": "flash"}}, "flash-attn is given no mask"),
        ({"kernels": {"attention": "efficient"}}, "use auto or eager"),
        ({"kernels": {"loss": "fp32"}}, "use fused-head"),
        ({"activation_checkpointing": "selective"}, "use full or none"),
        ({"method": {"stage": "dpo"}}, "joined_rows: rows joined to one are not modelled"),
        ({"compile": "layers"}, "compile"),
        (
            {
                "parallel": {"data": 2, "zero_stage": 2, "engine": "deepspeed"},
                "master_weights": "fp32",
                "optimizer": ADAMW,
            },
            "use torch or fsdp1",
        ),
        ({"parallel": {"data": 2, "context": 2}}, "context"),
    ],
)
def test_joined_rows_are_refused_where_they_were_not_traced(keys, said):
    with pytest.raises(CannotAnswerError, match=said):
        planned(changed(0, **keys), catalog_at(""))


@pytest.mark.parametrize(
    ("number", "rows", "traced"),
    [(0, None, 171_804_045), (0, 3, 310_381_997), (1, None, 461_805_038), (9, 3, 481_206_031)],
)
def test_joined_rows_are_evaluated_as_trls_own_code_ran(number, rows, traced):
    plan = planned(changed(number, evaluation=True, evaluation_batch_size=rows), catalog_at(""))
    assert dict(plan.instants)["evaluation"] == pytest.approx(traced, rel=1e-4)


def test_joined_rows_of_soft_caps_are_refused():
    data = json.loads(RECORDS[0].job)
    data["model"] |= {"model_type": "gemma2", "head_dim": 64, "tie_word_embeddings": True}
    with pytest.raises(CannotAnswerError, match=r"joined_rows: is modelled for .*, and not for gemma2"):
        planned(StackJob.read(json.dumps(data)), catalog_at(""))


@pytest.mark.parametrize("number", [0, 1])
def test_largest_values_follow_a_mask_that_grows_with_the_square_of_a_micro_batch(number):
    plan = CompiledPlan(*stack_setup(StackJob.read(RECORDS[number].job), catalog_at("")))
    most = 8 * 2**30
    batch, length = largest_batch(plan, 512, most).value, longest_sequence(plan, 4, most).value
    assert plan.requested_bytes(batch, 512) <= most < plan.requested_bytes(batch + 1, 512)
    assert plan.requested_bytes(4, length) <= most < plan.requested_bytes(4, length + 1)


def test_a_job_says_that_its_rows_are_joined():
    plan = planned(changed(0, micro_batch_size=3), catalog_at(""))
    line = next(one for one in components(plan) if one.name == "activations")
    assert line.values == {"b": 1, "t": 3 * 1024}
    assert any("joined to one of 3,072 tokens" in one for one in assumptions(plan))
