"""Time of answers of many plans whose reserve is simulated; run with ``python tests/benchmarks/bench_rows.py``.

In process, after the program has started: the methods of ``memplan fit``, every config of ``--all`` and of ``--json``,
and every GPU of ``memplan where``. Shares alone are what they took before.
"""

from collections.abc import Callable

from timing import samples

import memplan

JOB = {"gpu": "rtx4090"}
MODEL = "llama-3.1-8b"
SAMPLES = 3


def answers() -> dict[str, Callable[[], object]]:
    """Return what is timed; each makes its answer from nothing."""
    return {
        "fit": lambda: memplan.fit(MODEL, **JOB).overview(),
        "fit --all": lambda: memplan.fit(MODEL, **JOB).document(full=False),
        "fit --json": lambda: memplan.fit(MODEL, **JOB).document(),
        "where": lambda: memplan.where(MODEL, config="qlora").document(),
    }


if __name__ == "__main__":
    for name, call in answers().items():
        print(f"{name:12} {min(samples(call, SAMPLES)):.2f} s")
