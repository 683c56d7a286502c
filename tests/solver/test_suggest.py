"""``memplan suggest``: its answers are configs whose figures are those of ``fit``, and of the trace."""

import json
from dataclasses import replace

import pytest
import yaml

import memplan
from memplan.library.lookup import Overrides, find_setup, parallels
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.best_first import Search
from memplan.solver.search.suggested_settings import Request, space_of, under_layout
from tests.jobs import follow_schema

ON_4090 = ("suggest", "llama-8b", "--gpu", "rtx4090")
BYTES = ("components", "instants", "peak", "persistent_bytes", "host", "verdict", "training")


pytestmark = pytest.mark.usefixtures("answered_once")


@pytest.fixture
def rows(cli):
    return lambda *arguments: cli("suggest", *arguments, "--json").data["rows"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("llama-8b", "--gpu", "rtx4090", "--experimental"),
        ("llama-8b", "--gpu", "h100", "--min-step-batch", "12"),
        ("gpt2", "--gpu-memory", "3GiB"),
        ("qwen3-30b-a3b", "--gpu", "b200", "--experimental", "--most", "3"),
        ("llama-8b", "--gpu", "rtx4090", "--config", "lora", "--min-batch", "2"),
        ("gemma-2-2b", "--gpu", "rtx4090", "--set", "reserve=1 GiB", "--set", "clip_gradients=true"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
@pytest.mark.thorough
@pytest.mark.one_in(3)
def test_saved_configs_give_fit_the_same_bytes(cli, tmp_path, arguments):
    ran = cli("suggest", *arguments, "--json", "--save", tmp_path)
    assert ran.exit_code == 0
    device = arguments[1:3]
    for row in ran.data["rows"]:
        fit = cli("fit", arguments[0], *device, "--config", tmp_path / f"{row['config']}.yaml", "--json")
        assert fit.exit_code == 0
        assert {key: fit.data[key] for key in BYTES} == {key: row[key] for key in BYTES}


@pytest.mark.parametrize("name", ["best.yaml", "best.json"])
def test_the_best_can_be_saved_to_a_file(cli, tmp_path, name):
    row = cli(*ON_4090, "--experimental", "--json", "--save", tmp_path / name).data["rows"][0]
    saved = yaml.safe_load((tmp_path / name).read_text())
    assert saved == row["training"]
    assert cli("fit", "llama-8b", "--gpu", "rtx4090", "--config", tmp_path / name, "--json").data["peak"] == row["peak"]


def test_the_json_of_one_answer_is_a_config(cli, write, rows):
    row = rows("llama-8b", "--gpu", "h100")[0]
    path = write("row.json", json.dumps(row))
    assert cli("fit", "llama-8b", "--gpu", "h100", "--config", path, "--json").data["peak"] == row["peak"]


def test_answers_follow_the_schema(cli):
    schema = cli("schema", "suggest").data
    follow_schema(cli(*ON_4090, "--experimental", "--json").data, schema)


def test_coded_weights_whose_gradients_are_released_layer_by_layer_are_searched(cli):
    """What ``fit`` says fits, ``suggest`` does not call impossible."""
    job = ("qwen3-14b", "--gpu-memory", "24.5GiB", "--config", "tier1")
    fit = cli("fit", *job, "--set", "gradients.lifetime=layer", "--checkpointing", "full")
    kept = [part for axis in ("weights", "optimizer", "offload", "gradients") for part in ("--keep", axis)]
    ran = cli("suggest", *job, *kept, "--experimental", "--json")
    assert (fit.exit_code, ran.exit_code) == (0, 0)
    assert {row["training"]["gradients"]["lifetime"] for row in ran.data["rows"]} == {"layer"}


# ------------------------------------------------------------------ what is asked is kept
@pytest.mark.thorough
def test_experimental_settings_are_found_only_when_asked_and_say_so(cli):
    job = (*ON_4090, "--keep", "offload")
    without = cli(*job)
    assert without.exit_code == 1
    assert "add --experimental" in without.out
    found = cli(*job, "--experimental")
    assert found.exit_code == 0
    assert "These settings are experimental." in found.out
    data = cli(*job, "--experimental", "--json").data
    assert {row["parts_status"] for row in data["rows"]} == {"experimental"}
    assert all(row["verdict"] == "fits" and "adapter" not in row["training"] for row in data["rows"])
    assert data["combinations"] >= 100_000
    assert len(data["rows"]) >= 3


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (("--set", "weights=q4-0", "--experimental"), "weights.hidden_matrix", "q4-0"),
        (("--set", "kernels.loss=fp32"), "kernels.loss", "fp32"),
        (("--set", "sequence_length=1024"), "sequence_length", 1024),
        (("-b", "2"), "micro_batch_size", 2),
        (("--checkpointing", "full"), "activation_checkpointing", "full"),
        (("--keep", "optimizer"), "optimizer.hidden_matrix", "adamw-bf16"),
        (("--config", "muon", "--keep", "optimizer", "--keep", "weights"), "optimizer.hidden_matrix", "muon-fp32"),
        (("--min-sequence", "4096"), "sequence_length", 4096),
        (("--keep", "allocator"), "allocator", "native"),
        (("--keep", "offload"), "offload.optimizer_states", "none"),
        (("--set", "offload.optimizer_states=cpu", "--experimental"), "offload.optimizer_states", "cpu"),
    ],
    ids=str,
)
@pytest.mark.thorough
@pytest.mark.one_in(4)
def test_what_is_fixed_stays(rows, arguments, key, value):
    found = rows("llama-8b", "--gpu", "b200", *arguments)
    assert found
    for row in found:
        here = row["training"]
        for part in key.split("."):
            here = here[part]
        assert here == value


