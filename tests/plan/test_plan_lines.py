"""A plan names its own lines: components, assumptions, gaps and suggestions are values, put together when they are read."""

from dataclasses import replace
from fractions import Fraction

import pytest

from memplan.library.answers.planned_job import plan_by_share
from memplan.library.lookup import catalog_model
from memplan.plan.components import COMPONENTS, Component
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import simulated
from memplan.plan.sizes.largest_model import upper_bytes
from memplan.plan.suggested.suggestions import suggestions, with_suggestions
from memplan.solver.largest_value import gauge_of
from memplan.step.tapes.linear_forms import QUANTITIES, Quantity
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import TrainingSetup

LAZY = {"components", "assumptions", "not_modelled", "bytes_per_parameter", "saved_tensors", "instant_forms"}


@pytest.fixture
def setup(catalog) -> TrainingSetup:
    return resolve(catalog.configs["bf16-adamw"], catalog, "bf16-adamw")


@pytest.fixture
def compiled(catalog, setup) -> CompiledPlan:
    return CompiledPlan(catalog_model("llama-3.2-1b", catalog), setup)


@pytest.fixture
def device(catalog) -> Device:
    return Device(catalog.gpus["rtx3060"], "rtx3060")


def test_of_a_card_that_is_all_reserved_nothing_is_usable(device):
    total = device.gpu.cuda_total_bytes
    assert [device.usable_bytes(size) for size in (total - 1, total, total + 1)] == [1, 0, 0]


@pytest.fixture
def plan(compiled, device) -> MemoryPlan:
    return compiled.evaluate(device)


def test_components_are_values_that_add_up(plan):
    assert all(isinstance(line, Component) and line.formula and line.source for line in plan.components)
    assert sum(line.bytes for line in plan.components) == plan.device_bytes
    names = [line.name for line in plan.components]
    assert names == [name for name in COMPONENTS if name in names]


def test_evaluating_puts_no_line_together(plan):
    assert not LAZY & plan.__dict__.keys()
    for name in sorted(LAZY):
        assert getattr(plan, name) is getattr(plan, name)
    assert plan.__dict__.keys() >= LAZY


def test_no_line_holds_a_float(plan):
    values = [value for line in plan.components for value in (line.bytes, *line.values.values())]
    assert all(isinstance(value, int | str) for value in values)
    assert isinstance(plan.bytes_per_parameter.total, Fraction)


def test_what_layers_save_and_instants_have_sizes_at_the_plans_own_batch_and_length(compiled, device):
    one, two = compiled.evaluate(device, 1, 512), compiled.evaluate(device, 2, 512)
    tokens = [
        (a.bytes, b.bytes) for a, b in zip(one.saved_tensors, two.saved_tensors, strict=True) if a.quantity == "b*t"
    ]
    assert tokens
    assert all(second == 2 * first for first, second in tokens)
    always = one.requested_bytes - max(instant.bytes for instant in one.instant_forms)
    assert {instant.name: always + instant.bytes for instant in one.instant_forms} == dict(one.instants)


def test_the_training_keys_are_those_of_the_plan_itself(compiled, device):
    keys = compiled.evaluate(device, 3, 640).training
    assert (keys["micro_batch_size"], keys["sequence_length"]) == (3, 640)
    assert "adapter" not in keys


@pytest.mark.parametrize(("own", "told"), [(None, 0.1), (0.3, 0.3), (0.0, 0.0)])
def test_dropout_is_the_configs_own_or_else_the_released(own, told):
    given = {} if own is None else {"dropout": own}
    assert plan_by_share("gpt2", gpu="h100", config="bf16-adamw", set=given).memory.training["dropout"] == told


def test_the_allocators_reserve_is_told_as_it_was_found(plan):
    for one, words in ((plan, "% of the allocated bytes"), (simulated(plan), "simulated from the first weight")):
        (line,) = (line for line in one.assumptions if line.startswith("allocator: "))
        assert words in line
        assert bool(one.reserve_by_share) == (one is plan)


def test_a_plan_that_does_not_fit_carries_its_suggestions(plan, catalog):
    assert plan.verdict == "no"
    assert plan.suggestions == ()
    advised = with_suggestions(plan, catalog)
    assert advised.suggestions == suggestions(plan, catalog) != ()
    assert replace(advised, suggestions=()) == plan


def test_a_plan_that_fits_needs_none(compiled, catalog):
    plan = compiled.evaluate(Device(catalog.gpus["h200-sxm-141gb"], "h200-sxm-141gb"))
    assert with_suggestions(plan, catalog) is plan


