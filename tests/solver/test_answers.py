"""``frontier``, ``compare``, ``max --for`` and ``where --price``: what they print, and what they refuse."""

import csv
import io

import pytest

import memplan
from tests.jobs import follow_schema

pytestmark = pytest.mark.usefixtures("answered_once")

FRONTIER = ("frontier", "llama-8b", "--gpu", "h100", "--config", "bf16-adamw-8bit")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("frontier", FRONTIER),
        ("compare", ("compare", "llama-8b", "--gpu", "rtx4090", "--gpu", "h100")),
        ("largest", ("max", "gpt2", "--for", "batch")),
        ("largest", ("max", "gpt2", "--for", "lora-rank", "--gpu-memory", "300MiB")),
    ],
)
def test_json_follows_its_schema(cli, name, arguments):
    schema = cli("schema", name).data
    follow_schema(cli(*arguments, "--json").data, schema)


# ------------------------------------------------------------------ frontier
def test_every_cell_is_a_row_of_csv(cli):
    rows = list(
        csv.DictReader(io.StringIO(cli(*FRONTIER, "--format", "csv", "--batches", "1,2", "--lengths", "512,9").out))
    )
    assert [(row["micro_batch_size"], row["sequence_length"]) for row in rows] == [
        ("1", "9"),
        ("2", "9"),
        ("1", "512"),
        ("2", "512"),
    ]
    plan = memplan.job("llama-8b", config="bf16-adamw-8bit").plan("h100", micro_batch_size=2, sequence_length=512)
    assert int(rows[-1]["device_bytes"]) == plan.expected_bytes
    assert rows[-1]["verdict"] == plan.verdict.upper()


def test_the_heat_map_is_written_to_a_file_or_shown(cli, tmp_path):
    cli(*FRONTIER, "-o", tmp_path / "map.svg")
    assert (tmp_path / "map.svg").read_text() == cli(*FRONTIER, "--format", "svg").out


def test_the_exit_code_says_whether_a_cell_fits(cli):
    tight = (
        "frontier", "llama-8b", "--gpu", "h100", "--config", "bf16-adamw-8bit", "--batches", "3", "--lengths",
        "2048",
    )  # fmt: skip
    assert cli(*FRONTIER).exit_code == 0
    assert (cli(*tight).exit_code, cli(*tight, "--strict").exit_code) == (0, 1)
    assert cli("frontier", "llama-70b", "--gpu", "rtx4090").exit_code == 1


@pytest.mark.parametrize("given", ["", "0", "1,x", "-1", "1.5", "99999999999", "1,,2", "٣"])
def test_a_bad_list_is_one_line(refused, given):
    assert "batches" in refused(*FRONTIER, "--batches", given)


# ------------------------------------------------------------------ compare
def test_configs_stand_side_by_side_with_differences_marked(cli):
    ran = cli("compare", "llama-8b", "--config", "bf16-adamw", "--config", "bf16-adamw-8bit", "--gpu", "h100", "-v")
    lines = {line[3:].split("  ")[0].strip(): line for line in ran.out.splitlines() if len(line) > 3}
    assert lines["optimizer_states"].startswith("*")
    assert lines["weights"].startswith(" ")
    assert lines["optimizer.hidden_matrix"].startswith("*")
    data = cli(
        "compare", "llama-8b", "--config", "bf16-adamw", "--config", "bf16-adamw-8bit", "--gpu", "h100", "--json"
    ).data
    assert [row["config"] for row in data["rows"]] == ["bf16-adamw", "bf16-adamw-8bit"]
    assert {item["key"].split(".")[0] for item in data["differences"]} == {"optimizer"}


def test_several_gpus_stand_side_by_side_too(cli):
    data = cli("compare", "gpt2", "--config", "lora", "--gpu", "rtx3050", "--gpu", "h100", "--json").data
    assert [row["gpu"]["name"] for row in data["rows"]] == ["rtx3050-8gb", "h100-sxm-80gb"] or len(data["rows"]) == 2
    assert data["differences"] == []


def test_every_column_is_what_fit_says(cli):
    for row in cli("compare", "llama-8b", "--config", "tier1", "--config", "qlora", "--gpu", "rtx4090", "--json").data[
        "rows"
    ]:
        fit = cli("fit", "llama-8b", "--config", row["config"], "--gpu", "rtx4090", "--json").data
        assert fit["peak"] == row["peak"]


def test_comparing_ends_with_one_where_none_fits(cli):
    assert cli("compare", "llama-70b", "--gpu", "rtx4090").exit_code == 1


# ------------------------------------------------------------------ max --for, where --price
def test_what_max_answers_fits_and_one_more_does_not(cli):
    job = ("llama-3.2-1b", "--config", "qlora", "--gpu", "rtx3050")
    flags = {"batch": ("-b",), "sequence": ("-s",), "lora-rank": ("--lora-rank",)}
    for what, flag in flags.items():
        row = cli("max", *job, "--for", what, "--json").data["rows"][0]
        here, there = (cli("fit", *job, *flag, row["value"] + more, "--json").data for more in (0, 1))
        assert here["verdict"] == "fits" != there["verdict"]
        assert [plan["peak"]["upper_bytes"] for plan in (here, there)] == [row["upper_bytes"], row["next_upper_bytes"]]


