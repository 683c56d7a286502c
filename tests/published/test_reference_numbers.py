"""Llama-3.1-8B on one GPU, batch 1, sequence 2048, no checkpointing: figures of traced steps.

Source: a reference model of Llama-3.1-8B traced on meta tensors with torch 2.13, every storage
followed from birth to death; flash attention, fused norm, bf16 loss.
"""

import pytest

from memplan.catalog.kernel_profiles import Kernels
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.units import GIB

PARAMETERS = 8_030_261_248
TENSORS = 32 * 9 + 3

BF16 = {"weights": {"default": "bf16"}, "optimizer": {"default": "adamw-bf16"}}
AUTOCAST = {"weights": {"default": "fp32"}, "compute_dtype": "bf16", "optimizer": {"default": "adamw-fp32"}}


@pytest.fixture
def llama(model, setup_of):
    return lambda kernel, keys: CompiledPlan(model("llama-8b"), setup_of(kernels=Kernels(optimizer=kernel), **keys))


@pytest.mark.parametrize(
    ("kernel", "keys", "gib", "instant"),
    [
        ("for-loop", BF16, "61.788", "optimizer step"),
        ("foreach", BF16, "74.789", "optimizer step"),
        ("fused", BF16, "59.847", "end of backward"),
        ("for-loop", AUTOCAST, "123.576", "optimizer step"),
        ("foreach", AUTOCAST, "149.577", "optimizer step"),
    ],
    ids=["bf16-for-loop", "bf16-foreach", "bf16-fused", "autocast-for-loop", "autocast-foreach"],
)
def test_the_requested_peak_is_the_traced_one_within_a_thousandth(llama, catalog, kernel, keys, gib, instant):
    plan = llama(kernel, keys).evaluate(Device(catalog.gpus["h200"], "h200"))
    assert abs(plan.requested_bytes / GIB - float(gib)) <= float(gib) / 1000
    assert plan.peak.name == instant


@pytest.mark.parametrize(("kernel", "counters"), [("for-loop", 0), ("foreach", 0), ("fused", 4 * TENSORS)])
def test_bf16_adamw_keeps_2_2_and_4_bytes_per_parameter_and_fused_counters_besides(llama, kernel, counters):
    states = llama(kernel, BF16).states
    assert states.weight_bytes == 2 * PARAMETERS
    assert states.gradient_bytes == 2 * PARAMETERS
    assert states.state_bytes == 4 * PARAMETERS + counters
    assert states.host_bytes == 4 * TENSORS - counters


def test_fp32_weights_under_autocast_keep_4_4_and_8_bytes_per_parameter(llama):
    states = llama("foreach", AUTOCAST).states
    assert (states.weight_bytes, states.gradient_bytes, states.state_bytes) == (
        4 * PARAMETERS,
        4 * PARAMETERS,
        8 * PARAMETERS,
    )


def test_the_shipped_configs_are_these_settings(plan_of):
    assert round(plan_of("llama-8b", "bf16-adamw").requested_bytes / GIB, 3) == 74.789
    assert abs(plan_of("llama-8b", "mixed-adamw").requested_bytes / GIB - 149.577) < 0.15
