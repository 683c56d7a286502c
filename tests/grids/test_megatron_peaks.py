"""Peaks of Megatron-LM's steps, beside what its own code was traced to take and what its authors measured on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.grids.planned_peaks import planned_interval, planned_peak
from tests.grids.traced_peaks import PeakJob

RECORD = json.loads((Path(__file__).parent / "megatron-peaks-0.16.1.json").read_text())
JOBS = [(PeakJob(**row["job"]), row["traced"]["peak"]) for row in RECORD["jobs"]]
ENGINE = [(job, peak) for job, peak in JOBS if job.engine]
ENGINE_WORKSPACE = 32 * 2**20 + 1024  # allocated once on a GPU, and not in the trace


def test_every_traced_peak_lies_in_its_interval():
    assert len(JOBS) >= 100
    for job, peak in JOBS:
        interval = planned_interval(job)
        assert interval.least <= peak <= interval.most - ENGINE_WORKSPACE * job.engine, job


def test_peaks_with_transformer_engine_are_those_traced():
    errors = sorted(abs(planned_peak(job) / peak - 1) for job, peak in ENGINE)
    assert sum(error <= 0.001 for error in errors) >= 0.85 * len(errors)
    assert sum(error <= 0.01 for error in errors) >= 0.94 * len(errors)
    assert errors[-1] < 0.03


def test_peaks_of_its_own_modules_are_close_to_those_traced():
    errors = sorted(abs(planned_peak(job) / peak - 1) for job, peak in JOBS if not job.engine)
    assert sum(error <= 0.015 for error in errors) >= 0.8 * len(errors)
    assert errors[-1] < 0.07


SMALL = """MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --merge-file: merges.txt
  --bf16: true
  --no-gradient-accumulation-fusion: true
  --attention-backend: unfused
"""
LARGE = """MODEL_ARGS:
  --num-layers: 32
  --hidden-size: 4096
  --num-attention-heads: 32
  --group-query-attention: true
  --num-query-groups: 8
  --untie-embeddings-and-output-weights: true
  --micro-batch-size: 2
  --global-batch-size: 8
  --seq-length: 8192
  --max-position-embeddings: 8192
  --tokenizer-type: NullTokenizer
  --vocab-size: 131073
  --tensor-model-parallel-size: 4
  --use-distributed-optimizer: true
  --overlap-grad-reduce: true
  --bf16: true
"""
MEASURED = {
    "gpt3_7b_tp4_pp1_memory_speed": (LARGE, 57_143_791_616, 0.01),
    "gpt3_mcore_te_tp1_pp4_vp1": (
        SMALL + "  --pipeline-model-parallel-size: 4\n  --num-layers-per-virtual-pipeline-stage: 1\n", 4_148_526_592, 0.02,
    ),
    "gpt3_mcore_te_tp2_pp2_resume_torch_dist": (
        SMALL.replace("unfused", "auto") + "  --tensor-model-parallel-size: 2\n  --pipeline-model-parallel-size: 2\n", 1_428_171_264, 0.02,
    ),
    "gpt3_mcore_tp1_pp4": (SMALL + "  --pipeline-model-parallel-size: 4\n  --transformer-impl: local\n", 2_744_478_720, 0.08),
    "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_ddp_average_in_collective": (
        SMALL + "  --tensor-model-parallel-size: 2\n  --expert-model-parallel-size: 2\n  --num-experts: 8\n"
        "  --moe-router-topk: 1\n  --disable-bias-linear: true\n  --sequence-parallel: true\n  --use-distributed-optimizer: true\n",
        3_300_976_128, 0.05,
    ),
}  # fmt: skip
"""Megatron-LM's functional tests on 8 H100: golden_values_dev_dgx_h100.json, ``mem-max-allocated-bytes`` of the last rank, by the test's name
(tests/functional_tests/test_cases of github.com/NVIDIA/Megatron-LM at 09eb91e5, 08165aba, 06ecac39 and 136a8b99)."""


@pytest.mark.parametrize("name", MEASURED)
def test_what_its_authors_measured_lies_in_the_interval(cli, tmp_path, name):
    flags, measured, error = MEASURED[name]
    file = tmp_path / "run.yaml"
    file.write_text(flags)
    data = cli("fit", str(file), "--gpu", "h100", "--gpus", "8", "--json").data
    stage = data["stages"][-1]
    workspaces = next(line["bytes"] for line in data["rank"]["components"] if line["name"] == "library_workspaces")
    kept = stage["persistent_bytes"] + workspaces
    least, expected, most = (kept + stage[f"{word}_bytes"] for word in ("least_activation", "step", "most_step"))
    assert least < measured < most
    assert abs(expected / measured - 1) < error
