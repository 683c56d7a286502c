"""A status rests on a record that is there, and a record says how it came about."""

import json
import re

import pytest

from memplan.catalog.catalog import data_directory
from memplan.errors import InvalidFileError
from memplan.library.lookup import Overrides, find_setup
from memplan.report.json_schemas import schema_of
from memplan.report.training_records import evidence_line, evidence_lines, evidence_path, read_evidence
from memplan.training.learning import BEARS, learning
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import follow_schema

FOLDER = data_directory() / "configs" / "evidence"
RECORDS = sorted(FOLDER.glob("train-*.json"))
records = pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)

LITERATURE = sorted(FOLDER.glob("literature-*.json"))
BASELINES = tuple(
    f"train-{name}"
    for name in (
        "muon-fp32-weights", "muon-fp32-weights-batch4", "muon-fp32-weights-momentum8",
        "muon-fp32-weights-momentum8-1000", "muon-fp32-weights-wide", "muon-fp32-weights-wide-short", "fp32-adamw",
        "fp32-adamw-batch4",
    )
)  # fmt: skip
BOUNDS = {
    "train-muon-int8-fp32-weights": (-0.5, 0.5),
    "train-tier1": (0.0, 12.0),
    "train-tier1-nearest": (25.0, 100.0),
    "train-tier1-bytes-q4-fp8-int8": (-5.0, 5.0),
    "train-tier1-bytes-q8-fp8-int8": (-5.0, 5.0),
    "train-q5-muon-ternary": (0.0, 6.0),
    "train-q5-muon-ternary-1000": (0.0, 5.0),
    "train-q6-muon-ternary": (0.0, 5.0),
    "train-q6-muon-ternary-1000": (0.0, 5.0),
}
"""Percent above fp32 momentum's validation loss, mean of three seeds."""


@records
def test_records_follow_their_schema(path):
    follow_schema(read_evidence(path), schema_of("evidence"))


@records
def test_records_are_of_three_seeds_or_more_and_of_a_known_config(path, catalog):
    record = read_evidence(path)
    assert len({run["seed"] for run in record["runs"]}) >= 3
    assert record["config"] in catalog.configs
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert f"configs/evidence/{path.name}" in record["command"]


@records
def test_measured_bytes_are_the_planned_ones(path):
    sizes = read_evidence(path)["bytes"]
    assert set(sizes) == {"weights", "gradients", "optimizer_states"}
    assert all(size["measured_bytes"] == size["predicted_bytes"] for size in sizes.values())


@records
def test_records_name_no_machine(path):
    assert not re.search(r"(/work|/tmp|/home|/root)/", path.read_text(encoding="utf-8"))


@records
def test_gaps_are_those_to_the_baseline(path):
    record = read_evidence(path)
    if record["gap_percent"] is None:
        assert path.stem in BASELINES
        return
    baseline = next(r for r in map(read_evidence, RECORDS) if r["command"] == record["baseline"]["command"])
    losses = {run["seed"]: run["validation_loss"] for run in baseline["runs"]}
    gaps = [100 * (run["validation_loss"] / losses[run["seed"]] - 1) for run in record["runs"]]
    assert record["gap_percent"]["mean"] == pytest.approx(sum(gaps) / len(gaps), abs=0.02)
    assert record["training"]["steps"] == baseline["training"]["steps"] >= 100
    for key in ("lr", "adamw_lr", "micro_batch_size", "sequence_length"):
        assert record["training"][key] == baseline["training"][key]
    assert record["text"]["sha256"] == baseline["text"]["sha256"]


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bounds_hold(name):
    low, high = BOUNDS[name]
    assert low <= read_evidence(FOLDER / f"{name}.json")["gap_percent"]["mean"] <= high


@pytest.mark.parametrize("name", ["train-tier1-bytes-q4-fp8-int8", "train-tier1-bytes-q8-fp8-int8"])
def test_the_settings_within_five_percent_hold_no_more_bytes_than_tier_1(name):
    def held(name):
        return sum(size["measured_bytes"] for size in read_evidence(FOLDER / f"{name}.json")["bytes"].values())

    assert held(name) <= held("train-tier1")


