"""Inverse answers: what is answered fits, and the next does not, by the verdict that ``fit`` gives."""

from itertools import product

import pytest

import memplan
from memplan.catalog.kernel_profiles import Kernels
from memplan.errors import InvalidFileError
from memplan.library.answers.planned_job import plan_by_share
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.solver.batch_frontier import frontier
from memplan.solver.largest_per_device import largest_values
from memplan.solver.largest_value import MOST_BATCH, gauge_of, largest, largest_batch, longest_sequence, with_layers

CASES = {
    "plain": {},
    "chunked": {"kernels": Kernels(loss="chunked", loss_chunks=7)},
    "math": {"kernels": Kernels(attention="math")},
    "full": {"activation_checkpointing": "full"},
    "q4": {"weights": {"hidden_matrix": "q4-0", "default": "bf16"}, "optimizer": {"default": "muon-int8"}},
    "expandable": {"allocator": "expandable", "weights": {"default": "fp32"}},
}
MODELS = ("gpt2", "gpt-oss-20b", "llama-3.1-8b")
GOOD = {False: ("fits",), True: ("fits", "tight")}


@pytest.fixture
def device(catalog):
    return lambda name, count=1: Device(catalog.gpus[name], catalog.gpus.name_of(name), count)


@pytest.mark.parametrize(("name", "case"), list(product(MODELS, CASES)))
@pytest.mark.parametrize("tight", [False, True])
def test_the_largest_batch_and_sequence_fit_and_the_next_do_not(model, setup_of, device, name, case, tight):
    plan = CompiledPlan(model(name), setup_of(**CASES[case]))
    for gpu, size in product(("rtx3050", "h100", "b200"), (1, 200, 1000)):
        on = device(gpu)
        most = gauge_of(plan.setup, on).most_requested_bytes(tight) - plan.rounding_bytes
        batch = largest_batch(plan, size, most)
        assert batch.value == 0 or plan.evaluate(on, batch.value, size).verdict in GOOD[tight]
        assert batch.bounded or plan.evaluate(on, batch.value + 1, size).verdict not in GOOD[tight]
        length = longest_sequence(plan, size, most)
        assert length.value == 0 or plan.evaluate(on, size, length.value).verdict in GOOD[tight]
        assert length.bounded or plan.evaluate(on, size, length.value + 1).verdict not in GOOD[tight]


@pytest.mark.parametrize("most", [1, 2, 3, 17, 100])
@pytest.mark.parametrize("guess", [1, 2, 50, 10**9])
def test_the_search_finds_every_limit_from_every_guess(most, guess):
    for limit in range(most + 3):
        found = largest(lambda n, limit=limit: n <= limit, most, guess)
        assert found.value == min(limit, most)
        assert found.bounded == (limit >= most)


def test_learned_positions_end_the_sequence(model, setup_of, device):
    plan = CompiledPlan(model("gpt2"), setup_of("bf16-adamw"))
    assert longest_sequence(plan, 1, 2**50).value == 1024
    assert longest_sequence(plan, 1, 2**50).bounded


def test_absurd_bounds_end_where_the_input_does(model, setup_of):
    plan = CompiledPlan(model("gpt2"), setup_of("bf16-adamw"))
    assert largest_batch(plan, 1, 2**80).value == MOST_BATCH
    assert largest_batch(plan, 1024, -1).value == 0
    assert longest_sequence(plan, 1, -1).value == 0


# ------------------------------------------------------------------ max --for
@pytest.mark.parametrize("what", ["batch", "sequence", "layers", "lora-rank"])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.1-8b", "gemma-2-2b"])
def test_every_largest_value_fits_and_one_more_does_not(model, setup_of, device, what, name):
    setup = setup_of("lora" if what == "lora-rank" else "bf16-adamw-8bit")
    for row in largest_values(what, model(name), setup, [device(gpu) for gpu in ("rtx3050", "rtx4090", "h100")]):
        assert row.plan is None or row.plan.verdict == "fits"
        assert (row.plan is None) == (row.fits.value == 0)
        assert row.following is None or row.following.verdict != "fits"
        assert row.following is not None or row.fits.bounded
        assert row.tight.value >= row.fits.value


