"""The README says what is so: its commands run, its outputs are current, and no command is missing from it."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from readme_blocks import README, blocks, memplan_commands, named_command
from update_readme import WIDTH, answered, bare, printed, run, write_examples

ROOT = README.parent
TEXT = README.read_text(encoding="utf-8")
COMMANDS = list({(c.text, c.exit_code): c for c in memplan_commands(TEXT)}.values())
OUTPUTS = [block for block in blocks(TEXT) if "output" in block.markers]
SHOWN = {bare(block.markers["output"]) for block in OUTPUTS}
"""Commands that run where their output is compared."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("readme")
    write_examples(TEXT, made)
    return made


def ends_as_the_readme_says(command, result) -> None:
    said = f"README.md:{command.line}: {command.text}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    assert result.returncode == command.exit_code, said
    assert "Traceback" not in result.stderr, said


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.text not in SHOWN], ids=lambda command: command.text)
def test_command_ends_as_the_readme_says(command, folder):
    if command.needs:
        for module in command.needs.split(", "):
            pytest.importorskip(module)
    result = run(command.text, folder)
    ends_as_the_readme_says(command, result)
    if "--json" in command.text:
        assert json.loads(result.stdout)["schema"].startswith("memplan/")


@pytest.mark.parametrize("block", OUTPUTS, ids=[block.markers["output"] for block in OUTPUTS])
def test_output_is_current_and_ends_as_the_readme_says(block, folder):
    needs = block.markers.get("needs")
    if needs and any(find_spec(module) is None for module in needs.split(", ")):
        pytest.skip(f"needs {needs}")
    output = block.markers["output"]
    result = answered(output, folder)
    for command in COMMANDS:
        if command.text == bare(output):
            ends_as_the_readme_says(command, result)
    shown = [line for line in block.lines if not line.startswith("$ ")]
    assert shown == printed(output, result), "to rewrite it: python tests/docs/update_readme.py"


@pytest.mark.parametrize("block", OUTPUTS, ids=[block.markers["output"] for block in OUTPUTS])
def test_output_fits_the_page(block):
    assert max(map(len, block.lines)) <= WIDTH


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_tables_and_examples_fit_the_page(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert [line for line in [*tables, *(x for b in blocks(text) for x in b.lines)] if len(line) > WIDTH] == []


def test_output_stands_below_its_command():
    for block in OUTPUTS:
        shown = [line[2:].split("  # exit")[0] for line in block.lines if line.startswith("$ ")]
        assert all(block.markers["output"].split(" | ")[0] == command for command in shown)


def test_every_command_appears(folder):
    helped = run("memplan --help", folder).stdout
    commands = re.findall(r"^  ([a-z]+) ", helped[helped.index("Commands:") :], re.MULTILINE)
    assert commands
    assert [name for name in commands if f"memplan {name}" not in TEXT] == []


def test_every_key_of_a_training_config_is_explained():
    from dataclasses import fields

    from memplan.catalog.training_config import TrainingConfig

    section = TEXT[TEXT.index("## Training configs") : TEXT.index("## Your own catalog")]
    assert [field.name for field in fields(TrainingConfig) if not re.search(rf"\b{field.name}\b", section)] == []


def test_first_screen_holds_both_commands():
    first = "\n".join(TEXT.splitlines()[:30])
    assert named_command(TEXT, "run") in first
    assert named_command(TEXT, "tests") in first


def test_torch_is_installed_before_what_depends_on_it():
    install, *_ = named_command(TEXT, "tests").split(" && ")
    assert re.fullmatch(r"pip install torch==[0-9.]+", install)


def test_ci_runs_the_commands_of_the_readme():
    script = ROOT / ".ci" / "run"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o111
    for name in ("run", "tests"):
        assert f"readme_command {name}" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_that_are_named_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    linked = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    quoted = re.findall(r"`((?:configs|tests|memplan|\.ci)/[a-z0-9_./-]*)`", text)
    quoted = [path for path in quoted if not re.fullmatch(r"memplan/[a-z]+/\d+", path)]  # names of JSON schemas
    assert [path for path in {*linked, *quoted} if path and not (ROOT / path).exists()] == []


def test_licence_names_its_holder():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "The memplan authors" in text


def test_changelog_has_the_version():
    from memplan import __version__

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)[:2] == ["Unreleased", __version__]


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [("cuda", "{} runs, whole models"), ("boundary", "then {} runs"), ("cpu", "{} records: every")],
)
def test_the_readme_counts_the_records_that_there_are(folder, sentence):
    count = len(list((README.parent / "tests" / "records" / folder).glob("*.json")))
    assert sentence.format(count) in " ".join(README.read_text(encoding="utf-8").split())
