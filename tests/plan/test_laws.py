"""Laws that hold for every model and every config: totals are sums, and more never costs less."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Gradients, TrainingConfig
from memplan.errors import CannotAnswerError
from memplan.library.lookup import catalog_model
from memplan.model.readers.given_shapes import model_from_shapes
from memplan.plan.components import COMPONENTS
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.step.states.optimizer_scratch import tensor_temporaries
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
SETUPS = {
    name: resolve(replace(config, stack="bundled"), CATALOG, name) for name, config in CATALOG.configs.entries.items()
}
"""Shipped configs in memplan's own loop, which trains every family; the stacks that some name refuse a few."""
GPU = Device(CATALOG.gpus["h100"], "h100-sxm-80gb")

laws = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

kernels = st.builds(
    Kernels,
    norm=st.sampled_from([None, "composite"]),
    rotary=st.sampled_from([None, "fused"]),
    activation=st.sampled_from([None, "fused"]),
    attention=st.sampled_from([None, "flash", "cudnn", "efficient", "math"]),
    optimizer=st.sampled_from([None, "foreach", "fused", "for-loop"]),
    loss=st.sampled_from([None, "bf16", "fp32", "chunked"]),
)
configs = st.builds(
    replace,
    st.sampled_from(list(CATALOG.configs.entries.values())),
    stack=st.just("bundled"),
    kernels=kernels,
    activation_checkpointing=st.sampled_from(["none", "selective", "full"]),
)
shapes = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 6),
        "hidden": st.sampled_from([256, 512, 1024]),
        "heads": st.sampled_from([4, 8]),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "intermediate": st.sampled_from([512, 1024, 2816]),
        "vocab": st.sampled_from([256, 1024, 32_000]),
        "tied": st.booleans(),
    }
)
sizes = st.tuples(st.integers(1, 6), st.integers(1, 3000))


def plan(shape: dict[str, Any], config: TrainingConfig) -> CompiledPlan:
    return CompiledPlan(model_from_shapes(**shape), resolve(config, CATALOG, "drawn"))


# ------------------------------------------------------------------ totals
@laws
@given(shapes, configs, sizes)
def test_the_components_add_up_to_the_device_total(shape, config, size):
    found = plan(shape, config).evaluate(GPU, *size)
    parts = found.components
    assert sum(part.bytes for part in parts) == found.device_bytes
    assert [part.name for part in parts] == [name for name in COMPONENTS if name in {part.name for part in parts}]
    assert all(part.bytes > 0 for part in parts)


@laws
@given(shapes, configs, sizes)
def test_each_total_holds_the_one_before(shape, config, size):
    found = plan(shape, config).evaluate(GPU, *size)
    assert (
        found.requested_bytes
        <= found.allocated_bytes
        <= found.reserved_bytes
        <= found.device_bytes
        <= found.upper_bytes
    )


@laws
@given(shapes, configs, sizes, st.sampled_from(["bundled", "trl"]))
def test_the_peak_is_the_fullest_instant(shape, config, size, stack):
    kernels = config.kernels if stack == "bundled" else Kernels()
    config = replace(config, stack=stack, clip_gradients=False, kernels=kernels)
    assume(not resolve(config, CATALOG, "drawn").unmodelled)
    try:
        compiled = plan(shape, config).on(GPU.gpu)
    except CannotAnswerError as refusal:
        if "unscale FP16 gradients" not in str(refusal):
            raise
        return
    found = compiled.evaluate(GPU, *size)
    assert found.requested_bytes == max(size for _, size in found.instants) == compiled.requested_bytes(*size)
    assert dict(found.instants)[found.peak.name] == found.requested_bytes
    assert found.persistent_bytes <= found.requested_bytes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize(
    "model",
    ["pythia-160m", "llama-3.1-8b", "gemma-2-2b", "mixtral-8x7b-v0.1", "deepseek-v2-lite", "gpt-oss-20b", "falcon-7b"],
)
def test_the_sum_holds_for_every_config_and_family(model, name):
    found = CompiledPlan(catalog_model(model, CATALOG), SETUPS[name]).evaluate(GPU)
    assert sum(part.bytes for part in found.components) == found.device_bytes


@pytest.mark.parametrize("name", SETUPS)
def test_every_config_is_planned_for_every_gpu(name):
    compiled = CompiledPlan(catalog_model("llama-3.2-1b", CATALOG), SETUPS[name])
    planned = 0
    for gpu in CATALOG.gpus:
        try:
            found = compiled.evaluate(Device(CATALOG.gpus[gpu], gpu))
        except CannotAnswerError as refusal:
            assert " does not run on " in str(refusal), gpu  # noqa: PT017, a plan is as good an answer
            continue
        planned += 1
        fits, may_fit = found.upper_bytes <= found.usable_bytes, found.device_bytes <= found.usable_bytes
        assert found.verdict == ("fits" if fits else "tight" if may_fit else "no")
    assert planned > len(CATALOG.gpus) // 2


