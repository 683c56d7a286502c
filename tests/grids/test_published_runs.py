"""Launch commands as they are published, and what Megatron-LM's own modules hold of them on some of their ranks.

The record is what megatron-core 0.16.1 builds of each command on tensors without memory: its GPT model with Transformer Engine's own
Python (transformer_engine_stub.py), its ``DistributedDataParallel``, and its distributed optimizer's ranges, as that rank. Of a rank: bytes
of weights, of gradients, of fp32 copies and of moments. Commands are of NeMo's and Megatron-Bridge's recipes, MLPerf, and papers.
"""

import json
import shlex
from pathlib import Path

import memplan

RUNS = json.loads((Path(__file__).parent / "megatron-published.json").read_text(encoding="utf-8"))["runs"]


def test_ranks_of_published_runs_keep_what_megatron_builds(tmp_path):
    script = tmp_path / "train.sh"
    for run in RUNS:
        flags = " ".join(map(shlex.quote, run["flags"].split()))
        script.write_text(f"torchrun --nproc_per_node 8 --nnodes {run['gpus'] // 8} pretrain_gpt.py {flags}\n")
        plan = memplan.plan_grid(script, gpu="b200").plan
        assert plan.grid.world == run["gpus"]
        for rank, held in run["ranks"].items():
            own = plan.rank(int(rank))
            planned = [own.weights, own.gradients, own.master_weights, own.optimizer_states]
            assert planned == held, (run["source"], run["model"], rank)