def test_a_rank_without_adapters_is_refused(model, setup_of, device):
    with pytest.raises(InvalidFileError, match="has no adapters"):
        largest_values("lora-rank", model("gpt2"), setup_of("bf16-adamw"), [device("h100")])


def test_as_many_layers_as_the_model_has_is_the_model(model):
    for name in ("llama-3.1-8b", "deepseek-v2-lite", "gemma-2-2b"):
        whole = model(name)
        assert with_layers(whole, whole.spec.num_hidden_layers).inventory == whole.inventory
        assert with_layers(whole, 1).spec.num_hidden_layers == 1
        assert with_layers(whole, 99).spec.num_hidden_layers == 99


# ------------------------------------------------------------------ the frontier
@pytest.mark.parametrize("gpu", ["rtx4090", "h100"])
@pytest.mark.parametrize("config", ["bf16-adamw-8bit", "qlora", "tier3"])
def test_the_frontier_is_where_scanning_finds_it(model, setup_of, device, gpu, config):
    plan, on = CompiledPlan(model("llama-3.1-8b"), setup_of(config)), device(gpu)
    grid = frontier(plan, on, range(1, 13), (512, 1000, 2048))
    for edge, row in zip(grid.by_length, grid.cells, strict=True):
        scanned = [cell.batch for cell in row if cell.verdict == "fits"]
        assert scanned == list(range(1, min(edge.fits.value, 12) + 1))
        scanned = [cell.batch for cell in row if cell.verdict != "no"]
        assert scanned == list(range(1, min(edge.tight.value, 12) + 1))
    for cell in (cell for row in grid.cells for cell in row):
        answer = plan.evaluate(on, cell.batch, cell.length)
        assert (cell.verdict, cell.requested_bytes) == (answer.verdict, answer.requested_bytes)
        assert (cell.device_bytes, cell.upper_bytes) == (answer.device_bytes, answer.upper_bytes)


def test_the_frontier_counts_what_a_captured_step_keeps_apart(model, setup_of, device):
    setup = setup_of(stack="torchtitan", kernels=Kernels(optimizer="foreach"))
    plan, on = CompiledPlan(model("qwen3-0.6b"), setup), device("rtx3060")
    grid = frontier(plan, on, (1, 2, 4, 6), (1024,))
    for cell in grid.cells[0]:
        answer = plan.evaluate(on, cell.batch, cell.length)
        assert answer.apart_bytes > 2**29
        assert (cell.verdict, cell.upper_bytes) == (answer.verdict, answer.upper_bytes)
    (edge,), (first, *_) = grid.by_length, grid.by_batch
    assert (
        plan.evaluate(on, edge.fits.value, 1024).verdict
        == "fits"
        != plan.evaluate(on, edge.fits.value + 1, 1024).verdict
    )
    assert (
        plan.evaluate(on, 1, first.fits.value).verdict == "fits" != plan.evaluate(on, 1, first.fits.value + 1).verdict
    )


def test_a_sequence_that_ranks_share_is_a_multiple_of_them():
    keys = {"parallel.tensor": 4, "parallel.zero_stage": 3, "parallel.sequence": True}
    answer = memplan.largest(
        "llama-3.1-8b", of="sequence", gpu="h100", config="mixed-adamw", stack="torchtitan", set=keys
    )
    assert answer.rows[0].fits.value % 4 == 0
    assert answer.rows[0].plan.verdict == "fits"


@pytest.mark.parametrize("keys", [{}, {"parallel.zero_stage": 3}])
def test_gpus_share_a_job_whose_largest_values_are_sought_as_one_that_is_planned(keys):
    options = {"gpu": "rtx4090", "gpus": 2, "config": "bf16-adamw", "stack": "trl", "set": keys}
    (row,) = memplan.largest("gpt2", of="batch", **options).rows
    most = row.fits.value
    verdicts = [memplan.plan("gpt2", micro_batch_size=batch, **options).verdict for batch in (most, most + 1)]
    assert verdicts[0] == "fits" != verdicts[1]
    length = row.plan.sequence_length
    by_share = {(batch, length): plan_by_share("gpt2", micro_batch_size=batch, **options) for batch in (8, most, 9999)}
    frontier = memplan.frontier("gpt2", batches=[8, most, 9999], lengths=[length], **options)
    assert frontier.verdicts == {at: plan.verdict for at, plan in by_share.items()}
