"""Speed of the allocator simulator; run with ``pytest -s -m benchmark tests/benchmarks/bench_allocator.py``."""

import random
import time

import pytest

from memplan.allocator.caching_allocator import replay
from memplan.allocator.settings import parse_alloc_conf
from memplan.units import MIB

EVENTS = 100_000


def training_like_events(count, seed=0):
    """Births and deaths of tensors of all sizes, most dying in the reverse order of their birth."""
    choose = random.Random(seed)
    events, live = [], []
    for storage in range(count):
        if live and choose.random() < 0.5:
            events.append((-1, *live.pop(choose.randrange(len(live)) if choose.random() < 0.3 else -1)))
        else:
            limit = choose.choice([4096, MIB, 64 * MIB])
            live.append((storage, choose.randrange(1, limit)))
            events.append((1, *live[-1]))
    return events


@pytest.mark.benchmark
@pytest.mark.parametrize("configuration", ["", "expandable_segments:True", "roundup_power2_divisions:8"])
@pytest.mark.parametrize("share", [None, 0.97], ids=["unlimited", "tight"])
def test_replay_speed(configuration, share):
    events = training_like_events(EVENTS)
    settings = parse_alloc_conf(configuration)
    capacity = share and int(replay(events, settings).reserved_peak_bytes * share)
    start = time.perf_counter()
    result = replay(events, settings, capacity)
    seconds = time.perf_counter() - start
    outcome = "survives" if result.survives else "out of memory"
    print(f"\n{configuration or 'native'}, capacity {capacity}: {seconds:.3f} s, {result.retries} retries, {outcome}")