def test_batches_are_as_large_as_asked(rows):
    for row in rows("qwen3-0.6b", "--gpu", "h100", "--min-batch", "5", "--min-step-batch", "100"):
        training = row["training"]
        assert training["micro_batch_size"] >= 5
        assert training["micro_batch_size"] * training["gradient_accumulation_steps"] >= 100


@pytest.mark.thorough
def test_ranks_go_by_status_and_then_by_tenths_of_time(rows):
    found = rows("llama-8b", "--gpu", "h100", "--experimental", "--most", "50")
    order = ["proven", "works", "experimental"]
    ranks = [(row["verdict"] != "fits", order.index(row["parts_status"])) for row in found]
    assert ranks == sorted(ranks)
    assert all(row["estimate"]["tokens_per_second"] > 0 for row in found)


def test_what_fits_comes_before_what_is_tight(rows):
    verdicts = [row["verdict"] for row in rows("qwen2.5-1.5b", "--gpu", "t4")]
    assert verdicts == sorted(verdicts)
    assert set(verdicts) == {"fits", "tight"}


def test_strict_takes_no_tight_ones(cli):
    job = (
        "suggest", "gpt2", "--set", "allocator=native", "-s", "128", "--keep", "weights", "--keep", "optimizer",
        "--keep", "offload", "--json",
    )  # fmt: skip
    peak = cli(*job, "--gpu-memory", "1GiB").data["nearest_miss"]["plan"]["peak"]
    between = ("--gpu-memory", f"{(peak['device_bytes'] + peak['upper_bytes']) // 2} bytes")
    loose, strict = cli(*job, *between), cli(*job, *between, "--strict")
    assert (loose.exit_code, strict.exit_code) == (0, 1)
    assert {row["verdict"] for row in loose.data["rows"]} == {"tight"}
    assert strict.data["rows"] == []


