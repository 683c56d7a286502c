"""What ``memplan check`` writes: the same bytes twice, by its schema, and nowhere but where it was asked to."""

import os
import subprocess
import sys

import jsonschema
import pytest

from tests.jobs import follow_schema

from .examples import TEN_JOBS


@pytest.mark.parametrize("form", ["table", "plain", "json", "csv", "md", "github", "gitlab", "junit", "sarif"])
def test_two_runs_are_equal_byte_for_byte_in_every_format(cli, ten_jobs, tmp_path, form):
    ran = cli("check", "--format", form)
    assert (ran.exit_code, ran.err) == (1, "")
    cli("check", "--format", form, "-o", tmp_path / "answer")
    assert (tmp_path / "answer").read_text(encoding="utf-8") == ran.out != ""


def test_two_processes_are_equal_byte_for_byte(budget):
    lines = TEN_JOBS.splitlines(keepends=True)
    budget("".join(lines[:3] + lines[-4:]))  # those of small models

    def run(seed: str) -> bytes:
        command = [sys.executable, "-c", "from memplan.cli.main import run; run()", "check", "--json"]
        return subprocess.run(
            command, capture_output=True, timeout=60, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout

    assert run("1") == run("2") != b""


def test_json_follows_its_schema(cli, ten_jobs, write):
    schema = cli("schema", "check").data
    follow_schema(cli("check", "--json").data, schema)
    write("my.yaml", "description: sharded\nparallel: {tensor: 2}\n")
    write("b.yaml", "version: 1\nbudgets: [{name: a, model: gpt2, config: my.yaml, gpu: t4}]\n")
    follow_schema(cli("check", "b.yaml", "--json").data, schema)


def test_the_budget_has_a_schema(cli, ten_jobs):
    import yaml

    schema = cli("schema", "budget").data
    follow_schema(yaml.safe_load(ten_jobs.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        follow_schema({"version": 1, "budgets": [{"name": "a", "limits": "1 GiB"}]}, schema)


def test_a_check_writes_nothing_that_was_not_asked_for(cli, ten_jobs, folder, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(folder / "summary"))
    for form in ("table", "md", "github", "json"):
        cli("check", "--format", form)
    assert [path.name for path in folder.iterdir()] == ["memplan-budget.yaml"]


def test_a_summary_is_appended_where_it_is_asked_for(cli, ten_jobs, folder, monkeypatch):
    summary = folder / "summary"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    ran = cli("check", "--summary", "-q")
    assert ran.exit_code == 1
    assert summary.read_text() == "before\n" + cli("check", "--format", "md").out


def test_a_summary_without_its_file_is_refused(refused, ten_jobs):
    assert "GITHUB_STEP_SUMMARY is not set" in refused("check", "--summary")


def test_a_budget_may_come_from_standard_input(cli, folder):
    text = b"version: 1\nbudgets: [{name: a, model: gpt2, config: lora, gpu: t4}]\n"
    assert cli("check", "-", stdin=text).exit_code == 0


def test_equal_figures_whatever_the_order_of_jobs(cli, write, folder):
    jobs = ["{name: a, model: gpt2, config: lora, gpu: t4}", "{name: b, model: gpt2, config: lora, gpu: t4}"]
    for name, order in (("x.yaml", jobs), ("y.yaml", jobs[::-1])):
        write(name, f"version: 1\nbudgets: [{', '.join(order)}]\n")
    assert cli("check", "x.yaml").out == cli("check", "y.yaml").out
