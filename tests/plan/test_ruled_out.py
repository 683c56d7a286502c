"""What rules a model out in searches for the largest, before its step is compiled: never more than the step requests."""

from functools import cache

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from memplan.errors import MemplanError
from memplan.library.lookup import Overrides, catalog_model, find_setup
from memplan.plan.bytes_per_parameter import least_bytes_per_parameter
from memplan.plan.planner import CompiledPlan
from memplan.plan.sizes.largest_model import _Planned
from memplan.training.stack_models import as_trained
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
MODELS = (
    "gpt2", "qwen2.5-0.5b", "llama-3.2-1b", "gemma-2-2b", "phi-1.5", "pythia-160m", "olmo-2-7b", "qwen3-0.6b",
    "qwen3-30b-a3b", "deepseek-v2-lite", "llava-onevision-0.5b",
)  # fmt: skip
CONFIGS = ("bf16-adamw", "mixed-adamw", "bf16-adamw-8bit", "lora", "qlora", "tier1", "tier3", "fp32-adamw")
STACKS = ("", "", "trl", "transformers", "torchtitan", "torchtune", "axolotl", "unsloth", "llama-factory", "litgpt")
CARDS = ("rtx4090", "v100-sxm2-32gb", "mi300x", "h100-sxm-80gb")
SETTINGS = {
    "activation_checkpointing": ["none", "selective", "full"],
    "checkpointed_layers.every": [2, 3],
    "gradients.lifetime": ["layer"],
    "gradient_accumulation_steps": [2],
    "master_weights": ["fp32"],
    "compute_dtype": ["fp32"],
    "zero_gradients": ["fill"],
    "clip_gradients": ["false"],
    "dropout": [0.1],
    "evaluation": ["true"],
    "padded_rows": ["true", "false"],
    "kernels.attention": ["math", "efficient"],
    "kernels.norm": ["composite"],
    "kernels.loss": ["fp32", "chunked", "fused-linear"],
    "kernels.optimizer": ["fused", "for-loop"],
    "optimizer.default": ["sgd-momentum", "adamw-8bit", "lion", "adafactor"],
    "offload.optimizer_states": ["cpu"],
    "offload.activations": ["cpu"],
    "freeze.last_layers": [1, 2],
    "freeze.first_layers": [2],
    "adapter.rank": [1, 64],
    "adapter.targets": ["[q_proj, v_proj]", "[down_proj]"],
    "adapter.kind": ["dora"],
    "adapter.modules_to_save": ["[lm_head]"],
    "method.stage": ["dpo", "reward"],
    "compile": ["layers"],
    "weight_average": ["fp32"],
    "parallel.data": [2],
    "parallel.zero_stage": [1, 3],
}
chosen = st.lists(st.sampled_from(sorted(SETTINGS)), max_size=3, unique=True).flatmap(
    lambda keys: st.tuples(*[st.sampled_from([f"{key}={value}" for value in SETTINGS[key]]) for key in keys])
)
SHARDED = ("", "trl", "torchtitan", "torchtune"), ("parallel.data=8", "parallel.zero_stage=3")
"""Stacks that share what layers save among GPUs, and the keys: few of the jobs drawn above are planned with them."""
LESS_THAN_EACH_LAYER = (
    ("gpt2", "mixed-adamw", "nanogpt", ("compile=model",), 64, 1024),
    ("llama-3.2-1b", "bf16-adamw", "torchtitan", ("compile=layers",), 16, 8192),
    ("llama-3.2-1b", "bf16-adamw", "torchtitan", ("compile=layers", "activation_checkpointing=full"), 64, 8192),
    ("qwen3-4b", "qlora", "unsloth", ("offload.activations=cpu", "activation_checkpointing=full"), 64, 4096),
    ("llama-3.2-1b", "bf16-adamw", "torchtitan", ("compile=layers", "activation_checkpointing=none"), 32, 4096),
    ("llama-3.2-1b", "mixed-adamw", "", (*SHARDED[1], "activation_checkpointing=none"), 4, 1024),
    ("qwen3-0.6b", "bf16-adamw", "trl", (*SHARDED[1], "activation_checkpointing=none"), 32, 4096),
    ("qwen3-4b", "mixed-adamw", "trl", ("zero_gradients=fill", "offload.activations=cpu", "activation_checkpointing=full"), 8, 100_000),
)  # fmt: skip
"""Jobs that save less than eager layers on one GPU do, which bounds of those would rule out."""


def jobs_of(stacks=STACKS, sets=(), models=MODELS, configs=CONFIGS, *, batches=9, lengths=700):
    return st.tuples(
        st.sampled_from(models),
        st.sampled_from(configs),
        st.sampled_from(stacks),
        chosen.map(lambda drawn: (*drawn, *sets)),
        st.integers(1, batches),
        st.integers(2, lengths),
    )


@cache
def model_of(name: str):
    return catalog_model(name, CATALOG)


def bounds_and_peak(job, card: str) -> tuple[dict[str, int], int]:
    """Return what rules a job out, bound by bound, and what its step requests."""
    name, config, stack, sets, batch, length = job
    sets = (*sets, f"micro_batch_size={batch}", f"sequence_length={length}")
    setup = find_setup(config, Overrides(settings=sets, stack=stack or None), CATALOG, None)
    model = as_trained(model_of(name), setup)
    plan = CompiledPlan(model, setup).on(CATALOG.gpus[card])
    sought = _Planned(model, setup, least_bytes_per_parameter(setup))
    bounds = {
        "before a plan": sought.least_bytes,
        "least": plan.least_bytes(batch, length),
        "saved": plan.saved_bytes(batch, length),
    }
    return bounds, plan.requested_bytes(batch, length)


def hold_bounds(job, card: str) -> None:
    try:
        bounds, requested = bounds_and_peak(job, card)
    except MemplanError:
        assume(False)
    assert {name: size for name, size in bounds.items() if size > requested} == {}


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(jobs_of(), st.sampled_from(CARDS))
def test_nothing_that_rules_a_model_out_exceeds_what_its_step_requests(job, card):
    hold_bounds(job, card)


@settings(max_examples=24, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(jobs_of(*SHARDED, batches=64, lengths=4096), st.sampled_from(CARDS))
def test_nor_where_ranks_hold_shards(job, card):
    hold_bounds(job, card)


@pytest.mark.parametrize("job", LESS_THAN_EACH_LAYER)
def test_compiled_layers_shards_and_activations_in_host_memory_are_not_counted_as_eager_ones_on_one_gpu(job):
    bounds, requested = bounds_and_peak(job, "h100-sxm-80gb")
    assert {name: size for name, size in bounds.items() if size > requested} == {}
