"""Budget files: defaults, and files that include files."""

import pytest

JOB = "{{name: {}, model: gpt2, config: lora, gpu: t4}}"


def rows(ran):
    return [(row["name"], row["file"], row["line"]) for row in sorted(ran.data["rows"], key=lambda row: row["name"])]


def test_includes_are_relative_to_their_file_and_keep_their_own_lines(cli, write, folder):
    write("memplan-budget.yaml", f"version: 1\ninclude: [team/a.yaml]\nbudgets:\n  - {JOB.format('top')}\n")
    write("team/a.yaml", f"version: 1\ninclude: [../b.yaml]\nbudgets:\n\n\n  - {JOB.format('a')}\n")
    write("b.yaml", f"version: 1\nbudgets:\n  -\n    {JOB.format('b')}\n")
    assert rows(cli("check", "--json")) == [
        ("a", "team/a.yaml", 6),
        ("b", "b.yaml", 4),
        ("top", "memplan-budget.yaml", 4),
    ]


@pytest.mark.parametrize("inner", ["memplan-budget.yaml", "./memplan-budget.yaml", "a.yaml"])
def test_a_circle_of_includes_is_refused(cli, write, folder, inner):
    write("memplan-budget.yaml", "version: 1\ninclude: [a.yaml]\n")
    write("a.yaml", f"version: 1\ninclude: [{inner}]\n")
    ran = cli("check")
    assert ran.exit_code == 2
    assert "memplan: a.yaml:2: include.0: includes itself: memplan-budget.yaml -> a.yaml -> " in ran.err


def test_a_link_to_itself_is_a_circle_too(cli, write, folder):
    write("memplan-budget.yaml", "version: 1\ninclude: [a.yaml]\n")
    (folder / "a.yaml").symlink_to("memplan-budget.yaml")
    ran = cli("check")
    assert ran.exit_code == 2
    assert "includes itself" in ran.err


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ("gone.yaml", "gone.yaml: no such file"),
        (".", ".: is a directory"),
        ("''", "expected the path"),
        ("'-'", "expected the path"),
    ],
)
def test_an_include_that_cannot_be_read_is_named_with_its_line(refused, budget, inner, said):
    budget(f"version: 1\nbudgets:\n  - {JOB.format('a')}\ninclude:\n  - {inner}\n")
    assert refused("check").startswith(f"memplan: memplan-budget.yaml:5: include.0: {said}")


def test_a_file_is_included_once(refused, write, budget):
    budget("version: 1\ninclude: [a.yaml, ./a.yaml]\n")
    write("a.yaml", f"version: 1\nbudgets:\n  - {JOB.format('a')}\n")
    assert "include.1: a.yaml is included twice" in refused("check")


def test_names_are_unique_over_all_files(refused, write, budget):
    budget(f"version: 1\ninclude: [a.yaml]\nbudgets:\n  - {JOB.format('a')}\n")
    write("a.yaml", f"version: 1\nbudgets:\n  - {JOB.format('a')}\n")
    assert (
        refused("check")
        == "memplan: a.yaml:3: budgets.0.name: 'a' is already the name of memplan-budget.yaml:4: budgets.0.name"
    )


def test_only_the_top_file_names_the_baseline(refused, write, budget):
    budget(f"version: 1\ninclude: [a.yaml]\nbudgets:\n  - {JOB.format('a')}\n")
    write("a.yaml", "version: 1\nbaseline: b.json\n")
    assert "a.yaml:2: baseline: belongs in memplan-budget.yaml" in refused("check")


def test_defaults_reach_included_files_and_give_way_to_nearer_ones(cli, write, budget):
    budget(
        "version: 1\ndefaults: {model: gpt2, gpus: [t4, rtx4090], config: fp16-adam, level: warn, components: {weights: 1 MiB}}\ninclude: [a.yaml]\n"
    )
    write(
        "a.yaml",
        "version: 1\ndefaults: {gpu: h100, components: {logits: 1 MiB}}\nbudgets:\n  - {name: a}\n  - {name: b, gpus: [t4], level: error}\n",
    )
    ran = cli("check", "--json")
    found = {(row["name"], row["gpu"]): row for row in ran.data["rows"]}
    assert set(found) == {("a", "h100-sxm-80gb"), ("b", "t4")}
    assert [found[key]["status"] for key in sorted(found)] == ["warn", "over"]
    for row in found.values():
        assert {finding["component"] for finding in row["findings"]} == {"weights", "logits"}


def test_problems_of_all_files_are_told_at_once(cli, write, budget):
    budget("version: 1\ninclude: [a.yaml, b.yaml]\nbudgets: [{name: x, model: gpt2, config: lora, gpu: t5}]\n")
    write("a.yaml", "version: one\n")
    write("b.yaml", "version: 1\nbudgets: [{name: y, model: gpt3, config: lora, gpu: t4}]\n")
    ran = cli("check")
    assert ran.exit_code == 2
    assert {line.split(": ")[1] for line in ran.err.splitlines()} == {"memplan-budget.yaml:3", "a.yaml:1", "b.yaml:2"}


def test_a_name_is_one_printable_line(refused, budget):
    budget('version: 1\nbudgets: [{name: "a\\nb", model: gpt2, config: lora, gpu: t4}]\n')
    assert "budgets.0.name: expected a name of 1 to 100 printable characters" in refused("check")
