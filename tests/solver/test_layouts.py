"""How several GPUs share a job: what ``memplan suggest --gpus`` finds is what trying everything finds, and what fit says of it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import CannotAnswerError
from memplan.report.json_schemas import schema_of
from memplan.solver.layouts import layout_search
from memplan.solver.layouts.degrees import LayoutSpace, layouts
from memplan.solver.layouts.layout_search import NOTABLE
from memplan.solver.search.cluster import Cluster
from tests.jobs import follow_schema

SMALL = memplan.Shapes(
    layers=2, hidden=512, intermediate=1024, heads=8, kv_heads=4, head_dim=64, vocab=1000, tied=False
)


@pytest.fixture(scope="module")
def device(catalog):
    """A small GPU on a link whose bandwidth is known."""
    gpu = catalog.gpus["h100-sxm-80gb"]
    size = 16 * 2**30
    return memplan.Device(replace(gpu, memory_bytes=size, cuda_total_bytes=size), "h100-sxm-80gb")


@pytest.fixture(scope="module")
def searched(catalog, device):
    """One search, with all its arms."""
    arms = []
    real = layout_search.front
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_search, "front", lambda own, *given, **rest: arms.extend(own) or real(own, *given, **rest))
        answer = memplan.suggest_layouts(
            shapes=SMALL, gpu=device, gpus=16, sequence_length=8192, most=100, catalog=catalog
        )
    return answer, arms


def test_the_front_is_what_trying_everything_finds(searched, device):
    answer, arms = searched
    tried = []
    for arm in arms:
        for batch, steps in arm.batches:
            time = arm.clock.step(batch, arm.length, steps)
            spot = arm.spot(device, batch, steps, time, 2**60)
            if spot is not None and spot.upper_bytes <= arm.usable_bytes(device):
                tried.append(spot)
    assert len(tried) > 20
    expected = []
    for spot in sorted(tried, key=lambda one: one.time.token_femtoseconds):
        if not expected or spot.upper_bytes <= expected[-1].upper_bytes * (NOTABLE - 1) // NOTABLE:
            expected.append(spot)
    assert [row.spot for row in answer.front.rows] == expected
    assert len(expected) > 2


def test_each_row_saved_and_planned_again_has_the_same_bytes(searched, device, catalog):
    answer, _ = searched
    for row in answer.rows[:3]:
        again = memplan.plan(shapes=SMALL, gpu=device, config=row.training, catalog=catalog).memory.by_share
        assert again is None or again.upper_bytes == row.upper_bytes
        assert row.verdict == "fits"
    for found in answer.front.rows:
        apart = found.plan.apart_bytes  # of a CUDA graph, which a search leaves out
        upper, expected = found.plan.upper_bytes - apart, found.plan.device_bytes - apart
        assert (upper, expected) == (found.spot.upper_bytes, found.spot.device_bytes)


def test_json_is_what_its_schema_says_and_names_stack_degrees_and_traffic(searched):
    document = searched[0].document()
    follow_schema(document.data, schema_of("layouts"))
    row = document.data["rows"][0]
    assert row["layout"]["data"] * row["layout"]["tensor"] == 16
    assert row["sent"]["inside_bytes"] + row["sent"]["between_bytes"] > 0


@settings(max_examples=60, deadline=None)
@given(gpus=st.integers(1, 20_000), per_node=st.sampled_from((1, 4, 8, 72)))
def test_every_layout_uses_all_gpus_and_shares_matrices_within_a_node(catalog, gpus, per_node):
    stack = catalog.stack("torchtitan")
    for config in layouts(TrainingConfig(""), stack, LayoutSpace(gpus, per_node)):
        parallel = config.parallel
        assert parallel.data * parallel.tensor == gpus
        assert per_node % parallel.tensor == 0


@settings(max_examples=60, deadline=None)
@given(sent=st.integers(0, 2**50), ranks=st.integers(1, 4096), stride=st.integers(1, 64), per_node=st.integers(1, 72))
def test_what_is_sent_goes_over_one_link_or_the_other(sent, ranks, stride, per_node):
    cluster = Cluster(per_node, "nvlink-4", 450, "infiniband-400g", 50)
    inside, between = cluster.split(sent, ranks, stride)
    assert inside + between == sent
    assert min(inside, between) >= 0
    assert (between == 0) or cluster.spans(ranks, stride)
    assert 0 < cluster.bytes_per_second(ranks, stride) <= 450
    alone = replace(cluster, between=0)
    if cluster.spans(ranks, stride):
        with pytest.raises(CannotAnswerError, match="give --network"):
            alone.bytes_per_second(ranks, stride)
    else:
        assert alone.bytes_per_second(ranks, stride) == 450


@pytest.mark.parametrize(
    ("given", "told", "code"),
    [
        (
            ("--gpus", "64", "--tp", "3"),
            "64 GPUs are no multiple of tensor x pipeline x context = 3; the nearest that is: 63",
            2,
        ),
        (("--gpus", "64", "--tp", "16"), "16 GPUs do not share 8 key and value heads of Llama-3.1-8B evenly; 8 do", 2),
        (
            ("--gpus", "8", "--network", "ethernet-10"),
            "no network is called 'ethernet-10'; did you mean 'ethernet-10g'?",
            2,
        ),
        (("--network", "ethernet-10g"), "--network joins nodes of several GPUs: add --gpus", 2),
        (("--gpus", "8", "--pp", "2"), "suggest does not search pipelines yet; memplan fit plans one", 3),
    ],
)
def test_what_cannot_be_divided_is_one_clear_line(cli, given, told, code):
    ran = cli("suggest", "llama-8b", "--gpu", "h100", *given)
    assert ran.exit_code == code
    assert told in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_what_joins_nodes_has_to_be_known(cli):
    ran = cli("suggest", "llama-8b", "--gpu", "rtx4090", "--gpus", "64")
    assert (ran.exit_code, "give --network" in ran.err) == (3, True)
    ran = cli("suggest", "llama-8b", "--gpus", "64x rtx4090", "--network", "ethernet-100g", "--most", "1", "--json")
    assert ran.data["cluster"]["network_bytes_per_second"] == 12_500_000_000


def test_gpus_come_in_all_spellings(cli):
    ways = (("--gpu", "h100", "--gpus", "16"), ("--gpus", "16x h100"), ("--gpu", "h100", "--nodes", "2"))
    rest = ("--most", "1", "--tp", "2", "-b", "1", "--checkpointing", "full", "--json")
    answers = [cli("suggest", "llama-8b", *way, *rest).data for way in ways]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["gpus"] == 16
    nodes = cli("suggest", "llama-8b", *ways[0], "--nodes", "4", *rest).data["cluster"]
    assert (nodes["gpus_per_node"], nodes["network"]) == (4, "infiniband-400g")


def test_nothing_fits_names_the_nearest_miss(cli):
    ran = cli("suggest", "llama-70b", "--gpu", "rtx4090", "--gpus", "2", "--checkpointing", "full")
    assert ran.exit_code == 1
    assert "NO: none of" in ran.out
    assert "nearest miss" in ran.out


def test_where_names_the_smallest_real_grid_and_what_pooled_memory_allows(device, catalog):
    small = replace(device, gpu=replace(device.gpu, memory_bytes=9 * 2**30, cuda_total_bytes=9 * 2**30))
    job = {"shapes": SMALL, "gpu": small, "config": "mixed-adamw", "stack": "torchtitan", "catalog": catalog}
    job |= {"micro_batch_size": 48, "sequence_length": 2048, "activation_checkpointing": "full"}
    row = memplan.where(**job).placements.rows[0]
    parallel = row.plan.setup.config.parallel
    assert row.count == parallel.gpus > 1
    for gpus in range(2, row.count + 1):
        found = memplan.suggest_layouts(**job, gpus=gpus, strict=True)
        assert bool(found.rows) == (gpus == row.count), gpus


def test_fewer_gpus_than_where_names_do_not_hold_a_job_and_where_not_all_were_tried_one_fewer_does_not():
    for gpu, count, edge, tried in (("rtx5090", 7, False, range(2, 7)), ("rtx4090", 29, True, [28])):
        (row,) = memplan.where("llama-8b", gpu=gpu).placements.rows
        assert (row.count, row.edge) == (count, edge)
        verdicts = [
            memplan.plan("llama-8b", gpu=gpu, config="bf16-adamw", gpus=number).verdict for number in (*tried, count)
        ]
        assert [verdict == "fits" for verdict in verdicts] == [*[False] * len(tried), True]


def test_no_way_to_share_a_job_undercuts_what_pooled_memory_allows(catalog):
    answer = memplan.where("llama-3.1-8b", gpu="rtx4090", config="bf16-adamw", activation_checkpointing="full")
    (row,) = answer.placements.rows
    assert 1 < row.bound <= row.count
    assert answer.document().data["rows"][0]["bound"] == row.bound


def test_ranks_whose_shards_are_smaller_have_rows_of_their_own(cli):
    ask = ("fit", "llama-8b", "--gpu", "h100", "--gpus", "12", "--config", "mixed-adamw", "--rank")
    data = cli(*ask, "all", "--json").data
    follow_schema(data, schema_of("ranks"))
    fullest, last = data["rows"]
    assert (fullest["ranks"], last["ranks"], last["first"]) == (11, 1, 11)
    whole = cli(*ask[:-1], "--json").data
    assert fullest["device_bytes"] == whole["peak"]["device_bytes"]
    (states,) = (
        line["bytes"]
        for line in cli(*ask[:4], *ask[6:8], "--json").data["components"]
        if line["name"] == "optimizer_states"
    )
    assert 11 * fullest["state_bytes"] + last["state_bytes"] == states > 12 * last["state_bytes"]
    assert cli(*ask, "11", "--json").data["rows"] == [last]
    told = cli(
        *ask[:5], "8", "--config", "mixed-adamw", "--set", "parallel.zero_stage=0", "--rank", "all", "--json"
    ).data
    assert [row["ranks"] for row in told["rows"]] == [8]


def test_frontier_and_compare_take_layouts(cli):
    layout = ("--gpus", "16x h100", "--tp", "4", "--sequence-parallel", "--stack", "torchtitan")
    layout += ("--set", "zero_gradients=free")  # cells leave out what a CUDA graph keeps apart
    cells = cli(
        "frontier", "llama-8b", *layout, "-c", "mixed-adamw", "--batches", "2", "--lengths", "4k", "--json"
    ).data["rows"]
    (compared,) = cli(
        "compare", "llama-8b", *layout, "-c", "mixed-adamw", "--set", "micro_batch_size=2", "-s", "4k", "--json"
    ).data["rows"]
    assert compared["training"]["parallel"]["data"] == 4
    degrees = {"data": 4, "tensor": 4, "sequence": True, "zero_stage": 3}
    given = {"zero_gradients": "free", **{f"parallel.{key}": value for key, value in degrees.items()}}
    job = memplan.job("llama-8b", config="mixed-adamw", stack="torchtitan", set=given)
    by_share = job.plan("h100", micro_batch_size=2, sequence_length=4096)
    assert cells[0]["upper_bytes"] == by_share.upper_bytes
