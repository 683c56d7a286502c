"""Our step against ``torch.optim.Muon``'s: time and temporaries, printed as ratios.

Run ``python tests/benchmarks/bench_newton_schulz.py [--width 1024 4096] [--threads N]``, or
``pytest -m benchmark -s tests/benchmarks/bench_newton_schulz.py`` for the small width. Both optimizers
take bf16 parameters and gradients. On CUDA the share of the card's measured bf16 peak is added.
"""

import argparse
import sys
import weakref

import pytest
import torch
from bench_muon_step import seconds
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memplan.muon import Muon
from memplan.muon.orthogonalisation.newton_schulz import gram_segments
from memplan.muon.orthogonalisation.schedules import resolved_schedule

STEPS = 5


class Peak(TorchDispatchMode):
    """Bytes of storages that operators return, at their most."""

    def __init__(self, existing):
        super().__init__()
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key, size):
        self.known.discard(key)
        self.live -= size


def operations(rows, columns, workspace):
    """Floating-point operations of five iterations, symmetric products counted in full."""
    m, n = min(rows, columns), max(rows, columns)
    if workspace == "min":
        return STEPS * 6 * m * m * n
    if workspace == "fast" or n < 2 * m:  # the Gram form is for longer matrices
        return STEPS * (4 * m * m * n + 2 * m**3)
    total = 0
    for part in gram_segments(resolved_schedule("keller-jordan", STEPS)):
        total += 4 * m * m * n + 2 * m**3 * (len(part) + 3 * (len(part) - 1))
    return total


def measured(shape, device, repeats):
    """Return seconds and temporary bytes by name; the optimizers take turns, and the least time counts.

    Ours work by default, and in stretches of an eighth of the columns of a square. On CUDA ``large`` is the Gram form in long
    ones: fewer and larger kernels for more memory.
    """
    chunk = min(shape) // 8
    stretch = {"ns_chunk_columns": chunk, "chunk_elements": min(chunk * min(shape), 1 << 20)}
    options = {"default": {}} | {name: {"ns_workspace": name, **stretch} for name in ("min", "fast", "gram")}
    if device == "cuda":
        options["large"] = {"ns_workspace": "gram", "ns_chunk_columns": max(shape), "chunk_elements": 1 << 24}
    start = torch.randn(shape, device=device).bfloat16()
    grad = torch.randn(shape, device=device).bfloat16()
    parameters = {name: nn.Parameter(start.clone()) for name in ("torch", *options)}
    optimizers = {
        name: torch.optim.Muon([p]) if name == "torch" else Muon([p], **options[name]) for name, p in parameters.items()
    }
    times = {name: float("inf") for name in parameters}
    extra = dict.fromkeys(parameters, 0)
    for turn in range(repeats + 1):
        for name, optimizer in optimizers.items():
            p = parameters[name]
            p.grad = grad.clone()
            if turn == 0:
                optimizer.step()
                p.grad = grad.clone()
                state = [tensor for tensor in optimizer.state[p].values() if isinstance(tensor, torch.Tensor)]
                with Peak([p, p.grad, *state]) as memory:
                    optimizer.step()
                extra[name] = memory.peak
            else:
                times[name] = min(times[name], seconds(optimizer.step, device))
    return times, extra


def peak_flops(device):
    """Operations per second of a large bf16 product: the card's measured peak."""
    side = 8192
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    best = min(seconds(lambda: a @ b, device) for _ in range(8))
    return 2 * side**3 / best


def report(width, device, repeats):
    peak = peak_flops(device) if device == "cuda" else None
    for shape in ((width, width), (width, 4 * width), (4 * width, width)):
        times, extra = measured(shape, device, repeats)
        for name, taken in times.items():
            line = (
                f"{shape[0]:6} x {shape[1]:<6} {name:7} {taken * 1e3:10.1f} ms  {taken / times['torch']:5.2f} x torch  "
            )
            line += f"temporaries {extra[name]:>13,} bytes  {extra[name] / extra['torch']:5.2f} x torch"
            if peak is not None and name != "torch":
                line += f"  {operations(*shape, name) / taken / peak:6.1%} of the measured bf16 peak"
            print(line)


@pytest.mark.benchmark
@pytest.mark.slow
def test_report_at_1024():
    report(1024, "cpu", 2)


@pytest.mark.cuda
@pytest.mark.benchmark
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_report_on_cuda():
    report(1024, "cuda", 20)
    report(4096, "cuda", 10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    print(f"torch {torch.__version__}, {chosen.device}, {torch.get_num_threads()} threads", file=sys.stderr)
    for side in chosen.width:
        report(side, chosen.device, chosen.repeats)
