"""Steps as torchtitan's trainers run them: without Python's collector of cycles, which they turn off."""

import gc
from collections.abc import Callable

from memplan.trace.recording.recorder import Recorder
from memplan.trace.recording.valueless_tensors import AnyNumber
from memplan.trace.stacks.registry import STEPS


def run_steps(step: Callable[[], None], recorder: Recorder) -> None:
    """Run steps of a trainer before a recorder.

    When Python collects cycles depends on all that the process did before, and when tensors in them are let go of would with it.

    Source:
        ``GarbageCollection`` in torchtitan/tools/utils.py (0.3.0 and 0.2.2): off from the trainer's first line, and called
        every ``training.gc_freq`` steps, 50 unless a file says otherwise.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with AnyNumber(), recorder:  # type: ignore[no-untyped-call]
            for _ in range(STEPS):
                recorder.next_step()
                step()
    finally:
        if enabled:
            gc.enable()