@pytest.mark.slow
def test_nothing_that_fits_is_a_near_miss_and_a_gpu_that_would_do(cli, tmp_path):
    ran = cli("suggest", "llama-70b", "--gpu", "rtx4090", "--experimental", "--json", "--save", tmp_path / "x.yaml")
    assert ran.exit_code == 1
    assert not (tmp_path / "x.yaml").exists()
    miss = ran.data["nearest_miss"]
    peak, usable = miss["plan"]["peak"], miss["plan"]["gpu"]["usable_bytes"]
    assert miss["over_bytes"] == peak["upper_bytes"] - usable > 0
    assert miss["smallest_gpu"] in cli("suggest", "llama-70b", "--gpu", "rtx4090", "--experimental").out
    again = cli("suggest", "llama-70b", "--gpu", miss["smallest_gpu"], "--experimental", "--json")
    assert again.exit_code == 0


def test_a_config_that_fits_has_an_answer(cli):
    job = ("qwen2.5-0.5b", "--config", "qlora", "--gpu-memory", "2GiB")
    assert cli("fit", *job).exit_code == 0
    assert cli("suggest", *job).exit_code == 0


def test_linear_attention_is_timed_and_what_runs_it_is_said(cli):
    job = ("qwen3.5-0.8b", "--gpu", "rtx4090")
    ran = cli("suggest", *job, "--config", "qlora", "--most", "1")
    assert ran.exit_code == 0
    assert "kernels.linear_attention=fla" in ran.out
    assert "rows with images need more" in ran.out
    assert "--stack trl" in cli("suggest", *job).err


def test_what_is_not_modelled_is_refused(cli):
    assert cli("suggest", "llama-8b", "--gpu", "rtx4090", "--set", "parallel.tensor=2").exit_code == 3
    assert cli("suggest", "llama-8b", "--gpu", "rtx4090", "--set", "offload.weights=cpu").exit_code == 3
    assert "weights or activations in host memory" in cli(*ON_4090).out


def test_states_in_host_memory_make_an_answer_and_say_how_much_they_take(cli):
    ran = cli(*ON_4090)
    row = cli(*ON_4090, "--json").data["rows"][0]
    gib = row["host"]["bytes"] / 2**30
    assert row["training"]["offload"]["optimizer_states"] == "cpu"
    assert f"{gib:.2f} GiB of pinned host memory" in ran.out
    assert f"optimizer states take {gib:.2f} GiB of host memory" in row["gives_up"]
    assert "32 GB/s each way (pcie-4-x16)" in ran.out


def test_an_answer_without_host_memory_keeps_its_place(rows):
    found = [row["training"] for row in rows("qwen3-14b", "--gpu", "rtx4090", "--experimental")]
    recipes = {(keys["offload"]["optimizer_states"], keys["weights"]["hidden_matrix"]) for keys in found}
    assert {("cpu", "q4-0"), ("none", "q5-b64"), ("none", "q6-b64")} <= recipes  # each has a record that it learns
    assert {keys["optimizer"]["hidden_matrix"] for keys in found} >= {"muon-ternary"}


@pytest.mark.parametrize("limit", [0, 16])
@pytest.mark.thorough
@pytest.mark.one_in(2)
def test_offloaded_states_take_no_more_host_memory_than_is_allowed(rows, limit):
    found = rows(*ON_4090[1:], "--experimental", "--most", "50", "--host-memory", f"{limit} GiB")
    held = [r["host"]["bytes"] for r in found if r["training"]["offload"]["optimizer_states"] == "cpu"]
    assert bool(held) == (limit > 0)
    assert all(size <= limit * 2**30 for size in held)


def test_memory_that_the_cpu_shares_takes_no_offloaded_states(cli, rows):
    found = rows("gpt2", "--gpu", "dgx-spark", "--experimental")
    assert {row["training"]["offload"]["optimizer_states"] for row in found} == {"none"}
    assert cli("suggest", "gpt2", "--gpu", "dgx-spark", "--set", "offload.optimizer_states=cpu").exit_code == 3


def test_a_mistyped_axis_is_named(refused):
    assert "did you mean 'optimizer'" in refused(*ON_4090, "--keep", "optimiser")