STANDINGS = {
    "level": {"proven", "works", "experimental"},
    "indistinct": {"proven", "works", "experimental"},
    "close": {"works", "experimental"},
    "behind": {"experimental"},
    "far behind": {"experimental"},
    "diverges": {"diverges"},
    "learns": {"proven", "works"},
}
"""Verdict of a record -> statuses that it bears; a few shipped configs are worse than their record, none is better."""

EXPERIMENTED = {
    "muon-bf16": {"bf16"},
    "muon-int4": {"int4"},
    "muon-int2": {"notes-2"},
    "muon-gauss4": {"gauss4"},
    "muon-gauss2": {"gauss2"},
    "q4-muon-int2": {"notes-2"},
}
"""Entry whose evidence is the experiment on momentum -> the rows that are about it."""


@pytest.mark.parametrize("section", ["configs", "optimizers"])
def test_every_status_rests_on_evidence_that_is_there(catalog, section):
    for name, entry in catalog.section(section).entries.items():
        status = learning(entry, catalog, name).status if section == "configs" else entry.status
        assert entry.evidence, f"{name} has no evidence"
        path = evidence_path(entry.evidence, catalog.root)
        assert path.is_file(), f"{name}: {path.name}"
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] == "memplan/experiment/1":
            assert name in EXPERIMENTED, (
                f"{name}: its evidence is an experiment; EXPERIMENTED says which rows are about it"
            )
            rows = [row for row in record["rows"] if row["momentum"] in EXPERIMENTED[name]]
            assert rows, name
            diverged = any(row["diverged"] == len(record["seeds"]) for row in rows)
            assert diverged == (status == "diverges"), name
        elif record["schema"] == "memplan/literature/1":
            assert record["verdict"] == status, name
        else:
            assert record["verdict"] in STANDINGS, f"{path.name}: verdict {record['verdict']} bears no status"
            assert status in STANDINGS[record["verdict"]], f"{name}: {record['verdict']}"


def test_the_evidence_of_a_config_is_a_record_of_that_config(catalog):
    for name, config in catalog.configs.entries.items():
        record = json.loads(evidence_path(config.evidence, catalog.root).read_text(encoding="utf-8"))
        if record["schema"] != "memplan/evidence/1":
            continue
        trained = find_setup(record["config"], Overrides(None, None, None, tuple(record["settings"])), catalog)
        own = find_setup(name, Overrides(None, None, None, ()), catalog)
        assert (trained.format_names, trained.optimizer_names) == (own.format_names, own.optimizer_names), name
        assert trained.config.gradients == own.config.gradients, name