def test_the_largest_model_is_one_that_fit_says_fits(cli):
    row = cli("max", "--config", "tier3", "--gpu", "rtx4090", "--json").data["rows"][0]
    job = ("--config", "tier3", "--gpu", "rtx4090", "--json")
    assert cli("fit", row["largest_fitting_model"], *job).data["verdict"] == "fits"


def test_max_for_parameters_takes_no_model_and_the_others_need_one(refused):
    assert "searches the catalog for a model" in refused("max", "llama-8b", "--for", "parameters", "--gpu", "h100")
    assert "no model given" in refused("max", "--for", "batch", "--gpu", "h100")
    assert "has no adapters" in refused("max", "gpt2", "--for", "lora-rank", "--config", "tier1")


def test_nothing_fits_is_one(cli):
    assert cli("max", "llama-70b", "--for", "batch", "--gpu", "rtx4090").exit_code == 1
    assert cli("max", "llama-70b", "--for", "layers", "--gpu", "h100").exit_code == 0


def test_adapters_are_named_where_they_fit_and_all_weights_do_not(cli):
    fitting = cli("max", "llama-8b", "--gpu", "rtx4090").out.splitlines()[-2:]
    assert "adapters fit: add --qlora or --lora." in " ".join(line.strip() for line in fitting)
    assert "--lora" not in cli("max", "llama-8b", "--gpu", "t4").out
    assert "adapters" not in cli("max", "llama-70b", "--gpu", "rtx4090").out
    assert "adapters" not in cli("max", "llama-8b", "--gpu", "rtx4090", "--config", "bf16-adamw").out


def test_the_cheapest_comes_first(cli, write):
    path = write("prices.yaml", "currency: EUR\nprices: {h100: 2.5, l40s: 0.8, 4090: 0.1, a100-sxm-80gb: 1.25}\n")
    ran = cli("where", "llama-8b", "--config", "tier1", "--price", path, "--json")
    priced = [row for row in ran.data["rows"] if row["price_per_hour"] is not None]
    *fits, bound = priced
    assert fits == ran.data["rows"][:3]
    assert [row["price_per_hour"] for row in fits] == [0.8, 1.25, 2.5]
    assert (bound["verdict"], bound["count"], bound["price_per_hour"]) == ("bound", 2, 0.2)
    out = cli("where", "llama-8b", "--config", "tier1", "--price", path).out
    assert "0.80 EUR an hour" in " ".join(out.split())


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "h100: x", "h10x: 1", "h100: -1", "h100: true", "prices: 3", "prices: {}\nother: 1",
        "h100: 1\nh100-sxm-80gb: 2", "h100: .nan", "5",
    ],
)  # fmt: skip
def test_a_bad_price_file_is_refused(cli, write, text):
    ran = cli("where", "gpt2", "--price", write("p.yaml", text))
    assert (ran.exit_code, ran.out) == (2, "")
    assert "p.yaml:" in ran.err


def test_a_job_that_is_refused_on_several_once_it_is_played_is_placed_on_one():
    job = {"config": "fp32-adamw", "stack": "torchtitan", "micro_batch_size": 1}
    assert memplan.where("llama-3.2-1b", gpu="h100", sequence_length=500, **job).counts == {"h100-sxm-80gb": 1}
    answer = memplan.where("llama-3.2-1b", gpu="t4", sequence_length=500, **job)
    assert answer.counts == {"t4": 2}
    assert "tied head" in answer.placements.refusal


@pytest.mark.thorough
def test_every_answer_counts_what_a_host_has():
    job = {"config": "bf16-adamw", "set": {"offload.optimizer_states": "cpu"}}
    needs = memplan.plan("llama-3.2-1b", gpu="h100", **job).host_bytes
    for host, fits in ((f"{needs} B", True), (f"{needs // 2} B", False)):
        asked = {**job, "host_memory": host}
        assert (memplan.plan("llama-3.2-1b", gpu="h100", **asked).verdict == "fits") == fits
        assert bool(memplan.where("llama-3.2-1b", **asked).counts) == fits
        for of in ("batch", "sequence"):
            values = memplan.largest("llama-3.2-1b", of, gpu="h100", **asked).values
            assert bool(max(values.values())) == fits, of
        grid = memplan.frontier("llama-3.2-1b", gpu="h100", batches=[1], lengths=[512], **asked)
        assert (set(grid.verdicts.values()) == {"fits"}) == bool(grid.largest_batches[512]) == fits
        for gpu in ("h100", None):
            largest = memplan.largest(gpu=gpu, **asked).rows[0].largest_fitting
            assert largest is not None
            assert not memplan.plan(largest, gpu="b300", **asked).memory.exceeds_host


def test_compare_says_what_a_job_needs_where_its_allocator_holds_more_than_the_card_has(cli):
    rows = cli("compare", "llama-8b", "-c", "bf16-adamw", "-c", "bf16-adamw-8bit", "--gpu", "h100").out.splitlines()
    needs = next(row for row in rows if row.split()[1:2] == ["needs"])
    assert needs.split()[2:4] == ["79.11", "GiB"]
    rows = cli("compare", "llama-8b", "-c", "qlora", "-c", "lora", "--gpu", "h100").out.splitlines()
    assert not any(row.split()[1:2] == ["needs"] for row in rows)