def test_a_folder_that_cannot_be_written_is_one_line(refused, tmp_path):
    (tmp_path / "file").write_text("")
    refused("suggest", "gpt2", "--gpu", "rtx4090", "--save", tmp_path / "file" / "folder")


# ------------------------------------------------------------------ the trace agrees
@pytest.mark.parametrize("index", [1, *(pytest.param(other, marks=pytest.mark.slow) for other in (0, 2, 3, 4))])
@pytest.mark.thorough
def test_saved_configs_give_the_trace_the_same_bytes(cli, catalog, model, tmp_path, index):
    pytest.importorskip("torch")
    from memplan.trace.tracer import trace_training

    row = cli(*ON_4090, "--experimental", "--json", "--save", tmp_path).data["rows"][index]
    setup = find_setup(str(tmp_path / f"{row['config']}.yaml"), Overrides(), catalog)
    planned = CompiledPlan(model("llama-8b"), setup).evaluate(Device(catalog.gpus["rtx4090"], "rtx4090"))
    traced = trace_training(model("llama-8b"), setup)
    assert planned.verdict == "fits"
    assert traced.peak_bytes == planned.requested_bytes == row["peak"]["requested_bytes"]


# ------------------------------------------------------------------ several GPUs
QUANTISED = {"gpu": "rtx3060", "gpus": 4, "config": "qlora", "micro_batch_size": 1, "sequence_length": 8192}


def test_frozen_codes_are_searched_on_several_gpus_and_fsdp1_alone_shards_them(catalog):
    answer = memplan.suggest("gpt2", gpu="rtx3060", gpus=2, config="qlora", most=1)
    assert answer.verdict == "fits"
    assert memplan.plan("gpt2", gpu="rtx3060", config=answer.rows[0].training).upper_bytes == answer.rows[0].upper_bytes
    ways = parallels(catalog.configs["qlora"].parallel, 2, fixed=False, coded=True)
    assert {(way.engine, way.zero_stage) for way in ways} == {("torch", 3), ("torch", 0), ("fsdp1", 3)}


def test_a_search_counts_every_layer_that_fsdp1_shards(catalog, model):
    own = catalog.configs["lora"]
    parallel = replace(own.parallel, data=4, zero_stage=3, engine="fsdp1")
    request = Request(base=replace(own, parallel=parallel, stack="trl"), parallels=(parallel,))
    space = under_layout(space_of(request, catalog), parallel)
    state = next(one for one in space.states(catalog) if one.optimizer["default"] == "adamw-fp32")
    way = next(space.passes())
    device = Device(catalog.gpus["a100"], "a100")
    sizes = Search(model("llama-1b"), space, device, 2048, catalog, experimental=False).sizes
    assert sizes.persistent_bytes(state) == sizes.plan(state, way, 1).constant_bytes


def test_what_is_promised_of_sharding_codes_by_fsdp1_is_what_its_plan_says():
    plan = memplan.plan("llama-8b", **QUANTISED)
    assert not plan.memory.reserve_by_share
    changed = {change.change: change for change in plan.suggestions}["parallel.engine=fsdp1"]
    other = memplan.plan("llama-8b", **QUANTISED, set={"parallel.engine": "fsdp1"}).memory
    assert not other.reserve_by_share
    assert changed.needed_bytes == other.needed_bytes
    assert [own.text for own in changed.own] == [
        "fsdp: full_shard",
        "fsdp_config: {fsdp_version: 1}",
        "bnb_4bit_quant_storage: bfloat16",
    ]


def test_no_change_is_combined_with_another_where_it_is_enough_by_itself():
    plan = memplan.plan("llama-8b", gpu="rtx4090", config="lora", micro_batch_size=4, sequence_length=4096)
    enough = [set(change.change.split(" ")) for change in plan.suggestions if change.flips_verdict]
    assert {"micro_batch_size=2"} in enough
    assert not any(one < other for one in enough for other in enough)
