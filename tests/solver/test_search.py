"""The search: what it finds is what trying everything finds."""

from dataclasses import replace

import pytest

from memplan.catalog.training_config import Offload
from memplan.catalog.update_classes import is_bundled
from memplan.library.lookup import custom_gpu
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.axes import full_space, with_fixed_axes
from memplan.solver.search.best_first import Search
from memplan.solver.search.evidence_levels import STATUSES, Evidence, gradient_name
from memplan.solver.search.pareto_front import Combination, no_worse, ranked
from memplan.solver.search.timing import (
    micro_batch_picoseconds,
    rated_gpu,
    rates_of,
    update_picoseconds,
    update_work,
    work_of,
)
from memplan.training.resolution.resolve_config import resolve
from memplan.units import GIB

pytestmark = pytest.mark.thorough

LENGTH = 256


def small(name, memory):
    return Device(custom_gpu(int(memory * GIB), f"{memory} GiB"), f"a GPU of {memory} GiB")


@pytest.fixture(scope="module")
def spaces(catalog):
    """A few hundred combinations each, together over every axis."""
    base = replace(catalog.configs["bf16-adamw"], sequence_length=LENGTH)
    whole = full_space(base, catalog, (1, 2, 8))
    by_name = {choice.name: choice for choice in whole.weights}

    def optimizers(*names):
        return tuple({"default": name} for name in names)

    return {
        "floats": replace(
            with_fixed_axes(whole, ("gradients", "newton-schulz", "allocator"), catalog),
            weights=(by_name["fp32 under bf16 autocast"], by_name["bf16"], by_name["fp16"]),
            optimizers=optimizers("adamw-fp32", "adamw-8bit-bnb"),
            checkpointing=("none", "full"),
            losses=("bf16", "chunked"),
        ),
        "codes": replace(
            with_fixed_axes(whole, ("optimizer-kernel", "loss"), catalog),
            weights=(by_name["bf16"], by_name["q8-0"], by_name["q4-0"]),
            optimizers=optimizers("adamw-int8", "muon-int4"),
            gradients=(None, "fp8-e4m3"),
            checkpointing=("none", "full"),
        ),
        "steps": replace(
            with_fixed_axes(whole, ("optimizer-kernel", "newton-schulz", "allocator"), catalog),
            weights=(by_name["bf16"], by_name["q4-0"]),
            optimizers=optimizers("adamw-bf16", "muon-int8"),
            gradients=(None, "fp32"),
            losses=("bf16", "fp32"),
            step_batch=4,
        ),
    }


PLANS: dict[str, CompiledPlan] = {}
"""Plans of GPT-2 by their config, which the spaces share on every GPU."""


def planned(search: Search, state, way, batch) -> CompiledPlan:
    """Return a combination resolved and compiled by itself."""
    config = search.space.config(state, way, batch)
    if repr(config) not in PLANS:
        PLANS[repr(config)] = CompiledPlan(search.model, resolve(config, search.catalog, "exhaustive"))
    return PLANS[repr(config)]


def everything(search: Search) -> list[Combination]:
    """Return every combination that fits, each resolved, compiled and timed by itself."""
    found = []
    for state, standing in search.states:
        for way in search.space.passes():
            for batch in (b for b in search.space.batches if search.space.allowed(way, b)):
                plan = planned(search, state, way, batch)
                if plan.evaluate(search.device, batch, search.length).verdict == "fits":
                    token, step = times(search, plan, way, batch)
                    group = search.class_of(state, standing, way.lifetime)
                    found.append(Combination(state, way, batch, standing, group, token, step, plan))
    return found


def times(search, plan, way, batch):
    steps, states = search.space.steps(batch), plan.states
    micro = micro_batch_picoseconds(
        work_of(search.model, plan.setup, states),
        search.rates,
        batch,
        search.length,
        checkpointing=way.checkpointing,
        loss=way.loss,
        accumulates=steps > 1,
    )
    trained = sum(e.tensor.count * e.weight_bytes for e in states.tensors if e.trainable)
    update = update_picoseconds(trained, states.gradient_bytes, update_work(plan.setup, states), search.rates)
    step = steps * micro + update
    return step * 1000 // (steps * batch * search.length), step


def front(found: list[Combination]) -> set[tuple[int, ...]]:
    points = {item.objectives for item in found}
    return {p for p in points if not any(o != p and all(a <= b for a, b in zip(o, p, strict=True)) for o in points)}


