"""``memplan diff``: what moved, and whether the user's config or memplan moved it."""

import json
from pathlib import Path

import pytest

import memplan
from tests.jobs import follow_schema

BUDGET = """\
version: 1
budgets:
  - {name: b, model: gpt2, config: my.yaml, gpu: t4}
  - {name: a, model: llama-8b, config: lora, gpu: h100}
"""


@pytest.fixture
def project(budget, write, cli, folder) -> Path:
    write("my.yaml", "description: mine\nmicro_batch_size: 2\nsequence_length: 512\n")
    budget(BUDGET)
    assert cli("check", "--update-baseline", "--baseline", "base.json").exit_code == 0
    return folder


def head(cli, project: Path, edit=None) -> dict:
    """Write head.json, edited as another memplan would have written it, and return what moved by name."""
    assert cli("check", "--update-baseline", "--baseline", "head.json").exit_code == 0
    if edit is not None:
        data = json.loads((project / "head.json").read_text())
        edit(data)
        (project / "head.json").write_text(json.dumps(data))
    ran = cli("diff", "base.json", "head.json", "--json")
    assert ran.exit_code == 0
    follow_schema(ran.data, cli("schema", "diff").data)
    return {row["name"]: row for row in ran.data["rows"]}


def newer(data) -> None:
    """As if a later memplan had found activations larger."""
    data["memplan_version"] = "9.9.9"
    for row in data["rows"]:
        row["components"]["activations"] = row["components"].get("activations", 0) + 1024
        row["device_bytes"] += 1024
        row["upper_bytes"] += 1024


def test_equal_baselines_are_the_same(cli, project):
    assert {row["cause"] for row in head(cli, project).values()} == {"none"}
    assert cli("diff", "base.json", "head.json").out.splitlines()[-1] == "SAME: nothing moved in 2 jobs."


def test_a_comment_in_a_config_is_no_change(cli, project, write):
    write("my.yaml", "# why\ndescription: mine\nsequence_length: 512\nmicro_batch_size: 2\n")
    assert head(cli, project)["b"]["cause"] == "none"


def test_a_changed_config_is_told_from_an_unchanged_one(cli, project, write):
    write("my.yaml", "description: mine\nmicro_batch_size: 4\nsequence_length: 512\n")
    found = head(cli, project)
    assert (found["b"]["cause"], found["a"]["cause"]) == ("config", "none")
    assert found["b"]["moved_bytes"] == sum(found["b"]["components"].values()) > 0


def test_a_changed_memplan_is_told_from_a_changed_config(cli, project):
    found = head(cli, project, newer)
    assert {row["cause"] for row in found.values()} == {"memplan"}
    assert {row["moved_bytes"] for row in found.values()} == {1024}
    text = cli("diff", "base.json", "head.json").out
    assert "memplan's own figures changed" in text
    assert f"memplan {memplan.__version__} -> 9.9.9" in text


def test_both_at_once_are_said_to_be_both(cli, project, write):
    write("my.yaml", "description: mine\nmicro_batch_size: 4\nsequence_length: 512\n")
    found = head(cli, project, newer)
    assert (found["b"]["cause"], found["a"]["cause"]) == ("config and memplan", "memplan")


def test_new_and_removed_jobs_are_named(cli, project, budget):
    budget(BUDGET.replace("name: a,", "name: c,"))
    found = head(cli, project)
    assert (found["a"]["cause"], found["c"]["cause"]) == ("removed", "added")
    assert found["a"]["moved_bytes"] == -found["c"]["moved_bytes"] < 0


def test_another_gpu_is_another_job(cli, project, budget):
    budget(BUDGET.replace("gpu: t4", "gpu: rtx4090"))
    head(cli, project)
    causes = {
        (row["name"], row["gpu"]): row["cause"] for row in cli("diff", "base.json", "head.json", "--json").data["rows"]
    }
    assert (causes["b", "t4"], causes["b", "rtx4090"]) == ("removed", "added")


@pytest.mark.parametrize("form", ["table", "plain", "json", "csv", "md"])
def test_every_format_is_the_same_twice(cli, project, write, form):
    write("my.yaml", "description: mine\nmicro_batch_size: 4\nsequence_length: 512\n")
    head(cli, project)
    first = cli("diff", "base.json", "head.json", "--format", form)
    assert first.exit_code == 0
    assert first.out == cli("diff", "base.json", "head.json", "--format", form).out != ""


def test_a_saved_answer_of_check_will_do(cli, project):
    cli("check", "--json", "-o", "answer.json")
    assert cli("diff", "base.json", "answer.json", "-q").out == "SAME: nothing moved in 2 jobs.\n"


def test_markdown_says_what_moved_and_why(cli, project, write):
    write("my.yaml", "description: mine\nmicro_batch_size: 4\nsequence_length: 512\n")
    head(cli, project)
    text = cli("diff", "base.json", "head.json", "--format", "md").out
    assert text.startswith("<!-- memplan:diff -->\n### memplan diff\n")
    assert "| b | t4 | " in text
    assert "your config changed" in text
    assert "<details><summary>b on t4</summary>" in text


def test_markdown_of_many_jobs_stays_short(cli, folder):
    rows = [
        {"name": f"job-{i:04d}-" + "x" * 90, "gpu": "t4", "model": "m", "config": "c", "asked": str(i), "inputs": str(i),
         "device_bytes": i, "upper_bytes": i, "components": {"weights": i}} for i in range(500)
    ]  # fmt: skip
    for name, more in (("base.json", 0), ("head.json", 2**30)):
        kept = [{**row, "device_bytes": row["device_bytes"] + more, "components": {"weights": more}} for row in rows]
        data = {"schema": "memplan/baseline/1", "memplan_version": "1", "catalog_hash": "0", "rows": kept}
        (folder / name).write_text(json.dumps(data))
    text = cli("diff", "base.json", "head.json", "--format", "md").out
    assert len(text.encode()) < 60_000


@pytest.mark.parametrize(
    "arguments", [("base.json", "gone.json"), ("my.yaml", "base.json"), ("base.json", "memplan-budget.yaml")]
)
def test_what_is_no_baseline_is_bad_input(refused, project, arguments):
    assert refused("diff", *arguments)
