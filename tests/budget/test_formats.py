"""Formats for forges and test reports follow their published schemas and documentation."""

import json
import re
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import jsonschema
import pytest

from memplan.catalog.catalog import Catalog, data_directory

SCHEMAS = Path(__file__).parent / "schemas"
ANNOTATION = re.compile(r"::(error|warning) file=([^,:]+),line=([0-9]+)::(.+)")
MIXED = """\
version: 1
defaults: {model: gpt2, config: fp32-adamw, gpu: t4}
budgets:
  - {name: within}
  - {name: warned, limit: 1 GiB, level: warn}
  - {name: unknown, max_increase: 1%}

  - name: over
    limit: 1 GiB
    components: {logits: 1 KiB}
  - {name: "100% <b>|`x`*@y*, a: b", limit: 1 GiB}
"""


@pytest.fixture
def mixed(budget) -> Path:
    return budget(MIXED)


def jobs(number: int) -> str:
    """A budget of as many jobs with long names, of two dozen kinds, about half of them over their limits."""
    catalog = Catalog(data_directory())
    models, configs = list(catalog.models), list(catalog.configs)
    gpus = [name for name, gpu in catalog.gpus.entries.items() if gpu.vendor == "nvidia"]  # none refuses FP8 gradients
    lines = [
        f"  - {{name: {f'job-{i:03d}-':x<100}, model: {models[i % 24]}, config: {configs[i % 24 % len(configs)]}, "
        f"gpu: {gpus[i % 24]}, limit: {20 + i % 60} GiB}}\n"
        for i in range(number)
    ]
    return "version: 1\nbudgets:\n" + "".join(lines)


# ------------------------------------------------------------------ GitHub
def test_github_annotates_the_jobs_own_first_line(cli, ten_jobs):
    ran = cli("check", "--format", "github")
    first, *rest = ran.out.splitlines()
    assert first.startswith("::error file=memplan-budget.yaml,line=9::full on h100-sxm-80gb needs ")
    assert "optimizer_states" in first
    assert not [line for line in rest if line.startswith("::")]


def test_github_has_errors_and_warnings_worst_first(cli, mixed):
    lines = cli("check", "--format", "github").out.splitlines()
    found = [ANNOTATION.fullmatch(line) for line in lines[:-1]]
    assert all(found)
    assert [(m[1], m[3]) for m in found] == [("error", "8"), ("error", "11"), ("error", "6"), ("warning", "5")]
    assert lines[-1].startswith("OVER: 5 checks, 2 over budget: ")


def test_github_escapes_what_would_end_a_command(cli, write, folder):
    write(
        "a,b%c.yaml", 'version: 1\nbudgets: [{name: "100%: x, y", model: gpt2, config: lora, gpu: t4, limit: 1 MiB}]\n'
    )
    (line, _) = cli("check", "a,b%c.yaml", "--format", "github").out.splitlines()
    assert line.startswith("::error file=a%2Cb%25c.yaml,line=2::100%25: x, y on t4 needs ")


def test_github_annotates_at_most_ten(cli, budget):
    budget(jobs(48))
    ran = cli("check", "--format", "github")
    annotated = [line for line in ran.out.splitlines() if line.startswith("::")]
    rows = cli("check", "--json").data["rows"]
    over = [row for row in rows if row["status"] == "over"]
    assert len(over) > len(annotated) == 10
    assert [ANNOTATION.fullmatch(line)[3] for line in annotated] == [str(row["line"]) for row in over[:10]]
    failing = [row for row in rows if row["status"] != "within"]
    assert f"... and {len(failing) - 10} more" in ran.out


def test_github_annotates_mistakes_at_their_lines(cli, budget):
    budget(
        "version: 1\nbudgets:\n  - {name: a, model: gpt2, config: lora, gpu: t5}\n  - {name: b, model: gpt9, config: lora, gpu: t4}\n"
    )
    ran = cli("check", "--format", "github")
    assert ran.exit_code == 2
    for number, line in enumerate(ran.out.splitlines()):
        assert line.startswith(f"::error file=memplan-budget.yaml,line={3 + number}::budgets.{number}.")
    assert ran.err.count("\n") == 2


def test_paths_are_relative_to_the_repository(cli, ten_jobs):
    assert cli("check", ten_jobs, "--format", "github").out == cli("check", "--format", "github").out


# ------------------------------------------------------------------ GitLab
def test_gitlab_has_what_its_documentation_asks_for(cli, mixed):
    rows = json.loads(cli("check", "--format", "gitlab").out)
    for row in rows:
        assert set(row) == {"description", "check_name", "fingerprint", "severity", "location"}
        assert row["severity"] in ("info", "minor", "major", "critical", "blocker")
        assert row["location"]["path"] == "memplan-budget.yaml"
        assert row["location"]["lines"]["begin"] in (5, 6, 8, 11)
    assert len({row["fingerprint"] for row in rows}) == len(rows) == 5