@pytest.mark.parametrize("name", ["floats", "codes", "steps"])
@pytest.mark.parametrize("memory", [1.3, 1.6, 4.0])
@pytest.mark.one_in(4)
def test_the_search_finds_what_exhaustive_enumeration_finds(catalog, model, spaces, name, memory):
    search = Search(model("gpt2"), spaces[name], small("gpt2", memory), LENGTH, catalog, experimental=True)
    tried = everything(search)
    outcome = search.run()
    assert {item.objectives for item in outcome.front} == front(tried)
    assert ranked(outcome.front) == list(outcome.front)
    for item in outcome.front:
        assert item.plan.evaluate(search.device, item.batch, LENGTH).verdict == "fits"


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_scratch_memory_of_an_update_decides_too(catalog, model, spaces, kernel):
    """With foreach the optimizer step is the fullest instant; memory is put between that and the next fullest."""
    fixed = ("weights", "optimizer", "offload", "lifetime", "loss", "checkpointing")
    space = with_fixed_axes(spaces["floats"], fixed, catalog)
    least = {}
    for name in ("fused", "foreach"):
        one = replace(space, optimizer_kernels=(name,), batches=(1,))
        miss = Search(model("gpt2"), one, small("gpt2", 0.7), LENGTH, catalog, experimental=False).nearest_miss()
        least[name] = miss.plan.upper_bytes
    between = (least["fused"] + least["foreach"]) / 2 / GIB
    one = replace(space, optimizer_kernels=(kernel,), batches=(1,))
    search = Search(model("gpt2"), one, small("gpt2", between), LENGTH, catalog, experimental=False)
    assert least["fused"] < least["foreach"]
    assert len(search.run().front) == len(everything(search)) == (kernel == "fused")


@pytest.mark.parametrize("name", ["floats", "codes", "steps"])
def test_the_nearest_miss_is_the_least_of_all(catalog, model, spaces, name):
    search = Search(model("gpt2"), spaces[name], small("gpt2", 0.8), LENGTH, catalog, experimental=True)
    assert search.run().front == ()
    least = min(
        planned(search, state, way, batch).evaluate(search.device, batch, LENGTH).upper_bytes
        for state, _ in search.states
        for way in search.space.passes()
        for batch in search.space.batches
        if search.space.allowed(way, batch)
    )
    miss = search.nearest_miss()
    assert miss.plan.upper_bytes == least
    assert miss.plan.verdict != "fits"
    smaller = [
        Device(gpu, n)
        for n, gpu in catalog.gpus.entries.items()
        if gpu.cuda_total_bytes < miss.smallest_gpu.gpu.cuda_total_bytes
    ]
    plan = CompiledPlan(search.model, miss.plan.setup)
    batch = miss.plan.micro_batch_size
    assert plan.evaluate(miss.smallest_gpu, batch, LENGTH).verdict == "fits"
    assert all(plan.evaluate(d, batch, LENGTH).verdict != "fits" for d in smaller)


def test_states_in_host_memory_are_no_way_past_those_on_the_device(catalog, model, spaces):
    """They free memory for larger batches, but an answer that needs no host memory is not lost to a faster one."""
    search = Search(model("gpt2"), spaces["floats"], small("gpt2", 4.0), LENGTH, catalog, experimental=True)
    places = {state.offload for state, _ in search.states}
    found = search.run().front
    assert places == {"none", "cpu"}
    assert {item.state.offload for item in found if item.group[:5] == found[0].group[:5]} >= {"none"}
    assert all(
        is_bundled(catalog.optimizers[name]) and state.master == "none"
        for state, _ in search.states
        if state.offload == "cpu"
        for name in state.optimizer.values()
    )


def test_every_byte_of_offloaded_states_crosses_the_link_twice(catalog, model):
    config = replace(catalog.configs["bf16-adamw"], sequence_length=LENGTH)
    setups = [resolve(replace(config, offload=Offload(optimizer_states=p)), catalog, p) for p in ("none", "cpu")]
    here, there = (CompiledPlan(model("gpt2"), setup).states for setup in setups)
    work = update_work(setups[1], there)
    assert there.state_bytes == 0
    assert there.host_bytes == here.state_bytes + here.host_bytes
    assert work.host_bytes == 2 * there.host_bytes
    slow, fast = (rates_of(name, catalog.gpus[name], catalog.tables.links) for name in ("rtx4090", "h100-sxm-80gb"))
    assert (slow.host_bytes, fast.host_bytes) == (32 * 10**9, 64 * 10**9)
    apart = update_picoseconds(0, 0, work, slow) - update_picoseconds(0, 0, replace(work, host_bytes=0), slow)
    assert apart == work.host_bytes * 10**12 // slow.host_bytes


def test_the_whole_space_has_a_hundred_thousand_combinations(catalog):
    assert full_space(catalog.configs["bf16-adamw"], catalog, (1, 2)).size >= 100_000


def test_weights_are_trained_in_what_the_bundled_library_codes_and_in_no_other_format(catalog):
    pytest.importorskip("torch")
    from memplan.muon.weights.weight_codecs import WEIGHT_FORMATS

    space = full_space(catalog.configs["bf16-adamw"], catalog, (1,))
    frozen, by_trl = (
        full_space(replace(catalog.configs["lora"], stack=stack), catalog, (1,)) for stack in ("bundled", "trl")
    )
    assert {choice.dtype for choice in space.weights if choice.coded} == set(WEIGHT_FORMATS)
    assert {choice.dtype for choice in frozen.weights if choice.coded} > {"q4-k", "iq4-xs", "nf4", "nf4-dq"}
    assert {choice.dtype for choice in by_trl.weights if choice.coded} == {"nf4", "nf4-dq"}


