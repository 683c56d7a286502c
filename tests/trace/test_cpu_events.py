"""Traces against what torch's CPU allocator really did, event by event summed."""

from typing import Any

import pytest
import torch

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, Gradients
from memplan.measure.measure_cpu import NEXT_STEP, Marker, peaks_of
from memplan.model.model import Model
from memplan.trace.jobs.reference_job import Session
from memplan.trace.tracer import trace_training

pytestmark = pytest.mark.thorough

TOLERANCE = 1e-4
"""Relative. AdamW's step counters (4 bytes each) and the generator's state that each checkpoint
keeps (5056 bytes) lie on the CPU there and on the host of a GPU: no trace has them."""

FP32: dict[str, Any] = {"weights": {"default": "fp32"}, "compute_dtype": "fp32"}
AUTOCAST: dict[str, Any] = {"weights": {"default": "fp32"}}
CODED: dict[str, Any] = {"weights": {"default": "q4-0", "norm": "fp32"}, "optimizer": {"default": "adamw-int8"}}

LLAMA: dict[str, dict[str, Any]] = {
    "fp32": FP32,
    "bf16": {},
    "bf16-fused-optimizer": {"kernels": Kernels(optimizer="fused")},
    "bf16-loop-optimizer": {"kernels": Kernels(optimizer="for-loop")},
    "bf16-sgd": {"optimizer": {"default": "sgd"}},
    "fp32-checkpointed": {**FP32, "activation_checkpointing": "full"},
    "bf16-checkpointed": {"activation_checkpointing": "full"},
    "bf16-selective": {"activation_checkpointing": "selective"},
    "autocast": AUTOCAST,
    "autocast-checkpointed": {**AUTOCAST, "activation_checkpointing": "full"},
    "chunked-loss": {"kernels": Kernels(loss="chunked")},
    "fp32-loss-composite-norm": {"kernels": Kernels(loss="fp32", norm="composite")},
    "math-attention": {"kernels": Kernels(attention="math")},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"clip_gradients": True},
    "filled-gradients": {"zero_gradients": "fill"},
    "released-gradients": {"gradients": Gradients(lifetime="layer")},
    "lora": {"adapter": Adapter()},
    "dora": {"adapter": Adapter("dora")},
    "coded": CODED,
    "dropout": {"dropout": 0.1},
    "evaluation": {"evaluation": True},
    "master-weights": {"master_weights": "fp32", "optimizer": {"default": "adamw-fp32"}},
    "averaged-weights": {"weight_average": "fp32"},
}
FAST = ("fp32", "bf16-checkpointed", "lora")

MIXTURES = ("deepseek-v2-lite", "mixtral-8x7b-v0.1")
FAMILIES = (
    "gpt2",
    "qwen3-0.6b",
    "gemma-2b",
    "olmo-2-7b",
    "pythia-160m",
    "falcon-7b",
    "phi-1.5",
    "phi-3-mini",
    *MIXTURES,
)


def cpu_peaks(model, setup, steps: int = 2) -> dict[str, int]:
    """Return the greatest need of each instant of the last of some steps, by the events of this machine's CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        session = Session(model.spec, setup, device="cpu", target="cpu")
        marker = Marker()
        session.watch(marker)
        for _ in range(steps):
            marker.instant(NEXT_STEP)
            session.step(marker)
    return peaks_of(recorded.profiler.kineto_results.experimental_event_tree())


def difference(model: Model, setup: Any) -> float:
    """Return how far the traced peak is from the measured one, as a share of it."""
    if setup.config.compute_dtype != "fp32" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("oneDNN's products in 16 bits copy their operands on this processor")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    measured = cpu_peaks(model, setup)
    traced = trace_training(model, setup, target="cpu")
    assert max(measured, key=lambda name: measured[name]) == traced.peak_instant
    return abs(traced.peak_bytes - max(measured.values())) / max(measured.values())


def cases() -> list[Any]:
    return [pytest.param(keys, id=name, marks=() if name in FAST else pytest.mark.slow) for name, keys in LLAMA.items()]


@pytest.mark.parametrize("keys", cases())
def test_a_small_llama_takes_what_its_trace_says(make_model, make_setup, keys):
    assert difference(make_model("cpu"), make_setup(micro_batch_size=4, sequence_length=256, **keys)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_narrow_model_of_every_kind_takes_what_its_trace_says(make_model, make_setup, shrunk, name):
    # Grouped products of the CPU build take bf16 only.
    dtypes = {} if name in MIXTURES else FP32
    setup = make_setup(micro_batch_size=2, sequence_length=256, **dtypes)
    assert difference(shrunk(make_model(name)), setup) <= TOLERANCE
