"""What becomes of Adam's second moment in few bits: the levels, the record, and the command."""

import json

import pytest
import torch

from memplan.catalog.catalog import data_directory
from memplan.lab.learning.adam_bits import (
    BLOCK,
    QUANTISERS,
    linear_with_zero,
    linear_without_zero,
    logarithmic,
    notes_logarithmic,
    stored,
)

RECORD = data_directory() / "configs" / "evidence" / "lab-adam-bits.json"


@pytest.fixture
def moments():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, BLOCK, generator=generator).mul(4).exp().mul(1e-9)


@pytest.mark.parametrize("name", QUANTISERS)
def test_a_block_holds_no_more_levels_than_its_bits_have(moments, name):
    quantiser = QUANTISERS[name]
    rows = quantiser.rounded(moments.clone(), quantiser.bits)
    assert all(len(row.unique()) <= 2**quantiser.bits for row in rows)


def test_only_the_linear_code_with_zero_makes_zeros(moments):
    assert (linear_with_zero(moments.clone(), 4) == 0).any()
    for rounded in (linear_without_zero, logarithmic):
        assert (rounded(moments.clone(), 4) > 0).all()


def test_logarithmic_levels_keep_both_ends_and_stay_within_half_a_step(moments):
    found, bits = logarithmic(moments.clone(), 4), 4
    logs, kept = moments.log(), found.log()
    assert torch.allclose(logs.amin(1), kept.amin(1), atol=1e-3)
    assert torch.allclose(logs.amax(1), kept.amax(1), atol=1e-3)
    step = (logs.amax(1, keepdim=True) - logs.amin(1, keepdim=True)) / (2**bits - 1)
    assert ((logs - kept).abs() <= step / 2 + 1e-3).all()


def test_the_notes_kernel_cuts_off_by_up_to_eleven_nats(moments):
    lost = (moments.clamp_min(1e-38).log() - notes_logarithmic(moments.clone(), 3).log()).clamp_min(0)
    assert 8 < float(lost.max()) < 80 / 7 + 0.1


@pytest.mark.parametrize("shape", [(3, BLOCK), (5, 7), (130, 3)])
def test_the_shape_stays_and_the_last_block_may_be_short(shape):
    moment = torch.rand(shape) + 1e-6
    found = stored(moment, QUANTISERS["log-4"])
    assert found.shape == moment.shape
    assert (found > 0).all()


def test_the_record_shows_zero_to_be_what_breaks_it():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = {row["second_moment"]: row for row in record["rows"]}
    assert len(record["seeds"]) >= 3
    assert rows["linear-4"]["loss"] is None
    assert rows["notes-log-3"]["loss"] is None
    for name in ("linear-4-no-zero", "log-4", "log-3", "log-2"):
        assert rows[name]["gap_percent"]["mean"] < 6


def test_the_command_runs_and_draws(cli, tmp_path):
    out, plot = tmp_path / "adam.json", tmp_path / "adam.svg"
    small = ("--steps", 2, "--layers", 1, "--hidden", 32, "--intermediate", 64, "--batch", 2, "--length", 16)
    ran = cli(
        "lab", "adam-bits", *small, "--seed", 0, "--moment", "log-3", "--threads", 1, "--out", out, "--plot", plot, "-q"
    )
    assert ran.exit_code == 0
    assert [row["second_moment"] for row in json.loads(out.read_text())["rows"]] == ["fp32", "log-3"]
    assert plot.read_text().startswith("<?xml")


def test_an_unknown_quantiser_gets_the_nearest(refused):
    assert "did you mean 'log-3'" in refused("lab", "adam-bits", "--moment", "log3")
