"""Piped answers have no colour, and no terminal is too narrow for a number."""

import pytest

pytestmark = pytest.mark.usefixtures("answered_once")

ANSWERS = {
    "fit": ("fit", "gpt2", "--gpu", "t4"),
    "plan": ("fit", "llama-8b", "--gpu", "rtx4090", "--config", "bf16-adamw"),
    "max": ("max", "--config", "tier3", "--gpu", "rtx4090"),
    "where": ("where", "llama-70b", "--config", "tier1"),
    "explain": ("explain", "gpt2"),
    "list": ("list", "gpus"),
    "show": ("show", "llama-8b"),
}
NARROW = {"COLUMNS": "40", "TERM": "dumb", "NO_COLOR": "1"}
PLAN = ANSWERS["plan"]

answers = pytest.mark.parametrize("arguments", ANSWERS.values(), ids=ANSWERS.keys())


@pytest.fixture(params=["plain", "narrow", "forced"])
def environment(request, monkeypatch, cli):
    """A caller's environment: none, one that asks for little, one that asks for colour."""
    settings = {
        "plain": {},
        "narrow": NARROW,
        "forced": {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"},
    }
    for key, value in settings[request.param].items():
        monkeypatch.setenv(key, value)


@answers
def test_a_piped_answer_has_no_colour_no_control_characters_and_no_ellipsis(cli, environment, arguments):
    out = cli(*arguments).out
    assert not {character for character in out if ord(character) < 32 and character != "\n"}
    assert not {"\x7f", "…"} & set(out)


@pytest.mark.parametrize("form", ["table", "plain", "md", "csv"])
def test_every_number_of_the_json_stands_uncut_in_the_table(cli, environment, form):
    out = cli(*PLAN, "--format", form, "--units", "bytes", "-v").out
    plan = cli(*PLAN, "--json").data
    numbers = [item["bytes"] for item in plan["components"]] + [item["requested_bytes"] for item in plan["instants"]]
    numbers += [value for key, value in plan["peak"].items() if key.endswith("_bytes")]
    numbers += [item[key] for item in plan["suggestions"] for key in ("saves_bytes", "device_bytes")]
    assert len(numbers) > 20
    for number in numbers:
        assert f"{number:,} B" in out


def test_every_gpu_of_max_has_its_bound_and_model_uncut(cli, catalog, monkeypatch):
    for key, value in NARROW.items():
        monkeypatch.setenv(key, value)
    lines = cli("max", "--config", "tier3", "--all").out.splitlines()
    rows = cli("max", "--config", "tier3", "--json").data["rows"]
    assert {row["gpu"] for row in rows} == set(catalog.gpus)
    for row in rows:
        assert row["largest_fitting_parameters"] <= row["max_parameters"]
        found = [line for line in lines if row["gpu"] in line.replace(",", " ").replace("|", " ").split()]
        assert any((row["largest_fitting_model"] or "none") in line for line in found)


def test_the_width_of_a_terminal_does_not_change_json(cli, monkeypatch):
    wide = cli(*PLAN, "--json").out
    monkeypatch.setenv("COLUMNS", "40")
    assert cli(*PLAN, "--json").out == wide


@pytest.mark.parametrize("columns", ["", "x", "-3", "0", "99999999999", "40"])
def test_an_odd_number_of_columns_is_no_trouble(cli, monkeypatch, columns):
    expected = cli(*PLAN).out
    monkeypatch.setenv("COLUMNS", columns)
    assert cli(*PLAN).out == expected


@answers
def test_lines_end_without_blanks_and_the_text_with_one_line_break(cli, arguments):
    out = cli(*arguments).out
    assert out.endswith("\n")
    assert not out.endswith("\n\n")
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_the_last_line_is_the_answer(cli):
    plan = cli(*PLAN, "--json").data
    assert cli(*PLAN, "-v").out.splitlines()[-1] == cli(*PLAN, "-q").out.strip() == plan["answer"]


def test_the_table_shows_assumptions_and_what_is_not_counted(cli):
    plan = cli(*PLAN, "--json").data
    words = " ".join(cli(*PLAN, "-v").out.split())
    for sentence in plan["assumptions"] + plan["not_modelled"]:
        assert " ".join(sentence.split()) in words


def test_the_kernel_profile_is_part_of_the_answer(cli):
    text = cli(*PLAN, "-v").out
    for choice in ("attention flash", "norm fused", "optimizer foreach", "loss bf16"):
        assert choice in text


def test_progress_says_how_long_the_rest_takes(monkeypatch, capsys):
    from memplan.cli import output

    clock = iter([0.0, 1.0, 30.0, 400.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    bar = output.Progress("runs", 5)
    for done in (1, 2, 3):
        bar(done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("memplan: runs: ") for line in lines] == [
        "1/5",
        "2/5, about 45 s left",
        "3/5, about 4 min left",
    ]


def test_what_the_first_part_takes_besides_is_not_counted_on(monkeypatch, capsys):
    from memplan.cli import output

    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True, raising=False)
    waiting = output.Waiting("where")
    for now[0], done in ((10.0, 1), (13.0, 4)):
        waiting(done, 10)
    assert capsys.readouterr().err.endswith("4/10, about 6 s left")