@pytest.mark.parametrize("experimental", [False, True])
def test_nothing_known_to_diverge_is_found(catalog, model, experimental):
    device = Device(catalog.gpus["rtx4090"], "rtx4090")
    space = full_space(catalog.configs["bf16-adamw"], catalog, (1, 2, 4))
    search = Search(model("qwen3-0.6b"), space, device, 512, catalog, experimental=experimental)
    worst = STATUSES.index("experimental" if experimental else "works")
    assert all(STATUSES.index(standing.status) <= worst for _, standing in search.states)
    found = search.run().front
    assert found
    assert not any(
        no_worse(a.group, b.group) and a.token_femtoseconds <= b.token_femtoseconds
        for a in found
        for b in found
        if a is not b
    )


def test_a_diverging_config_of_ones_own_is_never_found(catalog, model):
    space = with_fixed_axes(
        full_space(catalog.configs["q4-muon-int2"], catalog, (1,)), ("weights", "optimizer"), catalog
    )
    device = Device(catalog.gpus["h100"], "h100-sxm-80gb")
    assert Search(model("gpt2"), space, device, 512, catalog, experimental=True).states == []


# ------------------------------------------------------------------ evidence
def test_every_shipped_config_stands_as_it_says(catalog):
    for name, config in catalog.configs.entries.items():
        setup = resolve(config, catalog, name)
        names = [setup.optimizer_names["hidden_matrix"], *setup.optimizer_names.values()]
        evidence = Evidence(catalog, config.adapter is not None)
        gradients = gradient_name(setup)
        formed = gradient_name(replace(setup, config=replace(config, gradients=replace(config.gradients, dtype=None))))
        standing = evidence.standing(
            setup.format_names["hidden_matrix"], formed, gradients, config.master_weights, names
        )
        status = setup.config.status
        assert STATUSES.index(standing.status) >= STATUSES.index(status), name
        assert standing.status == status or config.adapter is not None, name


def test_risk_adds_up_statuses(catalog):
    evidence = Evidence(catalog, adapters=False)
    assert evidence.standing("fp32", "fp32", "fp32", "none", ["adamw-fp32"]).risk == 0
    works = evidence.standing("bf16", "bf16", "bf16", "none", ["adamw-bf16"])
    assert (works.status, works.risk) == ("works", 3)
    assert evidence.standing("bf16", "bf16", "bf16", "fp32", ["adamw-fp32"]).risk == 1
    assert evidence.standing("bf16", "bf16", "fp32", "none", ["adamw-bf16"]) == works
    assert evidence.standing("iq3-xxs", "bf16", "fp8-e4m3", "none", ["muon-int4"]).risk == 6
    assert evidence.standing("q4-0", "bf16", "bf16", "none", ["muon-int2"]).status == "diverges"


def test_weights_whose_every_record_ended_far_behind_rank_after_all_others_of_their_status(catalog):
    evidence = Evidence(catalog, adapters=False)
    keys = ("bf16", "fp8-e4m3", "none", ["muon-int4"])
    far, near, unknown = (evidence.standing(name, *keys) for name in ("iq2-xxs", "q4-0", "iq4-xs"))
    assert (far.status, far.far_behind, near.far_behind, unknown.far_behind) == ("experimental", True, False, False)
    assert near.rank == unknown.rank < far.rank < 3 * STATUSES.index("diverges")
    assert far.risk == near.risk + 1


@pytest.mark.parametrize(
    ("record", "first"),
    [("train-q6-muon-ternary", True), ("train-iq3-muon-int4", False), ("no-record", False), (None, False)],
)
def test_what_a_record_says_learns_ranks_before_others_of_its_status(record, first, catalog):
    evidence = Evidence(catalog, adapters=False)
    untried = evidence.standing("q6-b64", "bf16", "bf16", "none", ["muon-ternary"])
    assert (evidence.recorded(untried, record).rank < untried.rank) == first
    assert evidence.recorded(untried, record).risk == untried.risk


@pytest.mark.parametrize("gib", [16, 48, 64, 80, 128])
def test_a_gpu_of_so_much_memory_has_the_rates_of_one_that_its_allowances_are_of(gib, catalog):
    known = {name: catalog.gpus[name] for name in catalog.gpus}
    name, rated = rated_gpu(custom_gpu(gib << 30, f"{gib}GiB"), "", known)
    assert (rated.vendor, rated.unified_memory) == ("nvidia", False)
    assert "bf16" in rated.dense_flops
    others = [g for g in known.values() if g.vendor == "nvidia" and "bf16" in g.dense_flops and not g.unified_memory]
    assert abs(rated.cuda_total_bytes - (gib << 30)) == min(abs(g.cuda_total_bytes - (gib << 30)) for g in others), name