@pytest.mark.parametrize("path", LITERATURE, ids=lambda path: path.stem)
def test_published_evidence_has_claims_and_where_they_stand(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    follow_schema(record, schema_of("literature"))
    assert all(claim["url"].startswith("https://arxiv.org/abs/") for claim in record["claims"])


def test_show_says_what_others_have_published(cli):
    assert "https://arxiv.org/abs/2305.14314" in cli("show", "qlora").out


def test_show_says_where_the_evidence_is_and_what_it_says(cli):
    ran = cli("show", "tier1")
    assert str(FOLDER / "train-tier1.json") in ran.out
    assert re.search(r"validation loss 1\.\d+ .* % against muon --set weights\.default=fp32", ran.out)


def test_an_evidence_of_ones_own_is_only_named(catalog):
    assert evidence_lines("https://example.org/run", catalog.root) == ("Evidence: https://example.org/run",)


@pytest.mark.parametrize("content", ["", "[1]", json.dumps({"schema": "memplan/plan/1"})])
def test_what_is_no_record_is_refused(write, content):
    with pytest.raises(InvalidFileError, match=r"not valid JSON|not a record of training"):
        read_evidence(write("record.json", content))


def test_a_line_of_a_run_that_diverged():
    record = read_evidence(RECORDS[0]) | {"validation_loss": None, "gap_percent": None, "verdict": "diverges"}
    assert evidence_line(record).startswith("diverges: no finite loss; 3 seeds, 300 steps")


# ------------------------------------------------------------------ how a setup learns
LEARNS = {
    "bf16-adamw": "works",
    "bf16-adamw-8bit": "works",
    "fp16-adam": "works",
    "fp16-muon": "works",
    "fp32-adamw": "proven",
    "lora": "proven",
    "mixed-adamw": "proven",
    "muon": "works",
    "q4-muon-int2": "diverges",
    "qlora": "proven",
}
"""Shipped configs that are more, or less, than experimental."""


def test_how_a_shipped_config_learns_follows_from_its_records(catalog):
    found = {name: resolve(config, catalog, name).config.status for name, config in catalog.configs.entries.items()}
    assert found == dict.fromkeys(catalog.configs, "experimental") | LEARNS
    assert {record["verdict"] for record in map(read_evidence, RECORDS)} <= set(BEARS)


@pytest.mark.parametrize(
    ("name", "settings", "status"),
    [
        ("fp32-adamw", ("weights.default=q4-0", "compute_dtype=bf16"), "untried"),
        ("lora", ("weights.default=q8-0",), "untried"),
        ("mixed-adamw", ("optimizer.default=lion",), "untried"),
        ("bf16-adamw", ("gradients.dtype=fp8-e4m3",), "untried"),
        ("bf16-adamw", ("master_weights=fp32",), "untried"),
        # records of ours that no config of ours names
        ("bf16-adamw", ("optimizer.default=adamw-int8",), "works"),
        ("muon", ("weights.default=fp32",), "works"),
        # an optimizer that diverges, in whatever company
        ("bf16-adamw", ("optimizer.default=muon-int2",), "diverges"),
        # what moves memory and time alone
        ("fp32-adamw", ("micro_batch_size=4", "activation_checkpointing=full", "kernels.optimizer=fused"), "proven"),
        ("qlora", ("adapter.rank=64", "sequence_length=512"), "proven"),
    ],
    ids=str,
)
def test_settings_that_decide_how_training_learns_decide_the_status(catalog, name, settings, status):
    assert find_setup(name, Overrides(settings=settings), catalog).config.status == status


def test_a_users_config_learns_as_the_evidence_for_its_contents_says_whatever_it_claims(write, cli):
    untried = write("mine.yaml", "description: mine\nstatus: proven\noptimizer: {default: lion}\n")
    ran = cli("fit", "tinyllama-1.1b", "--gpu", "t4", "--config", untried, "--json")
    assert (ran.data["status"], ran.data["training"]["status"]) == ("untried", "untried")
    assert "learning: untried" in cli("fit", "tinyllama-1.1b", "--gpu", "t4", "--config", untried, "-v").out
    like_ours = write("like-ours.yaml", "description: mine\noptimizer: {default: adamw-bf16}\n")
    assert cli("fit", "tinyllama-1.1b", "--gpu", "t4", "--config", like_ours, "--json").data["status"] == "works"


def test_a_config_cannot_borrow_the_record_of_another(write, cli):
    path = write("mine.yaml", "description: mine\nevidence: literature-lora\noptimizer: {default: lion}\n")
    training = cli("fit", "tinyllama-1.1b", "--gpu", "t4", "--config", path, "--json").data["training"]
    assert training["status"] == "untried"
    assert "evidence" not in training


def test_a_users_config_that_takes_the_name_of_ours_does_not_take_its_record(write, cli):
    path = write("mine.yaml", "configs:\n  lora: {description: mine, optimizer: {default: lion}}\n")
    plan = cli("fit", "tinyllama-1.1b", "--gpu", "t4", "--config", "lora", "--catalog", path, "--json").data
    assert plan["status"] == "untried"
