"""Newton-Schulz with products in 8 bits beside bf16's: time, and how far singular values are from one.

Run ``python tests/benchmarks/bench_quantised_products.py [--width 1024 4096] [--device cuda]``. On CUDA FP8 runs in
``torch._scaled_mm`` (compute capability 8.9 and later) and INT8 in ``torch._int_mm``; elsewhere they are emulated: there
singular values mean what they would on a GPU, to the order of sums, and times mean nothing.
"""

import argparse

import torch
from bench_muon_step import seconds

from memplan.muon.orthogonalisation.newton_schulz import newton_schulz_
from memplan.muon.orthogonalisation.products import PRODUCT_NAMES, quantised_products
from memplan.muon.orthogonalisation.schedules import resolved_schedule

WAYS = {
    "bf16": None,
    **{
        f"{format}, {'all three' if len(which) > 1 else which[0]}": quantised_products(format, which)
        for format in ("fp8-e4m3", "int8")
        for which in (("gram",), PRODUCT_NAMES)
    },
}


def report(width, device, repeats):
    """Print a line for each way, all of one matrix."""
    torch.manual_seed(0)
    matrix = torch.randn(width, width, device=device).bfloat16()
    schedule = resolved_schedule("keller-jordan", 5)
    plain = 0.0
    for name, products in WAYS.items():
        result = newton_schulz_(matrix.clone(), schedule, products=products)
        copies = [matrix.clone() for _ in range(repeats)]
        taken = min(
            seconds(lambda copy=copy, products=products: newton_schulz_(copy, schedule, products=products), device)
            for copy in copies
        )
        plain = plain or taken
        values = torch.linalg.svdvals(result.float())
        low, high = (float(torch.quantile(values, share)) for share in (0.01, 1.0))
        away = float((values - 1).square().mean().sqrt())
        print(
            f"{width:6} {name:22} {taken * 1e3:9.2f} ms  {taken / plain:6.2f} x bf16  singular values "
            f"{low:.3f} (1 %) to {high:.3f}, root mean square distance from one {away:.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, nargs="+", default=[1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = parser.parse_args()
    print(f"torch {torch.__version__}, {chosen.device}")
    for side in chosen.width:
        report(side, chosen.device, chosen.repeats)
