"""One GPU of several: the formula says what torch's own data parallelism does to one rank, to the byte."""

from dataclasses import replace

import pytest

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, CheckpointedLayers, TrainingConfig
from memplan.model.readers.given_shapes import model_from_shapes
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from tests.survey.agreement import cut_model

pytestmark = pytest.mark.thorough

SHAPES = {
    "untied": {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 700, "vocab": 4003},
    "tied": {"layers": 3, "hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 700, "vocab": 4003, "tied": True},
    "two layers": {"layers": 2, "hidden": 256, "heads": 8, "kv_heads": 4, "intermediate": 700, "vocab": 1003},
}
"""700 and 4003 divide by neither 8 nor 3, so that shards are padded."""

FP32 = {"weights": {"default": "fp32"}, "compute_dtype": "fp32"}
MIXED = {"weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
FULL = {"activation_checkpointing": "full"}
QLORA = {"weights": {"default": "bf16", "hidden_matrix": "nf4-dq"}, "optimizer": {"default": "adamw-8bit-bnb"}}
MANY, FEW = (2, 128), (1, 16)
"""(sequences, tokens): with few tokens weights decide, with many activations and logits."""

SHARDED = [
    ("untied", 8, {}, MANY),
    ("untied", 2, {}, FEW),
    ("tied", 3, {}, MANY),
    ("tied", 8, {}, FEW),
    ("untied", 8, FULL, MANY),
    ("untied", 8, {**FULL, "checkpointed_layers": CheckpointedLayers(every=2)}, MANY),
    ("tied", 2, FULL, FEW),
    ("untied", 8, {"activation_checkpointing": "selective"}, MANY),
    ("untied", 8, FP32, MANY),
    ("tied", 2, FP32, FEW),
    ("untied", 8, MIXED, MANY),
    ("tied", 8, {**MIXED, **FULL}, FEW),
    ("two layers", 2, MIXED, FEW),
    ("untied", 8, {"gradient_accumulation_steps": 3}, MANY),
    ("tied", 2, {**MIXED, "gradient_accumulation_steps": 2}, FEW),
    ("untied", 8, {"zero_gradients": "fill"}, MANY),
    ("untied", 8, {"kernels": Kernels(loss="fp32", optimizer="fused")}, MANY),
    ("tied", 8, {"kernels": Kernels(norm="composite", optimizer="for-loop")}, MANY),
    ("untied", 8, {"optimizer": {"default": "sgd-momentum"}}, MANY),
    ("untied", 8, {"save_checkpoint": True, "dropout": 0.1, "clip_gradients": True}, MANY),
    ("tied", 3, {**MIXED, "clip_gradients": True, "evaluation": True}, MANY),
    ("untied", 2, {"evaluation": True, "zero_gradients": "fill"}, MANY),
    ("untied", 3, {"evaluation": True}, (4, 512)),  # where the loss decides, beside nothing of the model's forward
]
REPLICATED = [
    ("untied", 8, {}, MANY),
    ("tied", 2, {**MIXED, "gradient_accumulation_steps": 2}, MANY),
    ("tied", 2, {"kernels": Kernels(loss="chunked"), "clip_gradients": True}, MANY),
    ("untied", 2, {"adapter": Adapter(), **FULL}, MANY),
    ("untied", 2, {"optimizer": {"default": "adamw-8bit-bnb"}, "evaluation": True}, MANY),
    ("untied", 8, {"adapter": Adapter(), **QLORA, "clip_gradients": True, "gradient_accumulation_steps": 2}, FEW),
    ("untied", 2, {"master_weights": "fp32", "optimizer": {"default": "adamw-fp32"}}, FEW),
]
OFF_BY_A_SCALAR = 4
"""Loss and gradient of an accumulating backward under autocast, on one GPU as on several."""

APART = [
    ("untied", 8, {"clip_gradients": True}, MANY),
    ("untied", 3, {**MIXED, "gradient_accumulation_steps": 2}, FEW),
    ("two layers", 2, FULL, MANY),
    ("tied", 8, {}, FEW),
]


def both(catalog, model, config, units="root"):
    setup = resolve(config, catalog, "test")
    setup = replace(setup, stack=replace(setup.stack, sharded_units=units))
    plan = CompiledPlan(model, setup).evaluate(Device(catalog.gpus["a100-80gb"], "a100-80gb"))
    return plan, trace_training(model, setup)


def config_of(parallel, keys, size):
    batch, length = size
    return replace(TrainingConfig("", micro_batch_size=batch, sequence_length=length, parallel=parallel), **keys)


@pytest.mark.parametrize(("shape", "ranks", "keys", "size"), SHARDED)
@pytest.mark.one_in(3)
def test_fully_sharded_every_instant_is_equal_to_the_byte(catalog, shape, ranks, keys, size):
    plan, trace = both(catalog, model_from_shapes(**SHAPES[shape]), config_of(Parallel(ranks, 3), keys, size))
    formula = dict(plan.instants)
    assert plan.requested_bytes == trace.peak_bytes
    assert plan.peak.name == trace.peak_instant
    assert plan.persistent_bytes == trace.persistent_bytes
    assert {n: size for n, size in trace.instant_bytes.items() if n in formula} == formula


@pytest.mark.parametrize("name", ["gemma-2-2b", "granite-3.1-2b"])
@pytest.mark.parametrize("keys", [{}, MIXED, {"kernels": Kernels(loss="fp32")}])
def test_the_last_layer_is_gathered_before_logits_are_scaled_or_bounded_backward(catalog, name, keys):
    plan, trace = both(catalog, cut_model(name, catalog), config_of(Parallel(6, 3), keys, (3, 70)))
    formula = dict(plan.instants)
    assert {n: formula[n] for n in trace.instant_bytes} == pytest.approx(trace.instant_bytes, rel=1e-4)


@pytest.mark.parametrize(("shape", "ranks", "keys", "size"), APART)
def test_ends_that_are_units_of_their_own_are_let_go_of_as_their_gradients_are_reduced(
    catalog, shape, ranks, keys, size
):
    config = config_of(Parallel(ranks, 3), keys, size)
    plan, trace = both(catalog, model_from_shapes(**SHAPES[shape]), config, "ends-apart")
    formula = dict(plan.instants)
    assert (plan.requested_bytes, plan.persistent_bytes) == (trace.peak_bytes, trace.persistent_bytes)
    inverse_rms = 4 * size[0] * size[1]
    told_apart = {"layer 1 backward", "end of backward"}  # torchtitan's hooks begin the end before the last reduction
    traced = {name: size for name, size in trace.instant_bytes.items() if name not in told_apart}
    assert all(0 <= size - formula.get(name, size) <= inverse_rms for name, size in traced.items())


@pytest.mark.parametrize("steps", [1, 2])
def test_groups_that_each_divide_everything_keep_what_they_reduce_among_them(catalog, steps):
    parallel = Parallel(6, 3, replicate=2)
    config = config_of(parallel, {**MIXED, "gradient_accumulation_steps": steps}, FEW)
    plan, trace = both(catalog, model_from_shapes(**SHAPES["two layers"]), config)
    formula = dict(plan.instants)
    assert (plan.requested_bytes, plan.persistent_bytes) == (trace.peak_bytes, trace.persistent_bytes)
    assert {n: size for n, size in trace.instant_bytes.items() if n in formula} == formula


@pytest.mark.parametrize(("shape", "ranks", "keys", "size"), REPLICATED)
def test_replicated_every_instant_is_equal_to_the_byte(catalog, shape, ranks, keys, size):
    plan, trace = both(catalog, model_from_shapes(**SHAPES[shape]), config_of(Parallel(ranks, 0), keys, size))
    formula = dict(plan.instants)
    differences = {n: s - formula[n] for n, s in trace.instant_bytes.items() if n in formula}
    assert set(differences.values()) <= {0, OFF_BY_A_SCALAR}, differences
    assert plan.persistent_bytes == trace.persistent_bytes


def test_components_at_the_peak_are_those_of_the_trace(catalog):
    for parallel in (Parallel(8, 3), Parallel(8, 0)):
        plan, trace = both(catalog, model_from_shapes(**SHAPES["untied"]), config_of(parallel, {}, MANY))
        formula = {row.name: row.bytes for row in plan.components}
        traced = trace.peak.components
        assert formula["communication"] == traced["communication"] > 0
        for name in ("weights", "optimizer_states", "logits"):
            assert formula.get(name, 0) == traced.get(name, 0), name
        assert formula.get("gradients", 0) == traced.get("gradients", 0)


@pytest.mark.parametrize(
    "name", ["gemma-2b", "gpt2", "mixtral-8x7b-v0.1", "deepseek-v2-lite", "qwen3-0.6b", "stablelm-2-1.6b"]
)
def test_other_families_peak_alike(catalog, name):
    """Layers of experts are shared out by expert, and gathered and reduced like any other."""
    model = cut_model(name, catalog, layers=3)
    plan, trace = both(catalog, model, config_of(Parallel(8, 3), {**MIXED, **FULL}, (1, 512)))
    assert plan.requested_bytes == trace.peak_bytes


def test_more_gpus_hold_less_of_the_states_and_gather_as_much(catalog):
    model = model_from_shapes(**SHAPES["untied"])
    two, eight = (both(catalog, model, config_of(Parallel(n, 3), {}, FEW))[1] for n in (2, 8))
    assert eight.persistent_bytes < two.persistent_bytes / 3
    assert eight.peak.components["communication"] >= two.peak.components["communication"]
