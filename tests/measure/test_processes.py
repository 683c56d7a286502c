"""Several processes that divide a model: each takes what the formula and its own trace say, and none is left."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.measure.measure_ranks import RankTask
from memplan.measure.measured import Measurement
from memplan.measure.process import measure_together
from memplan.measure.records.comparison_rows import rows_of_ranks
from memplan.measure.records.measurement_plans import cpu_task
from memplan.measure.records.prediction import predict
from memplan.measure.task import Scale, Task, scaled_model
from tests.measure.test_command import run
from tests.measure.test_process import ENDINGS, alive

TINY = Scale(layers=2, hidden=64, vocab=4096)
"""Whose largest tensors are logits: CUDA's backward of attention, which the formula has, takes more than the CPU's."""


def divided(config: str, ranks: int, catalog, **keys) -> Task:
    """A tiny Llama under a shipped config, divided among so many processes."""
    task = cpu_task("llama-3.2-1b", config, catalog, parallel=Parallel(data=ranks, zero_stage=3), **keys)
    return Task(task.name, TINY, scaled_model(task.name, TINY, catalog), task.setup, steps=2)


def measured(task: Task, folder: Path) -> list[Measurement]:
    ranks = task.setup.config.parallel.shards
    return measure_together([RankTask(task, rank, str(folder / "meeting")) for rank in range(ranks)], lambda _: None)


@pytest.mark.parametrize(
    ("config", "ranks", "keys"),
    [
        pytest.param("muon", 2, {}, marks=pytest.mark.slow),
        pytest.param("bf16-adamw", 2, {}, marks=pytest.mark.slow),
        pytest.param("fp32-adamw", 2, {"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param("mixed-adamw", 2, {"activation_checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param("muon", 3, {}, marks=pytest.mark.thorough, id="muon, uneven shards"),
        pytest.param("muon", 4, {"clip_gradients": True}, marks=pytest.mark.slow),
        pytest.param("muon", 8, {}, marks=pytest.mark.slow),
    ],
)
def test_each_process_takes_what_is_planned_and_traced(config, ranks, keys, catalog, tmp_path):
    task = divided(config, ranks, catalog, **keys)
    found = measured(task, tmp_path)
    assert [one.status for one in found] == ["measured"] * ranks, found[0].reason
    rows = rows_of_ranks(task, [predict(task, one, rank) for rank, one in enumerate(found)], found)
    assert not [row for row in rows if not row.agrees]
    names = {row.component.split(", ")[0] for row in rows}
    assert {"weights", "gradients", "optimizer_states", "requested", "instant: optimizer step"} <= names


MODULE = """
import os, pickle, sys, time
task = pickle.load(sys.stdin.buffer)
open(os.path.join(task.pids, str(os.getpid())), "w").close()
while len(os.listdir(task.pids)) < 2:
    time.sleep(0.01)
exec(task.ending)
"""


@pytest.mark.parametrize("status", ENDINGS)
def test_none_is_left_when_one_ends(status, tmp_path, monkeypatch):
    (tmp_path / "ending.py").write_text(MODULE)
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    endings = [ENDINGS["hung"], ENDINGS[status]]
    tasks = [SimpleNamespace(alloc_conf="", pids=str(pids), ending=ending) for ending in endings]
    found = measure_together(tasks, lambda _: None, 5 if status == "hung" else 60, "ending")
    assert [one.status for one in found] == [status]
    assert {"hung": "no progress", "killed": "SIGKILL", "failed": "no such kernel"}[status] in found[0].reason
    begun = [int(path.name) for path in pids.iterdir()]
    assert len(begun) == 2
    assert not any(map(alive, begun))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--config", "tier1"], CannotAnswerError, "gradients of codes are not reduced"),
        (["--config", "lora"], CannotAnswerError, "adapters are not supported with zero_stage 3"),
        (["--config", "muon", "--set", "parallel.zero_stage=0"], CannotAnswerError, "divides the model by fully_shard"),
        (["--config", "muon", "--set", "parallel.data=4"], CannotAnswerError, "among that many processes alone"),
        (["--config", "muon", "--record", "r.json"], InvalidFileError, "cannot be combined with --record"),
        (["--config", "muon", "--device", "cuda"], InvalidFileError, "runs on the CPU"),
        (["--plan"], InvalidFileError, "cannot be combined with --plan"),
    ],
)
def test_what_several_processes_do_not_run_is_refused_in_one_line(arguments, error, message):
    refused = run("validate", "--processes", "2", *arguments).exception
    assert isinstance(refused, error)
    assert message in str(refused)
    assert "\n" not in str(refused)
