"""The largest model and the fewest GPUs: what is answered fits, and the next larger does not."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from memplan.catalog.config_keys.method_keys import Method
from memplan.errors import MemplanError
from memplan.library.lookup import catalog_model, custom_gpu
from memplan.model.inventory import parameter_count
from memplan.plan.bytes_per_parameter import bytes_per_parameter
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.sizes.largest_model import fewest_devices, first_that_fits, largest_models, max_parameters
from memplan.training.resolution.resolve_config import resolve
from memplan.training.stack_models import as_trained
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
MODELS = [(name, catalog_model(name, CATALOG)) for name in CATALOG.models]
GPUS = ["rtx3050", "rtx4090", "l40s", "a100-sxm-80gb", "mi300x"]
CONFIGS = ["tier1", "tier3", "bf16-adamw", "qlora"]


def setup(name: str):
    return resolve(CATALOG.configs[name], CATALOG, name)


@cache
def plan_of(model: str, config: str) -> CompiledPlan:
    return CompiledPlan(dict(MODELS)[model], setup(config))


def fits(model: str, config: str, on: Device) -> bool:
    """Whether a model fits; one whose position table is shorter than the sequence does not even run."""
    try:
        return plan_of(model, config).evaluate(on).verdict == "fits"
    except MemplanError:
        return False


def device(name: str, count: int = 1) -> Device:
    return Device(CATALOG.gpus[name], name, count)


@pytest.mark.parametrize(
    ("model", "config", "gpu"),
    [
        (name, config, gpu)
        for name, config, gpu in product(
            ["pythia-160m", "llama-8b", "llama-70b", "mixtral-8x7b", "llama-405b"], CONFIGS, GPUS
        )
    ],
)
def test_the_fewest_gpus_fit_and_one_fewer_does_not(model, config, gpu):
    plan = CompiledPlan(catalog_model(CATALOG.models.name_of(model), CATALOG), setup(config))
    count = fewest_devices(plan, device(gpu))
    assert count is not None
    assert plan.evaluate(device(gpu, count)).verdict == "fits"
    assert count == 1 or plan.evaluate(device(gpu, count - 1)).verdict != "fits"


def test_a_gpu_smaller_than_its_own_context_never_suffices():
    tiny = Device(custom_gpu(500 * 2**20, "500 MiB"), "tiny")
    assert fewest_devices(CompiledPlan(catalog_model("pythia-160m", CATALOG), setup("bf16-adamw")), tiny) is None


@pytest.mark.thorough
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.one_in(4)
def test_the_largest_fitting_model_fits_and_no_larger_one_does(config):
    for row in largest_models(MODELS, setup(config), [device(name) for name in GPUS]):
        trained = {name: parameter_count(as_trained(model, setup(config)).inventory) for name, model in MODELS}
        fitting = {name: count for name, count in trained.items() if fits(name, config, row.device)}
        assert row.largest_fitting_parameters == max(fitting.values(), default=0)
        assert row.largest_fitting in fitting or (row.largest_fitting is None and not fitting)


@pytest.mark.parametrize("config", CATALOG.configs)
def test_max_parameters_fill_the_usable_bytes_and_one_more_would_not_fit(config):
    resolved = setup(config)
    each = bytes_per_parameter(resolved).total
    for gpu in CATALOG.gpus:
        most, usable = max_parameters(resolved, device(gpu)), device(gpu).usable_bytes(0)
        assert most * each <= usable < (most + 1) * each


def test_the_real_model_is_never_larger_than_the_bound():
    for config in CONFIGS[:3]:
        for row in largest_models(MODELS, setup(config), [device(name) for name in GPUS]):
            assert row.largest_fitting_parameters <= row.max_parameters


def test_more_gpus_never_hold_a_smaller_model():
    for config in CONFIGS:
        rows = largest_models(MODELS, setup(config), [device("rtx4090", count) for count in (1, 2, 4, 8)])
        sizes = [row.largest_fitting_parameters for row in rows]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("config", ["bf16-adamw", "tier2", "lora", "q4-fp8-muon-int8"])
@pytest.mark.parametrize("name", ["gpt2", "gemma-2-2b", "qwen3-30b-a3b", "deepseek-v2-lite"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_what_rules_a_model_out_is_less_than_its_step_requests(name, config, checkpointing):
    """What is there all the time, and what layers save for backward: models beyond that are not planned further."""
    keys = replace(CATALOG.configs[config], activation_checkpointing=checkpointing)
    try:
        plan = CompiledPlan(catalog_model(name, CATALOG), resolve(keys, CATALOG, config))
        requested = plan.requested_bytes(2, 512)
    except MemplanError:
        return
    least, saved = plan.least_bytes(2, 512), plan.saved_bytes(2, 512)
    inputs = 2 * 512 * plan.own.spec.hidden_size * plan.setup.residual_bytes * plan.own.spec.num_hidden_layers
    assert plan.constant_bytes + inputs < saved <= requested
    assert plan.constant_bytes + (inputs if checkpointing == "full" else 0) <= least <= requested
    assert plan.persistent_bytes <= least


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llava-onevision-0.5b", {"stack": "trl"}),
        ("llama-3.2-1b", {"stack": "trl"}),
        ("llama-3.2-1b", {"stack": "transformers", "optimizer": {"default": "adamw-paged-bnb"}}),
        ("pythia-410m", {"stack": "llama-factory", "method": Method(stage="reward")}),
    ],
)
def test_a_model_that_fits_is_not_ruled_out_before_it_is_planned(name, keys):
    """A tower that text does not pass, or a head beside one of values, has no gradients and no states; paged states are not on the device."""
    keys = replace(CATALOG.configs["mixed-adamw"], micro_batch_size=1, sequence_length=64, **keys)
    model, adamw = catalog_model(name, CATALOG), resolve(keys, CATALOG, "mixed-adamw")
    needed = CompiledPlan(model, adamw).evaluate(device("b200")).upper_bytes
    just = Device(custom_gpu(needed + 300 * 2**20, "just enough"), "just enough")
    assert CompiledPlan(model, adamw).evaluate(just).verdict == "fits"
    assert largest_models([(name, model)], adamw, [just])[0].largest_fitting == name


def test_a_stack_that_plans_no_model_is_refused_rather_than_answered_with_none(refused):
    given = ("max", "--gpu", "h100", "--config")
    assert "planned by memplan fit, not by other commands" in refused(
        *given, "bf16-adamw", "--stack", "megatron", code=3
    )
    assert "adapters on models of torchtitan" in refused(*given, "lora", "--stack", "torchtitan", code=3)


@pytest.mark.parametrize("first", [1, 2, 9, 20, 21, 40])
@pytest.mark.parametrize("fitting", [{9, 10, 11, 12, 15, 21}, {1, 2}, {300}, set()])
def test_what_fits_does_not_at_one_fewer_wherever_one_looks_first(fitting, first):
    """What fits need not go on fitting: reserves rise and fall with the number of GPUs."""
    most, least = 256, 2
    number = first_that_fits(fitting.__contains__, max(first, least), most, least)
    if number is not None:
        assert number in fitting
        assert number == least or number - 1 not in fitting
    else:
        assert not fitting & {
            max(first, least) << doubled for doubled in range(8) if max(first, least) << doubled <= most
        }
