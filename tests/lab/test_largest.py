"""The largest model that is trained within so much memory: chosen by its plan, bytes as planned, loss falling."""

import json

import pytest
import torch
from jsonschema import Draft202012Validator

from memplan.errors import CannotAnswerError
from memplan.lab.training.optimizer_groups import with_momentum
from memplan.lab.training.run_bytes import MemoryLimit
from memplan.library.lookup import Overrides, find_device, find_setup
from memplan.library.runs.largest_trained import largest_candidate
from memplan.report.json_schemas import schema_of

SMALL = ("--layers", "1", "--hidden", "64", "--heads", "2", "--intermediate", "128", "--vocab", "256")
QUICK = ("--steps", "6", "--length", "64", "--batch", "4", "--threads", "1")


@pytest.fixture(autouse=True, scope="module")
def _threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_small_model_is_trained_and_its_bytes_are_the_planned_ones(cli, tmp_path):
    path = tmp_path / "record.json"
    ran = cli("lab", "largest", *SMALL, *QUICK, "--adamw-lr", "0.01", "--gpu-memory", "1GiB", "--out", str(path))
    assert ran.exit_code == 0, ran.err
    record = json.loads(path.read_text())
    Draft202012Validator(schema_of("evidence")).validate(record)
    assert all(size["predicted_bytes"] == size["measured_bytes"] for size in record["bytes"].values())
    assert record["memory"]["capacity_bytes"] == 2**30
    assert record["memory"]["requested"]["measured_bytes"] is None  # only an allocator counts it
    assert "on a CPU, not held to 1.00 GiB (planned: FITS); the loss fell, bytes are the planned ones." in ran.out


def test_a_loss_that_does_not_fall_is_exit_code_1(cli):
    ran = cli("lab", "largest", *SMALL, *QUICK, "--gpu-memory", "1GiB", "--lr", "0", "--adamw-lr", "0", "-q")
    assert ran.exit_code == 1
    assert ran.out.startswith("Not as planned")


def test_a_model_that_a_cpu_would_train_for_days_is_refused(cli):
    ran = cli("lab", "largest", "qwen3-14b")
    assert ran.exit_code == 3
    assert "too many to train on a CPU" in ran.err


@pytest.mark.parametrize(
    ("options", "message"), [(("-c", "no-such"), "unknown training config"), (("--set", "no=1"), "no")]
)
def test_what_no_model_can_be_trained_with_is_refused_for_its_own_reason(cli, options, message):
    ran = cli("lab", "largest", *options)
    assert ran.exit_code == 2
    assert message in ran.err


def test_a_run_that_is_out_of_memory_says_what_was_planned(cli, monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("memplan.lab.training.loop.Trainer", out_of_memory)
    ran = cli("lab", "largest", *SMALL, *QUICK, "--gpu-memory", "1GiB")
    assert ran.exit_code == 3
    assert "out of memory in a run planned as FITS: CUDA out of memory." in ran.err


def test_momentum_of_another_format_keeps_the_blocks_of_its_config(catalog):
    setup = with_momentum(find_setup("q6-muon-ternary", Overrides(), catalog), "int8")
    slot = setup.optimizers["hidden_matrix"].slots[0]
    assert (slot.block_elements, slot.block_bytes) == (256, 258)  # codes of a byte, and a bf16 scale


def test_the_largest_of_the_catalog_is_planned_to_fit(catalog):
    device = find_device(None, "3GiB", 1, catalog)
    overrides = Overrides(1, 512, None, ("activation_checkpointing=full", "kernels.loss=chunked"))
    names = ("gpt2-xl", "llama-3.2-1b", "smollm3-3b")
    found = largest_candidate(names, "q6-muon-ternary", overrides, device, catalog)
    assert (found.plan.verdict, found.model.source) == ("fits", "catalog:gpt2-xl")
    with pytest.raises(CannotAnswerError, match="no model of the catalog fits"):
        largest_candidate(names, "fp32-adamw", overrides, device, catalog)


def test_a_process_is_held_to_what_the_context_leaves(monkeypatch):
    """Without a GPU: what the allocator is told, with a context of 500 MB and 24 GiB of an 80 GiB card."""
    told = []
    for name, answer in (("used_bytes", lambda: 0), ("context_bytes", lambda _: 500_000_000)):
        monkeypatch.setattr(f"memplan.lab.training.run_bytes.{name}", answer)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", told.append)
    MemoryLimit("cuda", 24 * 2**30).begin()
    assert told == [(24 * 2**30 - 500_000_000) / (80 * 2**30)]
    MemoryLimit("cpu", 24 * 2**30).begin()
    assert len(told) == 1