# ------------------------------------------------------------------ more never costs less
@laws
@given(shapes, configs, sizes, st.integers(1, 3), st.integers(1, 500))
def test_more_sequences_or_tokens_never_cost_less(shape, config, size, more, longer):
    compiled = plan(shape, config)
    batch, length = size
    assume(
        config.kernels.loss != "chunked" or batch * length > 1
    )  # one token is one chunk, whose gradients add up to none
    here = compiled.evaluate(GPU, batch, length)
    for other in (compiled.evaluate(GPU, batch + more, length), compiled.evaluate(GPU, batch, length + longer)):
        assert other.requested_bytes >= here.requested_bytes
        assert other.device_bytes >= here.device_bytes


@laws
@given(shapes, configs, sizes, st.integers(1, 3))
def test_more_layers_never_cost_less(shape, config, size, more):
    here = plan(shape, config).evaluate(GPU, *size)
    there = plan({**shape, "layers": shape["layers"] + more}, config).evaluate(GPU, *size)
    assert there.requested_bytes >= here.requested_bytes
    assert there.device_bytes >= here.device_bytes


@laws
@given(
    shapes,
    configs,
    sizes,
    st.sampled_from([("hidden", 2), ("intermediate", 2), ("vocab", 2), ("heads", 2), ("kv_heads", 2)]),
)
def test_more_width_never_costs_less(shape, config, size, change):
    """Widths are doubled, so that rows which divide into blocks still do."""
    key, factor = change
    wider = {**shape, key: shape[key] * factor}
    if wider["kv_heads"] > wider["heads"]:
        wider["heads"] = wider["kv_heads"]
    if key in ("heads", "kv_heads"):
        shape = {**shape, "head_dim": 64}
        wider = {**wider, "head_dim": 64}
    here, there = plan(shape, config).evaluate(GPU, *size), plan(wider, config).evaluate(GPU, *size)
    assert there.requested_bytes >= here.requested_bytes


# ------------------------------------------------------------------ settings that save do save
@laws
@given(shapes, configs, sizes)
def test_checkpointing_never_keeps_more_activations_at_the_peak_of_the_forward_pass(shape, config, size):
    """Selective checkpointing keeps every product's result; under adapters and without a kernel plain autograd keeps fewer."""

    def forward(kind: str) -> int:
        changed = replace(config, activation_checkpointing=kind)
        return dict(plan(shape, changed).evaluate(GPU, *size).instants)["forward"]

    assert forward("full") <= min(forward("selective"), forward("none"))
    math = plan(shape, config).setup.profile.attention == "math"
    assert config.adapter is not None or math or forward("selective") <= forward("none")


@laws
@given(shapes, configs, sizes)
def test_full_checkpointing_never_needs_more_than_none_and_a_layers_input(shape, config, size):
    full, none = (plan(shape, replace(config, activation_checkpointing=kind)) for kind in ("full", "none"))
    layer_input = size[0] * size[1] * shape["hidden"] * full.setup.residual_bytes
    assert full.requested_bytes(*size) <= none.requested_bytes(*size) + layer_input


def by_lifetime(compile_with: Callable[[TrainingConfig], CompiledPlan], config: TrainingConfig) -> list[CompiledPlan]:
    """Return the plans with gradients kept for the step, and with gradients released by layer."""
    lifetimes = (replace(config.gradients, lifetime=kind) for kind in ("step", "layer"))
    return [compile_with(replace(config, gradients=gradients)) for gradients in lifetimes]


def update_scratch(compiled: CompiledPlan) -> int:
    return max(tensor_temporaries(compiled.setup, entry).bytes for entry in compiled.states.tensors)


def more_states(step: CompiledPlan, layer: CompiledPlan) -> int:
    """Return the lookup tables that an optimizer of its own for each tensor has beyond those of one for all."""
    return layer.states.state_bytes - step.states.state_bytes


@laws
@given(shapes, configs.filter(lambda config: config.adapter is None), sizes)
def test_gradients_released_by_layer_need_at_most_one_update_more(shape, config, size):
    """An update inside backward has its scratch memory while activations are still alive."""
    step, layer = by_lifetime(lambda changed: plan(shape, changed), config)
    extra = update_scratch(layer) + more_states(step, layer)
    assert layer.requested_bytes(*size) <= step.requested_bytes(*size) + extra


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [n for n, c in CATALOG.configs.entries.items() if c.adapter is None])
@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "llama-3.1-8b", "gemma-2-2b"])
def test_gradients_released_by_layer_need_at_most_one_update_more_in_real_models(model, name):
    def compile_with(config: TrainingConfig) -> CompiledPlan:
        return CompiledPlan(catalog_model(model, CATALOG), resolve(config, CATALOG, name))

    step, layer = by_lifetime(compile_with, CATALOG.configs[name])
    extra = update_scratch(layer) + more_states(step, layer)
    assert layer.requested_bytes(1, 2048) <= step.requested_bytes(1, 2048) + extra


