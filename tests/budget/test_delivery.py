"""The Action, the pre-commit hook, ``assert_fits`` and the project's own budget, each as people use it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from memplan.errors import InvalidFileError, UnknownNameError
from memplan.testing import assert_fits

from .examples import TEN_JOBS

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]
SHIPPED = ("memplan", "configs", "gpu_catalog.yaml", "pyproject.toml", "README.md", "LICENSE", "action.yml")


# ------------------------------------------------------------------ the Action
def expression(text: str, inputs: dict[str, str], action: Path) -> str:
    """Return a value of ``env`` as GitHub would fill it in; only these two kinds are used."""
    filled = re.sub(r"\$\{\{ inputs\.([a-z]+) \}\}", lambda match: inputs[match[1]], str(text))
    return filled.replace("${{ github.action_path }}", str(action))


class Runner:
    """Runs the steps of the Action as a GitHub runner does, in one workspace."""

    def __init__(self, folder: Path) -> None:
        self.temp, self.workspace, self.action = folder / "temp", folder / "workspace", folder / "action"
        for path in (self.temp, self.workspace, self.action):
            path.mkdir()
        for name in SHIPPED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__", "data")
            shutil.copytree(source, self.action / name, ignore=ignored) if source.is_dir() else shutil.copy(
                source, self.action
            )
        self.output, self.summary = folder / "output", folder / "summary"

    def step(self, index: int, **inputs: str) -> subprocess.CompletedProcess[str]:
        step = STEPS[index]
        given = {name: entry.get("default", "") for name, entry in ACTION["inputs"].items()} | inputs
        environment = {name: expression(text, given, self.action) for name, text in step["env"].items()}
        kept = {
            k: v
            for k, v in os.environ.items()
            if k.startswith(("PIP_", "SSL_", "HTTP", "http", "REQUESTS_")) or k in ("PATH", "HOME", "LANG")
        }
        for path in (self.output, self.summary):
            path.write_text("")
        runner = {"RUNNER_TEMP": self.temp, "GITHUB_OUTPUT": self.output, "GITHUB_STEP_SUMMARY": self.summary}
        script = self.temp / "step.sh"
        script.write_text(step["run"])
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.workspace, env={**kept, **{k: str(v) for k, v in runner.items()}, **environment},
            capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def outputs(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.output.read_text().splitlines())


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Runner:
    """A runner that has this interpreter's packages in place of an installed memplan."""
    made = Runner(tmp_path_factory.mktemp("runner"))
    program = made.temp / "memplan-venv" / "bin" / "memplan"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from memplan.cli.main import run; run()" "$@"\n')
    program.chmod(0o755)
    lines = TEN_JOBS.splitlines(keepends=True)
    jobs = "".join(lines[:3] + lines[8:12])  # two, since a step starts three processes that plan them all
    fine = jobs.replace("mixed-adamw\n", "lora\n", 1)
    (made.workspace / "over.yaml").write_text(jobs)
    (made.workspace / "fine.yaml").write_text(fine)
    (made.workspace / "typo.yaml").write_text(jobs.replace("config: fp32-adamw", "config: fp32-adamv"))
    (made.workspace / "unknown.yaml").write_text(fine.replace("fp32-adamw", "fp32-adamw, max_increase: 1%"))
    return made


def test_every_step_is_a_script_that_takes_inputs_from_its_environment():
    assert ACTION["runs"]["using"] == "composite"
    for step in STEPS:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]
        subprocess.run(["bash", "-n", "-c", step["run"]], check=True)
    assert set(ACTION["outputs"]) == {"verdict", "json", "markdown"}


@pytest.mark.parametrize(
    ("budget", "code", "verdict", "summary"),
    [
        ("fine.yaml", 0, "within", "false"),
        ("over.yaml", 1, "over", "true"),
        ("typo.yaml", 2, "invalid", "true"),
        ("unknown.yaml", 3, "cannot", "true"),
    ],
)
def test_the_check_step_passes_on_the_exit_code_and_says_why(runner, budget, code, verdict, summary):
    ran = runner.step(1, budget=budget, summary=summary)
    assert ran.returncode == code, ran.stderr
    outputs = runner.outputs()
    assert outputs["verdict"] == verdict
    if code == 2:
        assert set(outputs) == {"verdict"}
        assert "did you mean 'fp32-adamw'?" in ran.stderr
        return
    assert ("::error file=" in ran.stdout) == (code != 0)
    assert json.loads(Path(outputs["json"]).read_text())["exit_code"] == code
    text = Path(outputs["markdown"]).read_text()
    assert text.startswith("<!-- memplan:check -->")
    assert runner.summary.read_text() == (text if summary == "true" else "")


