"""Baselines: the same bytes for the same figures, and whole at every moment."""

import json
import os
import resource
import sys
from pathlib import Path

import pytest

from tests.jobs import follow_schema

MATRIX = """\
version: 1
budgets:
  - {name: b, model: gpt2, config: my.yaml, gpus: [t4, rtx4090], max_increase: 3%}
  - {name: a, model: llama-8b, config: lora, gpu: h100, max_increase: 1 MiB}
"""
CONFIG = "description: mine\nmicro_batch_size: {}\nsequence_length: 512\n"


@pytest.fixture
def project(budget, write, folder) -> Path:
    """A budget with a baseline beside it."""
    write("my.yaml", CONFIG.format(2))
    budget(MATRIX)
    return folder


@pytest.fixture
def kept(project, cli) -> Path:
    assert cli("check", "--update-baseline").exit_code == 0
    return project / "memplan-baseline.json"


# ------------------------------------------------------------------ what it holds
def test_it_is_the_same_for_the_same_figures(cli, kept):
    first = kept.read_bytes()
    assert cli("check", "--update-baseline").exit_code == 0
    assert kept.read_bytes() == first
    follow_schema(json.loads(first), cli("schema", "baseline").data)


def test_it_holds_hashes_versions_and_components(cli, kept):
    import memplan

    data = json.loads(kept.read_text())
    assert (data["schema"], data["memplan_version"]) == ("memplan/baseline/1", memplan.__version__)
    assert data["catalog_hash"] == cli("check", "--json").data["catalog_hash"]
    assert [(row["name"], row["gpu"]) for row in data["rows"]] == [
        ("a", "h100-sxm-80gb"),
        ("b", "rtx4090"),
        ("b", "t4"),
    ]
    for row in data["rows"]:
        assert sum(row["components"].values()) == row["device_bytes"]
        assert len(row["inputs"]) == len(row["asked"]) == 64


def test_it_is_written_only_when_asked_for_and_says_so(cli, project):
    cli("check")
    assert not (project / "memplan-baseline.json").exists()
    assert cli("check", "--update-baseline").err == "memplan: baseline written: memplan-baseline.json\n"


def test_the_budget_or_the_command_line_may_name_it(cli, project):
    (project / "sub").mkdir()
    (project / "memplan-budget.yaml").write_text(MATRIX + "baseline: sub/base.json\n")
    assert cli("check", "--update-baseline").exit_code == 0
    assert cli("check").exit_code == 0
    assert cli("check", "--update-baseline", "--baseline", "other.json").exit_code == 0
    assert (project / "other.json").read_bytes() == (project / "sub" / "base.json").read_bytes()


def test_it_is_not_written_when_a_job_is_not_modelled(cli, kept, write):
    before = kept.read_bytes()
    write("my.yaml", "description: sharded\nparallel: {tensor: 2}\n")
    ran = cli("check", "--update-baseline")
    assert (ran.exit_code, ran.out, kept.read_bytes()) == (3, "", before)
    assert "baseline not written: b on t4: " in ran.err


# ------------------------------------------------------------------ growth
def test_growth_beyond_what_is_allowed_fails(cli, kept, write):
    assert cli("check").exit_code == 0
    write("my.yaml", CONFIG.format(4))
    ran = cli("check", "--json")
    assert ran.exit_code == 1
    (finding,) = ran.data["rows"][0]["findings"]
    assert finding["rule"] == "increase"
    assert "where 3% are allowed" in finding["message"]
    assert "grown most: " in finding["message"]


def test_growth_is_measured_to_the_byte(cli, kept):
    data = json.loads(kept.read_text())
    row = next(row for row in data["rows"] if row["name"] == "a")
    now = row["device_bytes"]
    for before, code in ((now - 2**20, 0), (now - 2**20 - 1, 1)):
        row["device_bytes"] = before
        kept.write_text(json.dumps(data))
        assert cli("check").exit_code == code


def test_a_job_without_an_entry_is_never_a_success(cli, kept):
    data = json.loads(kept.read_text())
    data["rows"] = [row for row in data["rows"] if row["gpu"] != "t4"]
    kept.write_text(json.dumps(data))
    ran = cli("check")
    assert ran.exit_code == 3
    assert "the baseline has no 'b' on t4" in ran.out


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "{", '{"schema": "memplan/baseline/2", "rows": []}', '{"schema": "memplan/baseline/1"}']
)
def test_a_broken_baseline_is_bad_input(cli, kept, text):
    kept.write_text(text)
    ran = cli("check")
    assert (ran.exit_code, ran.out) == (2, "")
    assert "memplan-baseline.json" in ran.err


# ------------------------------------------------------------------ whole at every moment
def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".tmp")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_leaves_the_old_file(cli, kept):
    before = kept.read_bytes()
    kept.parent.chmod(0o500)
    try:
        ran = cli("check", "--update-baseline")
    finally:
        kept.parent.chmod(0o700)
    assert (ran.exit_code, kept.read_bytes()) == (2, before)


@pytest.mark.parametrize("place", ["gone/base.json", "my.yaml/base.json", "."])
def test_a_place_that_cannot_be_written_is_one_line(cli, kept, place):
    before = kept.read_bytes()
    ran = cli("check", "--update-baseline", "--baseline", place)
    assert (ran.exit_code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
    assert "cannot be written" in ran.err
    assert kept.read_bytes() == before
    assert left_behind(kept.parent) == []


@pytest.mark.parametrize("most", [0, 1, 100, 1000])
def test_a_disk_that_fills_up_leaves_the_old_file(cli, kept, most, monkeypatch):
    """A limit on the size of files makes writing fail at that byte, as a full disk does."""
    before, limits = kept.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    assert len(before) > most
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # what is imported meanwhile would be cut off
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        ran = cli("check", "--update-baseline")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (ran.exit_code, ran.out) == (2, "")
    assert "memplan-baseline.json: cannot be written: File too large" in ran.err
    assert kept.read_bytes() == before
    assert left_behind(kept.parent) == []
