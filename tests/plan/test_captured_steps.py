"""Steps that a stack captures as a CUDA graph: gradients stay from step to step, and the update's scratch is apart."""

import pytest

from memplan.library.answers.planned_job import plan_by_share
from memplan.plan.suggested.config_changes import changes
from memplan.report.screens.plan_screen import CHANGE_WORDS


def plan(**options):
    given = {"gpu": "h100", "config": "bf16-adamw", "stack": "torchtitan", "micro_batch_size": 1, **options}
    return plan_by_share("llama-3.1-8b", **given)


def test_torchtitan_keeps_gradients_from_step_to_step_unless_it_is_told_to_capture_nothing():
    captured = plan(set={"kernels.loss": "fp32"}).memory
    eager = plan(set={"kernels.loss": "fp32", "zero_gradients": "free"}).memory
    assert captured.setup.captures_step
    assert not eager.setup.captures_step
    before, after = dict(eager.instants), dict(captured.instants)
    assert after["forward"] - before["forward"] == captured.states.gradient_bytes
    assert after["optimizer step"] == before["optimizer step"]


@pytest.mark.parametrize(
    "options",
    [
        {"stack": "torchtitan@0.2.2"},
        {"set": {"parallel.pipeline": 2, "parallel.micro_batches": 4}, "gpus": 2},
        {"stack": "torchtune"},
    ],
)
def test_what_captures_nothing_drops_gradients(options):
    assert plan(**options).memory.setup.config.zero_gradients == "free"


@pytest.mark.parametrize("loss", ["fp32", "chunked-backward"])
@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
def test_the_captured_step_and_scratch_of_the_update_are_reserved_apart(loss, optimizer):
    captured = plan(set={"kernels.optimizer": optimizer, "kernels.loss": loss}).memory
    behind = {"optimizer step", "gradient clipping"}
    scratch = max(size for name, size in captured.instants if name in behind) - captured.persistent_bytes
    within = max(size for name, size in captured.instants if name not in behind)
    assert captured.requested_bytes + captured.apart_bytes == within + scratch - captured.buffer_bytes
    assert (captured.apart_bytes > 2**30) == (optimizer == "foreach")
    assert sum(component.bytes for component in captured.components) == captured.device_bytes


def test_every_change_has_words():
    jobs = [
        plan(),
        plan(gpus=2, set={"parallel.zero_stage": 3}),
        plan_by_share("qwen3-8b", gpu="h100", config="qlora", stack="unsloth"),
    ]
    for job in jobs:
        for change in changes(job.memory.setup.config, job.memory.setup):
            assert CHANGE_WORDS.keys() & {key for key, _ in change.settings}, change
