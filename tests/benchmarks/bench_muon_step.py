"""Whole steps on the matrices of three real models against ``torch.optim.Muon``'s, as ratios of one run.

Run ``python tests/benchmarks/bench_muon_step.py [--models NAME...] [--layers 2] [--threads N] [--device cuda]``. Parameters and gradients are in
bf16, momentum as each optimizer keeps it by default. The optimizers take turns, and the least time of each counts.
"""

import argparse
import time

import torch
from torch import nn

from memplan.library.lookup import Shapes, find_model, open_catalog
from memplan.model.inventory import expanded
from memplan.muon import Muon, predict_optimizer_bytes

MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b")
BATCH_BYTES = 256 << 20


def matrices(name, layers, device):
    """Return the hidden matrices of the first layers of a model."""
    inventory = find_model(name, Shapes(), open_catalog(None)).inventory
    wanted = [f".{layer}." for layer in range(layers)]
    shapes = [
        tensor.shape
        for full, tensor in expanded(inventory)
        if tensor.role == "hidden_matrix" and any(part in full for part in wanted)
    ]
    return [nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16)) for shape in shapes]


def seconds(step, device):
    """Return the time of a step, waited for."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ratios(name, layers, device, repeats):
    """Return the least seconds of each optimizer's step, and the scratch bytes that ours is planned to take."""
    kinds = {
        "torch": lambda parameters: torch.optim.Muon(parameters, lr=0.02),
        "one by one": lambda parameters: Muon(parameters, lr=0.02),
        "together": lambda parameters: Muon(parameters, lr=0.02, batch_bytes=BATCH_BYTES),
    }
    optimizers = {}
    for kind, made in kinds.items():
        parameters = matrices(name, layers, device)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizers[kind] = made(parameters)
    least = dict.fromkeys(kinds, float("inf"))
    for _ in range(repeats + 1):  # the first makes states and loads kernels
        for kind, optimizer in optimizers.items():
            least[kind] = min(least[kind], seconds(optimizer.step, device))
    scratch = {kind: predict_optimizer_bytes(optimizers[kind]).temporaries for kind in ("one by one", "together")}
    return least, scratch


def main():
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for name in given.models:
        least, scratch = ratios(name, given.layers, given.device, given.repeats)
        parts = [f"{kind} {least[kind] / least['torch']:.2f} ({scratch[kind] / 2**20:,.1f} MiB)" for kind in scratch]
        print(
            f"{name}, {given.layers} layers: torch.optim.Muon {least['torch'] * 1e3:,.0f} ms; ours {', '.join(parts)}"
        )


if __name__ == "__main__":
    main()
