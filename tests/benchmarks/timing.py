"""How long calls take, for all benchmarks alike."""

import time
from collections.abc import Callable


def samples(call: Callable[[], object], count: int, clock: Callable[[], float] = time.process_time) -> list[float]:
    """Return what each of so many calls takes on a clock, by default this process's own, so that others hardly count."""
    taken = []
    for _ in range(count):
        start = clock()
        call()
        taken.append(clock() - start)
    return taken