def test_a_baseline_may_be_given(runner):
    ran = runner.step(1, budget="unknown.yaml", baseline="gone.json")
    assert (ran.returncode, "gone.json: no such file" in ran.stderr) == (2, True)


@pytest.mark.slow
def test_the_steps_run_as_written_in_a_fresh_environment_without_torch(tmp_path):
    """Installs memplan from the Action's own folder; pip needs its index for that."""
    runner = Runner(tmp_path)
    (runner.workspace / "memplan-budget.yaml").write_text(TEN_JOBS)
    installed = runner.step(0, python=sys.executable)
    assert installed.returncode == 0, installed.stderr
    python = runner.temp / "memplan-venv" / "bin" / "python"
    absent = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, cwd=tmp_path)
    assert "ModuleNotFoundError" in absent.stderr
    ran = runner.step(1)
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout.startswith("::error file=memplan-budget.yaml,line=9::full on h100-sxm-80gb needs ")
    assert runner.outputs()["verdict"] == "over"
    assert "OVER" in runner.summary.read_text()
    assert [path.name for path in runner.workspace.iterdir()] == ["memplan-budget.yaml"]


# ------------------------------------------------------------------ the hook
def test_the_hook_runs_a_check_without_file_names(cli, ten_jobs):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("memplan-check", "python", False)
    program, *arguments = hook["entry"].split()
    assert program == "memplan"
    assert cli(*arguments).exit_code == 1
    for name, wanted in {
        "memplan-budget.yaml": True,
        "configs/a.yml": True,
        "model/config.json": True,
        "a.py": False,
    }.items():
        assert bool(re.search(hook["files"], name)) == wanted


# ------------------------------------------------------------------ assert_fits
def test_a_job_that_fits_gives_its_plan():
    plan = assert_fits("llama-8b", config="lora", gpu="h100", limit="70 GiB", components={"logits": "10 GiB"})
    assert (plan.verdict, plan.device.name) == ("fits", "h100-sxm-80gb")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gpu": "rtx4090"}, "usable on rtx4090"),
        ({"gpu": "rtx4090", "limit": "500 GiB"}, "over the 23.65 GiB usable on rtx4090"),
        ({"limit": "10 GiB"}, "over its limit of 10.00 GiB"),
        ({"components": {"weights": "1 GiB"}}, "weights: 14.96 GiB, 13.96 GiB over its limit of 1.00 GiB"),
    ],
)
def test_a_job_that_does_not_fit_fails_with_every_component(keys, said):
    asked = {"config": "bf16-adamw", "gpu": "b300-sxm-288gb"} | keys
    with pytest.raises(AssertionError, match=re.escape(said)) as failed:
        assert_fits("llama-8b", **asked)
    assert "\n  optimizer_states: 29.92 GiB" in str(failed.value)


def test_settings_replace_keys_of_the_config():
    more = assert_fits("gpt2", config="lora", gpu="t4", settings={"micro_batch_size": 4, "kernels.optimizer": "fused"})
    assert more.micro_batch_size == 4
    assert more.device_bytes > assert_fits("gpt2", config="lora", gpu="t4").device_bytes


def test_mistakes_are_no_assertion_errors():
    with pytest.raises(UnknownNameError, match="did you mean 'rtx4090'"):
        assert_fits("gpt2", config="lora", gpu="rtx490")
    with pytest.raises(InvalidFileError, match="unknown component 'weigts'; did you mean 'weights'"):
        assert_fits("gpt2", config="lora", gpu="t4", components={"weigts": "1 GiB"})
    with pytest.raises(InvalidFileError, match="is not a size"):
        assert_fits("gpt2", config="lora", gpu="t4", limit="12")


# ------------------------------------------------------------------ our own budget
def test_our_own_jobs_are_within_their_budget(cli):
    ran = cli("check", ROOT / "memplan-budget.yaml")
    assert ran.exit_code == 0, f"{ran.out}\nto accept new figures: memplan check --update-baseline"


def test_our_own_baseline_has_every_job(cli):
    rows = cli("check", ROOT / "memplan-budget.yaml", "--json").data["rows"]
    assert all("baseline" in row for row in rows)
    assert len(rows) == len(json.loads((ROOT / "memplan-baseline.json").read_text())["rows"])


def test_nothing_of_a_check_imports_torch(one):
    one()
    code = "import sys; sys.argv = ['memplan', 'check']\ntry:\n    from memplan.cli.main import run; run()\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
