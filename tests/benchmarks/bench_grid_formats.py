"""How much faster scales of grid formats are found than by comparing every group with every point at every scale; updates' times.

Run it itself: ``python tests/benchmarks/bench_grid_formats.py``.
"""

import sys
from pathlib import Path

import torch
from timing import samples

sys.path.insert(0, str(Path(__file__).parents[2]))
from memplan.muon.weights.weight_codecs import weight_format
from memplan.muon.weights.weight_formats import DEFAULT_SEARCH
from tests.muon.plain_grid_search import plain_sub_scales

BLOCKS, REPEATS = 256, 3


def seconds(call, *arguments):
    """Return the least time on the processor of a few calls, after one that is not counted."""
    return min(samples(lambda: call(*arguments), REPEATS + 1)[1:])


def main():
    torch.set_num_threads(1)
    for name in ("iq3-xxs", "iq2-xxs", "iq2-xs", "iq2-s"):
        chosen = weight_format(name)
        subs = torch.randn(BLOCKS, 256 // chosen.sub, chosen.sub, generator=torch.Generator().manual_seed(0)).abs()
        plain = seconds(plain_sub_scales, chosen, subs, DEFAULT_SEARCH)
        ours = seconds(chosen._sub_scales, subs, DEFAULT_SEARCH)
        print(f"{name}: {plain / ours:.1f} times as fast ({ours / subs.numel() * 1e9:.0f} ns an element)")
        values, noise = torch.randn(subs.numel()), torch.Generator()
        codes = torch.zeros((BLOCKS, chosen.block_bytes), dtype=torch.uint8)
        chosen.encode_(values, codes)
        nearest = seconds(chosen.encode_, values * 1.01, codes, None, 1, True)
        drawn = seconds(chosen.encode_, values * 1.01, codes, noise, 1, True)
        each = 1e9 / subs.numel()
        print(
            f"    updates: {nearest * each:.0f} ns an element to nearest, {drawn * each:.0f} with stochastic rounding"
        )


if __name__ == "__main__":
    main()
