"""The search over several GPUs: what it finds is what trying everything finds, and what fit says of it."""

from dataclasses import replace

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.training_config import Gradients
from memplan.documents.schemas import validate
from memplan.errors import CannotAnswerError, MemplanError
from memplan.library.lookup import custom_gpu
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.axes import full_space, with_fixed_axes
from memplan.solver.search.best_first import Search
from memplan.solver.search.evidence_levels import Evidence
from memplan.solver.search.space import optimizer_names
from memplan.solver.search.suggested_settings import Request, joint_outcome, spaces_by_layout, suggestions, under_layout
from memplan.training.resolution.resolve_config import resolve
from memplan.units import GIB
from tests.solver.test_search import everything, front

LENGTH = 256
BOTH = (Parallel(4, 3), Parallel(4, 0))


def small(memory):
    return Device(custom_gpu(int(memory * GIB), f"{memory} GiB"), f"a GPU of {memory} GiB")


@pytest.fixture(scope="module")
def space(catalog):
    base = replace(catalog.configs["bf16-adamw"], sequence_length=LENGTH)
    whole = full_space(base, catalog, (1, 2, 8))
    by_name = {choice.name: choice for choice in whole.weights}
    return replace(
        with_fixed_axes(whole, ("gradients", "allocator"), catalog),
        weights=tuple(by_name[name] for name in ("fp32 under bf16 autocast", "bf16", "fp16", "q4-0")),
        optimizers=tuple({"default": name} for name in ("adamw-fp32", "adamw-bf16", "adamw-8bit-bnb", "muon-bf16")),
        checkpointing=("none", "full"),
        step_batch=8,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("memory", [3.0, 4.5, 8.0])
@pytest.mark.one_in(3)
def test_the_search_finds_what_exhaustive_enumeration_finds(catalog, model, space, memory):
    searches = [
        Search(model("gpt2"), one, small(memory), LENGTH, catalog, experimental=True)
        for one in spaces_by_layout(space, BOTH)
    ]
    tried = [found for search in searches for found in everything(search)]
    outcome = joint_outcome([search.run() for search in searches])
    assert {item.objectives for item in outcome.front} == front(tried)
    for item in outcome.front:
        assert item.plan.evaluate(small(memory), item.batch, LENGTH).verdict == "fits"


def test_the_states_searched_are_all_that_can_be_planned(catalog, model, space):
    for parallel in BOTH:
        one = under_layout(space, parallel)
        search = Search(model("gpt2"), one, small(8), LENGTH, catalog, experimental=True)
        evidence, allowed = Evidence(catalog, False), []
        for state in one.states(catalog):
            weights = state.weights
            names = optimizer_names(state.optimizer, catalog)
            standing = evidence.standing(
                weights.dtype, weights.dtype, state.gradient or weights.dtype, state.master, names
            )
            try:
                search.sizes.setup(state)
            except MemplanError:
                continue
            if standing.status != "diverges":
                allowed.append(state)
        assert [state for state, _ in search.states] == allowed
        assert allowed


def test_each_answer_saved_and_planned_again_has_the_same_bytes(catalog, model):
    device = Device(catalog.gpus["rtx4090"], "rtx4090")
    request = Request(catalog.configs["bf16-adamw"], parallels=BOTH, experimental=True, most=100)
    answer = suggestions(model("llama-3.2-1b"), request, device, catalog)
    assert {row.plan.setup.config.parallel.zero_stage for row in answer.rows} >= {3}
    for row in answer.rows:
        data = row.plan.training
        config = validate_config(data)
        plan = CompiledPlan(model("llama-3.2-1b"), resolve(config, catalog, "saved")).evaluate(device)
        assert (plan.requested_bytes, plan.device_bytes, plan.upper_bytes) == (
            row.plan.requested_bytes,
            row.plan.device_bytes,
            row.plan.upper_bytes,
        )
        assert plan.verdict == row.plan.verdict == "fits"


def validate_config(data):
    from memplan.catalog.training_config import TrainingConfig
    from memplan.documents.loading import Document

    return validate(TrainingConfig, Document("saved", data, {}))


def test_accumulation_counts_the_sequences_of_all_gpus(space):
    shared = under_layout(space, Parallel(4, 3))
    assert [space.steps(batch) for batch in (1, 2, 8)] == [8, 4, 1]
    assert [shared.steps(batch) for batch in (1, 2, 8)] == [2, 1, 1]


def test_slow_links_make_a_step_longer_and_never_shorter(catalog, model, space):
    times = []
    for link in (10**9, 10**11, 10**15):
        gpu = catalog.gpus["a100-80gb"]
        slow = replace(gpu, interconnect=replace(gpu.interconnect, bytes_per_second=link))
        one = under_layout(replace(space, batches=(1,)), Parallel(4, 3))
        found = Search(model("gpt2"), one, Device(slow, "slow"), LENGTH, catalog, experimental=True).run().front
        times.append(min(item.token_femtoseconds for item in found))
    assert times[0] > times[1] >= times[2]


def test_without_a_link_no_time_is_known(catalog, model, space):
    gpu = catalog.gpus["a100-80gb"]
    alone = replace(gpu, interconnect=replace(gpu.interconnect, bytes_per_second=0))
    one = under_layout(space, Parallel(4, 3))
    with pytest.raises(CannotAnswerError, match="no interconnect bandwidth"):
        Search(model("gpt2"), one, Device(alone, "alone"), LENGTH, catalog, experimental=True).run()


def test_nothing_is_searched_where_what_is_fixed_cannot_be_shared(catalog, model):
    base = replace(catalog.configs["bf16-adamw"], gradients=Gradients(lifetime="layer"))
    request = Request(base, keep=("lifetime",), parallels=BOTH)
    with pytest.raises(CannotAnswerError, match="the search space is empty"):
        suggestions(model("gpt2"), request, small(4), catalog)