def test_fingerprints_stay_when_figures_and_lines_move(cli, mixed):
    before = {row["fingerprint"] for row in json.loads(cli("check", "--format", "gitlab").out)}
    mixed.write_text(MIXED.replace("limit: 1 GiB", "limit: 0.9 GiB").replace("budgets:", "\n\nbudgets:"))
    assert {row["fingerprint"] for row in json.loads(cli("check", "--format", "gitlab").out)} == before


def test_nothing_to_tell_is_an_empty_report(cli, one):
    one()
    assert json.loads(cli("check", "--format", "gitlab").out) == []
    assert json.loads(cli("check", "--format", "sarif").out)["runs"][0]["results"] == []


# ------------------------------------------------------------------ JUnit
@pytest.fixture(scope="module")
def junit_schema():
    xmlschema = pytest.importorskip("xmlschema")
    return xmlschema.XMLSchema(SCHEMAS / "junit-10.xsd")


@pytest.mark.parametrize("name", ["ten_jobs", "mixed"])
def test_junit_follows_the_published_schema(cli, request, junit_schema, name):
    request.getfixturevalue(name)
    junit_schema.validate(cli("check", "--format", "junit").out)


def test_the_schema_of_junit_can_refuse(junit_schema):
    assert not junit_schema.is_valid('<testsuites><testsuite name="x" tests="1"/></testsuites>')


def test_junit_counts_what_it_holds(cli, mixed):
    root = ElementTree.fromstring(cli("check", "--format", "junit").out)
    cases = root.findall(".//testcase")
    assert len(cases) == int(root.attrib["tests"]) == 5
    assert len(root.findall(".//failure")) == int(root.attrib["failures"]) == 2
    assert len(root.findall(".//error")) == int(root.attrib["errors"]) == 1
    assert [case.attrib["name"] for case in cases if case.find("system-out") is not None] == ["warned on t4"]
    assert "memplan-budget.yaml:8" in root.find(".//failure").text


def test_junit_holds_no_character_that_xml_cannot(cli, write, folder, junit_schema):
    write("c\x01d.yaml", "version: 1\nbudgets: [{name: a, model: gpt2, config: lora, gpu: t4, limit: 1 MiB}]\n")
    junit_schema.validate(cli("check", "c\x01d.yaml", "--format", "junit").out)


# ------------------------------------------------------------------ SARIF
SARIF = jsonschema.Draft202012Validator(
    json.loads((SCHEMAS / "sarif-written-part.json").read_text(encoding="utf-8")),
    format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
)


@pytest.mark.parametrize("name", ["ten_jobs", "mixed"])
def test_sarif_follows_the_standard(cli, request, name):
    request.getfixturevalue(name)
    SARIF.check_schema(SARIF.schema)
    SARIF.validate(json.loads(cli("check", "--format", "sarif").out))


def test_sarif_points_at_the_job_and_at_its_rule(cli, mixed):
    (run,) = json.loads(cli("check", "--format", "sarif").out)["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
    first = run["results"][0]
    assert (first["ruleId"], first["level"]) == ("memplan/limit", "error")
    place = first["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("memplan-budget.yaml", 8)
    assert {r["level"] for r in run["results"]} == {"error", "warning"}


def test_sarif_quotes_paths(cli, write, folder):
    write("my jobs/ü#?.yaml", "version: 1\nbudgets: [{name: a, model: gpt2, config: lora, gpu: t4, limit: 1 MiB}]\n")
    log = json.loads(cli("check", "my jobs/ü#?.yaml", "--format", "sarif").out)
    SARIF.validate(log)
    uri = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(uri) == "my jobs/ü#?.yaml"


# ------------------------------------------------------------------ Markdown
@pytest.mark.parametrize("number", [10, pytest.param(500, marks=pytest.mark.thorough)])
def test_markdown_stays_under_60_kilobytes(cli, budget, number):
    budget(jobs(number))
    text = cli("check", "--format", "md").out
    assert len(text.encode()) < 60_000
    rows = [line for line in text.splitlines() if line.startswith("| ") and "job-" in line]
    left = re.search(r"\.\.\. and ([0-9]+) more rows", text)
    assert len(rows) + (int(left[1]) if left else 0) == number
    assert text.count("<details>") == text.count("</details>")


def test_markdown_cells_cannot_break_the_table(cli, mixed):
    lines = [line for line in cli("check", "--format", "md").out.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {9}
    text = "\n".join(lines)
    assert "<b>" not in text
    assert "`" not in text
    assert "@y" not in text


def test_markdown_starts_with_a_marker_to_find_it_by(cli, ten_jobs):
    assert cli("check", "--format", "md").out.startswith(
        "<!-- memplan:check -->\n### memplan check\n\nOVER: 10 checks, "
    )