def test_the_upper_end_is_the_same_wherever_it_is_asked_for(plan, compiled, device, setup):
    gauge = gauge_of(setup, device)
    rounding = compiled.rounding_bytes
    assert plan.upper_bytes == gauge.upper_bytes(plan.requested_bytes, rounding)
    assert plan.upper_bytes == upper_bytes(compiled, device, plan.requested_bytes)
    assert plan.upper_bytes == plan.allowances.upper_bytes(plan.allocated_bytes)
    assert plan.device_bytes == gauge.device_bytes(plan.requested_bytes, rounding)
    assert plan.verdict == gauge.verdict(plan.requested_bytes, rounding)


def test_evaluation_at_a_batch_of_its_own_takes_what_it_takes_at_that_micro_batch(catalog, setup, device):
    def instants(**keys):
        config = replace(setup.config, **keys)
        plan = CompiledPlan(catalog_model("llama-3.2-1b", catalog), resolve(config, catalog, "job")).evaluate(device)
        return dict(plan.instants), plan.instant_forms

    own, forms = instants(evaluation=True, evaluation_batch_size=8)
    wide, _ = instants(evaluation=True, micro_batch_size=8)
    alone, _ = instants()
    rows = 16 * setup.config.sequence_length * setup.config.micro_batch_size  # those trained on are there as well
    assert own.pop("evaluation") == wide["evaluation"] + rows == max(wide["evaluation"] + rows, *alone.values())
    assert own == alone
    assert "evaluation" in {form.name for form in forms}


def heads(plan: MemoryPlan) -> set[str]:
    """Return what the assumptions of a plan are about."""
    return {line.partition(":")[0] for line in plan.assumptions}


@pytest.mark.parametrize(
    ("keys", "head"),
    [
        ({"offload.optimizer_states": "cpu", "optimizer": {"default": "muon-int4"}}, "optimizer states"),
        ({"method.stage": "dpo"}, "method dpo"),
        ({"method.stage": "grpo", "micro_batch_size": 2}, "generation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_assumed_of_a_mechanism_is_said_only_where_it_runs(keys, head):
    job = {"gpu": "h100", "config": "tier1" if "offload.optimizer_states" in keys else "lora"}
    assert not any(one.startswith(head) for one in heads(plan_by_share("gpt2", **job).memory))
    assert any(one.startswith(head) for one in heads(plan_by_share("gpt2", **job, set=keys).memory))


@pytest.mark.parametrize(
    ("config", "keys", "line"),
    [
        ("muon", {}, "Muon updates up to 11 matrices of one shape together, in up to 64.00 MiB of scratch"),
        ("muon", {"kernels.muon_batch_bytes": 2**20}, "updates no two matrices"),
        ("muon", {"gradients.lifetime": "layer", "clip_gradients": False}, "updates no two matrices"),
        ("q4-muon-int8", {}, "updates no two matrices"),
        ("bf16-adamw", {}, "updates no two matrices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_batches_of_muon_are_told_as_there_are(config, keys, line):
    plan = plan_by_share("gpt2", gpu="h100", config=config, set={"kernels.muon_batch_bytes": 2**26, **keys}).memory
    assert any(line in told for told in plan.assumptions)


def test_closed_forms_add_up_to_their_bytes(plan):
    """Coefficients are told with their quantities, a constant alone; put in, they are what the line says."""
    for line in plan.instant_forms:
        assert closed_sum(plan, line.formula) == line.bytes


def test_what_passes_between_gpus_is_no_temporary_in_closed_form_either():
    options = {"parallel.data": 8, "parallel.zero_stage": 3}
    plan = plan_by_share("llama-3.2-1b", gpu="h100", config="bf16-adamw", set=options).memory
    lines = {line.name: line for line in plan.components}
    assert lines["communication"].bytes > 0
    for name in ("temporaries", "activations"):
        assert closed_sum(plan, lines[name].formula) == lines[name].bytes > 0


def closed_sum(plan: MemoryPlan, formula: str) -> int:
    """Return what a closed form comes to with the plan's quantities put in."""
    known = {QUANTITIES[quantity]: plan.values[quantity] for quantity in Quantity}
    terms = [term.split(" ", 1) for term in formula.split(" + ")]
    return sum(int(c.replace(",", "")) * (known[rest[0]] if rest else 1) for c, *rest in terms)
