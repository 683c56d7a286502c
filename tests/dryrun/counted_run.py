"""Really run a script on the CPU, and print the most bytes that torch's allocator had handed out: ``counted_run.py N SCRIPT``."""

import contextlib
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from memplan.measure.measure_cpu import moments


class EnoughError(BaseException):
    """Ends the script."""


def main() -> None:
    steps, script = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    taken = 0

    def stepped(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken >= steps:
            raise EnoughError

    register_optimizer_step_post_hook(stepped)
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # whose products in bf16 copy their operands, as CUDA's do not
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with recording as recorded, contextlib.suppress(EnoughError):
        runpy.run_path(script, run_name="__main__")
    total = peak = 0
    for _, change in sorted(
        moments(recorded.profiler.kineto_results.experimental_event_tree()), key=lambda one: one[0]
    ):
        if isinstance(change, int):
            total += change
            peak = max(peak, total)
    print("peak", peak)


if __name__ == "__main__":
    main()
