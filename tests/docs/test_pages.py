"""The README and the pages in docs/ say what is so: their commands run, their outputs are current, and no command is missing."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from page_blocks import PAGES, README, ROOT, Block, Command, blocks, memplan_commands, named_command
from readme_table import readme_rows, table
from update_pages import WIDTH, asked, bare, printed, write_examples

TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
TEXT = TEXTS[README.name]
ALL = "\n".join(TEXTS.values())
README_LINES = 200
pytestmark = pytest.mark.usefixtures("answered_once")
PYTHON_PAGES = ("docs/library.md", "docs/muon.md")
"""Whose examples are code, with tests of their own."""
LONG = (
    "memplan lab train ", "memplan lab largest ", "memplan validate --", "memplan where ",
    "memplan max --config tier3", "memplan max llama-8b --for ",
)  # fmt: skip
"""Commands that train or simulate for seconds: .ci/run runs the first of each with the tests of many jobs; the others are slow."""


@dataclass(frozen=True)
class Shown:
    """A command or a block, and the page that shows it."""

    page: str
    what: Command | Block


COMMANDS = list(
    {(c.text, c.exit_code): Shown(page, c) for page, text in TEXTS.items() for c in memplan_commands(text)}.values()
)
OUTPUTS = [Shown(page, block) for page, text in TEXTS.items() for block in blocks(text) if "output" in block.markers]
SHOWN = {bare(shown.what.markers["output"]) for shown in OUTPUTS}
"""Commands that run where their output is compared."""
ALIKE = [[s for s in COMMANDS if s.what.text.startswith(begins) and s.what.text not in SHOWN] for begins in LONG]
FIRST, OTHERS = [alike[0] for alike in ALIKE], [shown for alike in ALIKE for shown in alike[1:]]
RUN = [
    pytest.param(
        shown,
        marks=pytest.mark.thorough if shown in FIRST else pytest.mark.slow if shown in OTHERS else (),
        id=shown.what.text,
    )
    for shown in COMMANDS
    if shown.what.text not in SHOWN
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    write_examples(made)
    return made


Shell = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run(cli, folder, monkeypatch) -> Shell:
    """Run a page's commands in this process, in the folder of the pages' files; tests/cli/test_installed.py starts processes."""
    monkeypatch.chdir(folder)

    def call(line: str) -> subprocess.CompletedProcess[str]:
        for part in line.split(" && "):
            words = shlex.split(part)
            settings = words[: words.index("memplan")]
            with monkeypatch.context() as patch:
                for setting in settings:
                    patch.setenv(*setting.split("=", 1))
                ran = cli(*words[len(settings) + 1 :])
            if ran.exit_code:
                break
        return subprocess.CompletedProcess(line, ran.exit_code, ran.out, ran.err)

    return call


def ends_as_the_page_says(shown, result) -> None:
    said = f"{shown.page}:{shown.what.line}: {shown.what.text}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    assert result.returncode == shown.what.exit_code, said
    assert "Traceback" not in result.stderr, said


@pytest.mark.parametrize("shown", RUN)
def test_command_ends_as_the_page_says(shown, run):
    if shown.what.needs:
        for module in shown.what.needs.split(", "):
            pytest.importorskip(module)
    result = run(shown.what.text)
    ends_as_the_page_says(shown, result)
    if "--json" in shown.what.text:
        assert json.loads(result.stdout)["schema"].startswith("memplan/")


@pytest.mark.parametrize("shown", OUTPUTS, ids=[shown.what.markers["output"] for shown in OUTPUTS])
def test_output_is_current_and_ends_as_the_page_says(shown, run):
    markers = shown.what.markers
    if "needs" in markers and any(find_spec(module) is None for module in markers["needs"].split(", ")):
        pytest.skip(f"needs {markers['needs']}")
    output = markers["output"]
    result = run(asked(output))
    for command in COMMANDS:
        if command.what.text == bare(output):
            ends_as_the_page_says(command, result)
    lines = [line for line in shown.what.lines if not line.startswith("$ ")]
    assert lines == printed(output, result), "to rewrite it: python tests/docs/update_pages.py"


@pytest.mark.parametrize("shown", OUTPUTS, ids=[shown.what.markers["output"] for shown in OUTPUTS])
def test_output_fits_the_page(shown):
    assert max(map(len, shown.what.lines)) <= WIDTH


@pytest.mark.parametrize("name", [*(name for name in TEXTS if name not in PYTHON_PAGES), "CONTRIBUTING.md"])
def test_tables_and_examples_fit_the_page(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    examples = [line for block in blocks(text) if block.language != "pycon" for line in block.lines]
    assert [line for line in [*tables, *examples] if len(line) > WIDTH] == []


def test_the_readme_has_the_records_in_short():
    assert readme_rows(TEXT) == table(), "to rewrite it: python tests/docs/readme_table.py"


def test_output_stands_below_its_command():
    for block in (shown.what for shown in OUTPUTS):
        lines = [line[2:].split("  # exit")[0] for line in block.lines if line.startswith("$ ")]
        assert all(block.markers["output"].split(" | ")[0] == command for command in lines)


def test_the_readme_is_read_in_a_minute():
    assert len(TEXT.splitlines()) <= README_LINES


def test_every_command_appears(run):
    helped = run("memplan --help").stdout
    commands = re.findall(r"^  ([a-z]+) ", helped[helped.index("Commands:") :], re.MULTILINE)
    assert commands
    assert [name for name in commands if f"memplan {name}" not in ALL] == []


def test_every_key_of_a_training_config_is_explained():
    from dataclasses import fields

    from memplan.catalog.training_config import TrainingConfig

    section = TEXTS["docs/training-configs.md"]
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


@pytest.mark.parametrize("name", [*TEXTS, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_that_are_named_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    folder = (ROOT / name).parent.relative_to(ROOT)
    linked = [folder / target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    quoted = re.findall(r"`((?:configs|tests|memplan|\.ci)/[a-z0-9_./-]*)`", text)
    quoted = [path for path in quoted if not re.fullmatch(r"memplan/[a-z]+/\d+", path)]  # names of JSON schemas
    assert [path for path in {*linked, *quoted} if not (ROOT / path).exists()] == []


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
def test_the_pages_count_the_records_that_there_are(folder, sentence):
    count = len(list((ROOT / "tests" / "records" / folder).glob("*.json")))
    assert sentence.format(count) in " ".join(TEXTS["docs/accuracy.md"].split())


def test_the_page_of_the_lab_has_figures_of_its_records(cli):
    page = re.sub(r"```.*?```", "", TEXTS["docs/lab.md"], flags=re.DOTALL)
    figures = re.findall(r"[+-]\d+\.\d % \([^)]*\)", " ".join(page.split()))
    shown = "".join(cli("lab", "show", name).out for name in re.findall(r"`memplan lab ([a-z0-9-]+)` \|", page))
    assert len(figures) > 5
    assert [figure for figure in figures if figure not in shown] == []
