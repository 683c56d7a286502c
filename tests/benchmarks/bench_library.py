"""Ten thousand plans of one model and config over batches and lengths: ``python tests/benchmarks/bench_library.py``.

The job is made once; verdict and expected bytes of every plan are read. Processor time of this process, so that other
programs count as little as they can.
"""

from itertools import product

import pytest
from timing import samples

import memplan

JOBS = (("llama-3.1-8b", "qlora"), ("llama-3.1-8b", "bf16-adamw"), ("llama-3.1-8b", "tier3"), ("deepseek-v3", "tier3"))
BATCHES = range(1, 101)
LENGTHS = range(128, 12_928, 128)
SAMPLES = 5


def seconds(model: str, config: str) -> float:
    """Return the least processor time, of several samples, that ten thousand plans take."""
    job = memplan.job(model, config=config)

    def planned() -> None:
        for batch, length in product(BATCHES, LENGTHS):
            plan = job.plan("rtx4090", micro_batch_size=batch, sequence_length=length)
            _ = plan.verdict, plan.expected_bytes

    return min(samples(planned, SAMPLES))


def report() -> str:
    """Return a line for each job."""
    count = len(BATCHES) * len(LENGTHS)
    lines = [f"{'model':16} {'config':12} {'plans':>8} {'processor time':>16}"]
    lines += [f"{model:16} {config:12} {count:8,} {seconds(model, config):14.2f} s" for model, config in JOBS]
    return "\n".join(lines)


@pytest.mark.benchmark
def test_ten_thousand_plans():
    print("\n" + report())


if __name__ == "__main__":
    print(report())
