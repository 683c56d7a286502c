"""``memplan tables`` and ``--accounting`` on the command line."""

import csv
import io

import pytest

from tests.jobs import follow_schema

SCALE = ("--accounting", "notes-scale")
PRECISION = ("--accounting", "notes-precision")
MINIMUM = ("--accounting", "notes-min-gpus")


def test_without_an_id_there_is_a_row_for_each_table_and_the_counts(cli):
    ran = cli("tables")
    assert ran.exit_code == 0
    assert sum(line.startswith("s00") for line in ran.out.splitlines()) == 49
    assert "603 cells in 49 tables: 359 reproduces" in ran.out.splitlines()[-1]


def test_json_has_every_cell_and_follows_its_schema(cli):
    data = cli("tables", "--json").data
    follow_schema(data, cli("schema", "tables").data)
    assert sum(len(table["cells"]) for table in data["tables"]) == data["counts"]["cells"] == 603
    assert {"row", "column", "printed", "recomputed", "corrected", "status", "reason"} <= set(
        data["tables"][0]["cells"][0]
    )
    assert {row["shape"] for row in data["shapes"]} == {"d20", "d20-e3-full", "test-8bit"}
    assert data["statements"]


def test_a_document_is_shown_by_the_first_part_of_its_ids(cli):
    data = cli("tables", "s003", "--json").data
    assert [table["id"] for table in data["tables"]] == [f"s003.t0{n}" for n in range(1, 6)]
    assert cli("tables", "S003.T01", "--json").data["counts"]["cells"] == 12


def test_only_wrong_leaves_out_what_is_right(cli):
    data = cli("tables", "--only", "wrong", "--json").data
    cells = [cell for table in data["tables"] for cell in table["cells"]]
    assert len(cells) == data["counts"]["wrong"] > 100
    assert all(cell["wrong"] for cell in cells)
    assert not [cell for table in data["tables"] if table["id"] == "s000.t17" for cell in table["cells"]]
    assert "s000.t17" not in cli("tables", "s000", "--only", "wrong").out


def test_what_the_notes_got_wrong_is_shown_with_the_reason(cli):
    out = cli("tables", "s000.t15", "--only", "wrong").out
    assert "2.0625 rounds to 2.1." in out
    assert "9.4B" in out


def test_csv_is_one_table_of_all_cells(cli):
    rows = list(csv.DictReader(io.StringIO(cli("tables", "--format", "csv").out)))
    assert len(rows) == 603
    assert {row["id"] for row in rows} >= {"s000.t01", "s004.t05"}


def test_markdown_shows_a_table(cli):
    assert "| row | column | printed |" in cli("tables", "s000.t17", "--format", "md").out


@pytest.mark.parametrize("text", ["s000.t99", "s005", "t01"])
def test_an_unknown_id_gets_the_nearest(refused, text):
    line = refused("tables", text)
    assert line.startswith(f"memplan: unknown table {text!r}")
    assert "memplan tables" in line


def test_no_table_of_figures_is_much_wider_than_a_page(cli):
    for line in cli("tables", "s000.t02").out.splitlines()[:35]:
        assert len(line) <= 120


# ------------------------------------------------------------------ planning by the notes' rules
def test_max_answers_by_the_notes_rule_and_says_so_everywhere(cli):
    data = cli("max", "--config", "tier3", *SCALE, "--json").data
    follow_schema(data, cli("schema", "max").data)
    assert data["accounting"] == "notes-scale"
    rows = {row["gpu"]: row for row in data["rows"]}
    assert rows["rtx4090"]["max_parameters"] == int(24 * 10**9 * 0.8 / 1.81)
    assert all(row["accounting"] == "notes-scale" for row in data["rows"])
    out = cli("max", "--config", "tier3", *SCALE).out
    assert "the notes' accounting notes-scale, not memplan's" in out.splitlines()[0]
    assert "not memplan's" in out.splitlines()[-1]
    assert "notes-scale" in cli("max", "--config", "tier3", *SCALE, "--format", "csv").out


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        (("--config", "fp16-adam", "--gpu", "rtx3060", *PRECISION), 833_222_784),
        (("--config", "tier1", "--gpu", "h100", "--gpus", "8", *PRECISION), 181_299_778_901),
        (("--config", "tier1", "--gpu-memory", "24 GB", *SCALE), 6_269_387_755),
        (("--config", "tier1", "--gpu", "rtx4090", *MINIMUM), 8_000_000_000),
    ],
)
def test_max_by_each_rule(cli, arguments, parameters):
    (row,) = cli("max", *arguments, "--json").data["rows"]
    assert row["max_parameters"] == parameters


def test_where_goes_by_the_nominal_size(cli):
    data = cli("where", "llama-2-7b", *MINIMUM, "--json").data
    follow_schema(data, cli("schema", "where").data)
    assert data["accounting"] == "notes-min-gpus"
    assert [(row["config"], row["count"], row["gpu"]) for row in data["rows"]] == [
        ("fp16-adam", 2, "h100-sxm-80gb"),
        ("tier1", 1, "rtx4090"),
    ]
    assert "the notes' accounting notes-min-gpus, not memplan's" in cli("where", "llama-2-7b", *MINIMUM).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("max", "--config", "bf16-adamw", *SCALE), "they have fp16-adam"),
        (("max", "--config", "tier3", *PRECISION), "they have fp16-adam, fp16-muon, q4-muon-int8, tier1"),
        (("max", "--gpu", "t4", *SCALE), "the notes have no GPU 't4'"),
        (("max", "--config", "tier1", "-b", "2", *SCALE), "does not take --micro-batch-size"),
        (("max", "--config", "tier1", "--set", "micro_batch_size=2", *SCALE), "does not take --set"),
        (("max", "llama-8b", "--for", "batch", *SCALE), "does not take --for batch"),
        (("max", "--config", "tier1", "--stack", "trl", *SCALE), "does not take --stack"),
        (("max", "--config", "tier1", "--host-memory", "64GiB", *SCALE), "does not take --host-memory"),
        (("where", "llama-8b", "--with", "ds.json", *MINIMUM), "does not take --with"),
        (("where", "gpt2", *MINIMUM), "has none"),
        (("where", "llama-8b", *SCALE), "takes notes-min-gpus"),
        (("where", "llama-8b", "--gpu", "h100", *MINIMUM), "does not take --gpu"),
    ],
)
def test_what_a_rule_does_not_know_is_refused(refused, arguments, said):
    assert said in refused(*arguments)


def test_the_printed_figures_of_max_are_those_of_the_table(cli, judge):
    rows = {
        (row["gpu"], row["config"]): row
        for row in cli("max", "--config", "tier1", "--gpu", "mi300x", "--json").data["rows"]
    }
    printed = judge.library.cell("s000.t02", "MI300X 192GB", "Q4+Muon 4-bit (3 B/p)").printed
    assert printed == "50.2B"
    assert rows["mi300x", "tier1"]["notes_max_parameters"] == 50_200_000_000
