"""PEFT's own comparison of methods: one length of the longest row, which is not published, explains what all of them held."""

from pathlib import Path

import pytest

import memplan
from memplan.plan.reserve.simulation import at_a_glance
from tests.jobs import yaml_data

DATA = yaml_data(Path(__file__).with_name("peft_runs.yaml"))
RUNS = DATA["runs"]
LOOP = {"activation_checkpointing": "none", "clip_gradients": True, "adapter.dtype": "fp32", "adapter.dropout": 0.0}


def longest_row(run: dict) -> int:
    """Return the fewest tokens of four rows with which a plan holds what a run held."""
    setting = {"adapter.targets": ["q_proj", "v_proj"], **LOOP, **run["set"]}
    rows, most = DATA["rows"]["micro_batch_size"], DATA["rows"]["at_most"]
    job = memplan.job("llama-3.2-3b", config="lora", stack=run["stack"], micro_batch_size=rows, set=setting)

    def reserved(length: int) -> int:
        return at_a_glance(job.plan("l40s", sequence_length=length).memory).reserved_bytes

    return next(length for length in range(600, most, 8) if reserved(length) >= run["reserved"])


@pytest.mark.thorough
def test_one_longest_row_explains_what_every_run_held():
    lengths = {name: longest_row(run) for name, run in RUNS.items()}
    assert max(lengths.values()) <= 1.04 * min(lengths.values()), lengths
    full = {name: {**run, "set": {**run["set"], "padded_rows": False}} for name, run in RUNS.items()}
    without = {name: longest_row(run) for name, run in full.items()}
    assert max(without.values()) >= 1.06 * min(without.values()), without  # rows that are padded have a mask since 4.53
