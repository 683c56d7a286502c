"""Traces against what the C library was asked for: a count that knows nothing of torch's books."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "data" / "malloc_count.c"
TOLERANCE = 1e-4
"""Relative, as for torch's own events: step counters, small blocks of oneDNN."""

RANDOM_STATE_BYTES = 5056
"""State of the CPU's generator, which each checkpoint keeps; a GPU's lies on the host."""

CHECKPOINTS = {"fp32 checkpointed": 2, "fp32 chunked loss": 8}

CASES = {
    "fp32 adamw": {"weights": {"default": "fp32"}, "compute_dtype": "fp32"},
    "fp32 sgd": {"weights": {"default": "fp32"}, "compute_dtype": "fp32", "optimizer": {"default": "sgd"}},
    "fp32 checkpointed": {"weights": {"default": "fp32"}, "compute_dtype": "fp32", "activation_checkpointing": "full"},
    "fp32 chunked loss": {
        "weights": {"default": "fp32"},
        "compute_dtype": "fp32",
        "kernels": {"loss": "chunked"},
        "optimizer": {"default": "sgd"},
    },
}

CHILD = """
import ctypes, json, sys
hook = ctypes.CDLL(None)
for name in ("malloc_count_live", "malloc_count_peak"):
    getattr(hook, name).restype = ctypes.c_size_t
import torch
torch.set_num_threads(1)
from memplan.catalog.catalog import Catalog, data_directory
from memplan.measure.measure_cpu import Marker
from memplan.trace.jobs.reference_job import Session
from memplan.trace.tracer import trace_training
from memplan.documents.loading import parse_document
from memplan.documents.schemas import validate
from memplan.model.model import Model
from memplan.model.spec import Attention, Layer, LayerRun, Mlp, ModelSpec, Norm
from memplan.training.resolution.resolve_config import resolve
from memplan.catalog.training_config import TrainingConfig

layer = Layer(Attention(8, 4, 32, 32), Mlp(768), Norm())
model = Model.from_spec(ModelSpec("small", "llama", 16000, 256, (LayerRun(layer, 2),), Norm()), "test")
keys = {"description": "", "micro_batch_size": 2, "sequence_length": 128, **json.loads(sys.argv[1])}
setup = resolve(validate(TrainingConfig, parse_document(json.dumps(keys), "case")), Catalog(data_directory()), "case")
traced = trace_training(model, setup, target="cpu").peak_bytes
before = hook.malloc_count_live()
session, marker = Session(model.spec, setup, device="cpu", target="cpu"), Marker()
session.watch(marker)
session.step(marker)
hook.malloc_count_reset()
session.step(marker)
print(json.dumps({"traced": traced, "counted": hook.malloc_count_peak() - before}))
"""


@pytest.fixture(scope="module")
def hook(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("counting allocations takes a C compiler and Linux")
    library = tmp_path_factory.mktemp("hook") / "malloc_count.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    return library


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_trace_equals_what_the_c_library_was_asked_for(hook, case):
    environment = {**os.environ, "LD_PRELOAD": str(hook)}
    command = [sys.executable, "-c", CHILD, json.dumps(CASES[case])]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    states = CHECKPOINTS.get(case, 0) * RANDOM_STATE_BYTES
    assert abs(found["counted"] - found["traced"]) <= TOLERANCE * found["traced"] + states
