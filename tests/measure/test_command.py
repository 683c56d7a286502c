"""``memplan validate`` as a command: records, profiles, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memplan.cli.main import make_app
from memplan.errors import CannotAnswerError, InvalidFileError

SAMPLE = "cpu-llama-3.2-1b-small-fp32-adamw-b2-s128.json"
PROFILE = {
    "schema": "memplan/profile/1",
    "device": "a card",
    "torch_version": "2.13.0",
    "library_bytes": 1000,
    "context_bytes": 2000,
    "upper_context_bytes": 3000,
}


def run(*arguments: str):
    return CliRunner().invoke(make_app(["validate", "explain"]), list(arguments))


def cuda_record(source: Path, target: Path) -> None:
    data = json.loads(source.read_text())
    data["task"]["device_kind"] = "cuda"
    data["measurement"] |= {"device": "a card", "torch_version": "2.13.0"}
    data["measurement"]["counters"] = {"context_bytes": 2000, "cublas_workspace_bytes": 500}
    target.write_text(json.dumps(data))


def test_replay_prints_errors_by_component_and_says_that_all_agree(record_folder):
    result = run("validate", "--replay", str(record_folder / "cpu" / SAMPLE), "--json", "-q")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["agrees"]
    exact = {entry["component"]: entry["worst_error"] for entry in data["components"]}
    assert exact["weights"] == exact["gradients"] == exact["optimizer_states"] == "0.0000 %"


def test_replay_of_a_changed_record_exits_with_1_and_names_it(record_folder, tmp_path):
    data = json.loads((record_folder / "cpu" / SAMPLE).read_text())
    data["measurement"]["components"]["weights"] += 1
    (tmp_path / "changed.json").write_text(json.dumps(data))
    result = run("validate", "--replay", str(tmp_path), "-q", "--format", "plain")
    assert result.exit_code == 1
    assert "DISAGREES" in result.stdout


def test_a_plan_runs_nothing_that_is_recorded(record_folder, tmp_path, monkeypatch):
    folder = tmp_path / "records"
    shutil.copytree(record_folder / "cpu", folder)
    monkeypatch.setattr("memplan.measure.process.measure", None)
    monkeypatch.setattr("memplan.library.validation_runs._replayed", lambda *_: None)
    result = run("validate", "--plan", "--device", "cpu", "--record", str(folder))
    assert result.stderr.count("is recorded") == len(list(folder.glob("*.json")))


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"context_bytes": 4000}, "upper_context_bytes: expected at least context_bytes"),
        ({"library_bytes": 10**17}, "library_bytes: expected whole bytes, at most 4 TiB, got 100000000000000000"),
    ],
)
def test_a_profile_whose_figures_are_no_cards_is_refused(tmp_path, figures, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE, **figures}), encoding="utf-8")
    refused = run("explain", "gpt2", "--config", "bf16-adamw", "--gpu", "h100", "--profile", str(path)).exception
    assert isinstance(refused, InvalidFileError)
    assert message in str(refused)


def test_calibration_is_a_profile_that_plans_take_and_name(record_folder, tmp_path):
    cuda_record(record_folder / "cpu" / SAMPLE, tmp_path / "record.json")
    profile = tmp_path / "profile.json"
    assert run("validate", "--calibrate", str(tmp_path / "record.json"), "--json", "-o", str(profile)).exit_code == 0
    shown = run("explain", "gpt2", "--config", "bf16-adamw", "--gpu", "rtx4090", "--profile", str(profile))
    assert "measured on a card, torch 2.13.0" in shown.stdout


def test_records_of_a_cpu_calibrate_nothing(record_folder):
    assert run("validate", "--calibrate", str(record_folder / "cpu" / SAMPLE)).exit_code == 3


@pytest.mark.parametrize(
    "wrong", [{"schema": "memplan/plan/1"}, {"context_bytes": -1}, {"device": 3}, {"library_bytes": True}]
)
def test_what_is_no_profile_is_refused(wrong, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE | wrong))
    result = run("explain", "gpt2", "--config", "bf16-adamw", "--gpu", "rtx4090", "--profile", str(path))
    assert isinstance(result.exception, InvalidFileError)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["gpt2", "--replay", "x.json"], InvalidFileError),
        (["--plan", "--device", "cpu"], InvalidFileError),
        (["--replay", "nowhere.json"], InvalidFileError),
        (["mixtral-8x7b-v0.1", "--device", "cpu"], CannotAnswerError),
        (["llama-3.1-405b", "--device", "cpu", "--whole"], CannotAnswerError),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(arguments, error):
    assert isinstance(run("validate", *arguments).exception, error)


def test_a_trainers_file_is_measured_under_its_own_settings(tmp_path, monkeypatch):
    def told(_, task):
        raise CannotAnswerError(f"{task.setup.name}, {task.setup.config.adapter.rank}")

    monkeypatch.setattr("memplan.library.validation_runs._measure", told)
    path = tmp_path / "job.yaml"
    keys = "base_model: HuggingFaceTB/SmolLM2-135M\nadapter: lora\nlora_r: 24\nlora_target_linear: true\nbf16: true\nsequence_len: 128\n"
    path.write_text(f"{keys}micro_batch_size: 1\ndatasets: [{{path: x}}]\n")
    assert str(run("validate", str(path), "--device", "cpu").exception) == f"{path}, 24"


def test_a_record_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path):
    ran = run("validate", "--device", "cpu", "--record", str(tmp_path / "nowhere" / "r.json"))
    assert isinstance(ran.exception, InvalidFileError)
    assert "there is no folder" in str(ran.exception)
    assert "measuring" not in ran.output


def test_runs_on_cards_of_limited_memory_are_counted_and_a_false_fits_disagrees(record_folder, tmp_path):
    names = ("cuda-smollm2-135m-bf16-adamw-b6-s1024-c8589934592", "cuda-smollm2-135m-bf16-adamw-b8-s1024-c8589934592")
    for name in names:
        shutil.copy(record_folder / "boundary" / f"{name}.json", tmp_path)
    good = run("validate", "--replay", str(tmp_path), "-q", "--json")
    assert json.loads(good.stdout)["boundary"] == {"runs": 2, "ran": 1, "out_of_memory": 1, "false_fits": 0}
    data = json.loads((tmp_path / f"{names[1]}.json").read_text())
    data["task"]["capacity_bytes"] = 40 * 2**30
    (tmp_path / f"{names[1]}.json").write_text(json.dumps(data))
    bad = run("validate", "--replay", str(tmp_path), "-q", "--json")
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["boundary"]["false_fits"] == 1


def test_records_of_several_devices_have_a_table_each(record_folder, tmp_path):
    shutil.copy(record_folder / "cpu" / SAMPLE, tmp_path)
    shutil.copy(record_folder / "cuda" / "cuda-gpt2-2layers-8192tokens-bf16-adamw-b2-s512.json", tmp_path)
    found = json.loads(run("validate", "--replay", str(tmp_path), "-q", "--json").stdout)
    assert {item["device"].split(",")[0] for item in found["components"]} == {"cpu", "NVIDIA H200"}
