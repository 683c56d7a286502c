"""A job made once gives the plans that asking anew gives, for any batch, length and GPU."""

import random
import time

import pytest

import memplan

GPUS = ("rtx4090", "h100-sxm-80gb", "mi300x")


@pytest.mark.parametrize("config", ["qlora", "bf16-adamw", "tier3"])
def test_a_job_gives_the_plan_that_asking_anew_gives(config):
    job = memplan.job("llama-3.2-1b", config=config)
    draw = random.Random(14)
    for gpu in GPUS:
        batch, length = draw.randint(1, 40), draw.randint(1, 6000)
        plan = job.plan(gpu, micro_batch_size=batch, sequence_length=length, simulated=True)
        again = memplan.plan("llama-3.2-1b", gpu=gpu, config=config, micro_batch_size=batch, sequence_length=length)
        assert plan.to_dict() == again.to_dict()


def test_a_job_starts_from_its_own_batch_and_length():
    job = memplan.job("gpt2", config="lora", micro_batch_size=3, sequence_length=100)
    plan = job.plan("rtx4090")
    assert (plan.training["micro_batch_size"], plan.training["sequence_length"]) == (3, 100)
    assert job.plan(plan.memory.device).expected_bytes == plan.expected_bytes


@pytest.mark.parametrize(
    "numbers",
    [
        {"micro_batch_size": 0},
        {"sequence_length": 0},
        {"sequence_length": 2**30 + 1},
        {"micro_batch_size": 2**24, "sequence_length": 2**30},
        {"sequence_length": 1025},  # GPT-2 has learned positions
        {"micro_batch_size": 1.5},
    ],
)
def test_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(memplan.InvalidFileError):
        memplan.job("gpt2").plan("rtx4090", **numbers)


def test_an_unknown_gpu_is_refused():
    with pytest.raises(memplan.UnknownNameError, match="did you mean"):
        memplan.job("gpt2").plan("rtx4009")


def test_a_thousand_plans_take_no_second():
    job = memplan.job("llama-3.1-8b", config="qlora")
    job.plan("rtx4090", micro_batch_size=1, sequence_length=512)
    start = time.process_time()
    verdicts = {
        job.plan("rtx4090", micro_batch_size=batch, sequence_length=64 * step).verdict
        for batch in range(1, 41)
        for step in range(1, 26)
    }
    assert verdicts == {"fits", "tight", "no"}
    assert time.process_time() - start < 1  # a tenth of it on a quiet core; tests/benchmarks/bench_library.py measures