@laws
@given(shapes, configs.filter(lambda config: config.adapter is None), sizes)
def test_a_fused_optimizer_needs_no_scratch_beside_its_counters(shape, config, size):
    def requested(kind: str) -> CompiledPlan:
        return plan(shape, replace(config, kernels=replace(config.kernels, optimizer=kind)))

    fused, foreach = requested("fused"), requested("foreach")
    counters = fused.states.state_bytes - foreach.states.state_bytes
    assert fused.requested_bytes(*size) <= foreach.requested_bytes(*size) + counters


TERMS = {
    "evaluation": True,
    "save_checkpoint": True,
    "clip_gradients": True,
    "zero_gradients": "fill",
    "loss_scaling": True,
    "weight_average": "fp32",
    "master_weights": "fp32",
    "dropout": 0.1,
    "gradient_accumulation_steps": 4,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("key", TERMS)
@pytest.mark.parametrize("model", ["pythia-160m", "llama-3.2-1b", "gemma-2-2b", "qwen2.5-0.5b"])
@pytest.mark.parametrize("name", ["bf16-adamw", "mixed-adamw", "tier1", "lora"])
def test_a_term_that_is_turned_on_never_saves_memory(model, name, key):
    config, found = CATALOG.configs[name], catalog_model(model, CATALOG)
    if name in ("lora", "tier1") and key == "master_weights":
        pytest.skip("frozen and coded weights have no master copy")
    off = replace(config, dropout=0.0)
    without, with_it = (
        CompiledPlan(found, resolve(changed, CATALOG, name)).requested_bytes(1, 1024)
        for changed in (off, replace(off, **{key: TERMS[key]}))
    )
    assert with_it >= without


@pytest.mark.parametrize(("kept", "width"), [("none", 0), ("bf16", 2), ("fp32", 4)])
def test_an_averaged_copy_of_the_weights_takes_its_own_dtype(kept, width):
    found = catalog_model("pythia-160m", CATALOG)
    plain, averaged = (
        CompiledPlan(found, resolve(TrainingConfig(description="", weight_average=value), CATALOG, "t"))
        for value in ("none", kept)
    )
    assert averaged.requested_bytes(1, 512) - plain.requested_bytes(1, 512) == width * 162_322_944


@laws
@given(shapes, sizes, st.integers(2, 64))
def test_accumulation_never_needs_less_than_one_pass(shape, size, steps):
    once = TrainingConfig(description="drawn")
    several = replace(once, gradient_accumulation_steps=steps)
    assert plan(shape, several).requested_bytes(*size) >= plan(shape, once).requested_bytes(*size)


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "llama-3.2-1b", "gemma-2-2b"])
def test_a_chunked_loss_saves_logits_and_an_fp32_one_doubles_them(model):
    def requested(loss: str) -> int:
        config = TrainingConfig(description="made by a test", kernels=Kernels(loss=loss, optimizer="fused"))
        return CompiledPlan(catalog_model(model, CATALOG), resolve(config, CATALOG, "made")).requested_bytes(4, 2048)

    assert requested("chunked") < requested("bf16") < requested("fp32")


# ------------------------------------------------------------------ exact values
def floats(value: Any, path: str = "plan") -> list[str]:
    """Return the paths of all floats inside a value."""
    if isinstance(value, float):
        return [path]
    if is_dataclass(value):
        return [hit for f in fields(value) for hit in floats(getattr(value, f.name), f"{path}.{f.name}")]
    if isinstance(value, dict):
        return [hit for key, item in value.items() for hit in floats(item, f"{path}[{key}]")]
    if isinstance(value, tuple | list):
        return [hit for index, item in enumerate(value) for hit in floats(item, f"{path}[{index}]")]
    assert value is None or isinstance(value, str | int | Fraction), (path, type(value))
    return []


FACTORS = {
    "clip",
    "dropout",
    "attention_dropout",
    "embedding_scale",
    "epsilon",
    "final_logit_softcap",
    "logit_scale",
    "logit_softcap",
    "residual_scale",
    "scale",
    "score_scale",
}
"""The only numbers of a model that are no counts: they decide whether an operation is there, and enter no sum."""


def is_factor(path: str) -> bool:
    """Tell whether a float is a probability, or a factor that the model's arithmetic has."""
    in_model = path.startswith(("plan.model.spec.", "plan.own.spec.")) and path.rpartition(".")[2] in FACTORS
    return in_model or path == "plan.setup.config.dropout"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("model", ["pythia-160m", "llama-3.1-8b", "mixtral-8x7b-v0.1"])
def test_a_plan_holds_no_float(model, name):
    found = CompiledPlan(catalog_model(model, CATALOG), SETUPS[name]).evaluate(GPU)
    assert not [path for path in floats(found) if not is_factor(path)]


def test_planning_twice_gives_equal_values():
    model = catalog_model("pythia-160m", CATALOG)
    first, second = (CompiledPlan(model, SETUPS["tier1"]).evaluate(GPU) for _ in range(2))
    assert first == second


def test_planning_changes_none_of_its_arguments():
    config = TrainingConfig(description="same", gradients=Gradients())
    before = repr(config), repr(GPU)
    plan({"layers": 1, "hidden": 256, "heads": 4}, config).evaluate(GPU)
    assert (repr(config), repr(GPU)) == before
