"""Exported memory histories: read, refused, converted, and compared with the simulator."""

import json
import sys
from random import Random
from textwrap import dedent
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.allocator import memory_history
from memplan.allocator.caching_allocator import CachingAllocator, replay
from memplan.allocator.history_comparison import compare_history, storages
from memplan.allocator.memory_history import load_history, parse_history
from memplan.allocator.settings import AllocatorSettings, parse_alloc_conf
from memplan.errors import CannotAnswerError, InvalidFileError, MemplanError
from memplan.units import MIB

BASE = 0x7F10_0000_0000


def births_and_deaths(history):
    """A history as events that are replayed."""
    return [(sign, storage, event.size_bytes) for sign, storage, event in storages(history) if sign]


def entry(action, address, size, stream=0):
    return {"action": action, "addr": address, "size": size, "stream": stream, "frames": [], "time_us": 1}


def recorded(events, settings=None, capacity_bytes=None, step=2**36):
    """The trace that a run of (sign, storage, bytes) would have left, in the format of ``_snapshot()``.

    Segments lie ``step`` bytes apart, or end to end without one; a driver may well hand them out from high to low. A sign
    of 0 empties the cache.
    """
    taken = []
    allocator = CachingAllocator(settings, capacity_bytes, lambda size: place_of(taken, size, step))
    trace, blocks = [], {}
    for sign, storage, size in events:
        before = len(allocator.driver.calls)
        if not sign:
            allocator.release_cached()
            trace += [entry(*call) for call in allocator.driver.calls[before:]]
        elif sign > 0:
            blocks[storage] = allocator.malloc(storage, size)
            trace += [entry(*call) for call in allocator.driver.calls[before:]]
            trace.append(entry("alloc", blocks[storage].address, size))
        else:
            block = blocks.pop(storage)
            trace += [entry(action, block.address, size) for action in ("free_requested", "free_completed")]
            allocator.free(storage)
    return {"device_traces": [[], trace], "segments": segments_of(allocator)}


def place_of(taken, size, step):
    """The address of a new segment, behind those that were taken before."""
    taken.append(size if step is None else step)
    return BASE + sum(taken[:-1])


def segments_of(allocator):
    held = [block for block in allocator._live.values() if block] + allocator.free_blocks()
    heads = [block for block in held if block.previous is None or not block.previous.mapped]
    segments = []
    for head in heads:
        block, blocks = head, []
        while block is not None and block.mapped:
            state = "active_allocated" if block.allocated else "inactive"
            blocks.append({"size": block.size_bytes, "requested_size": block.requested_bytes, "state": state})
            block = block.following
        total = sum(block["size"] for block in blocks)
        segments.append({"device": 1, "address": head.address, "total_size": total, "stream": 0, "blocks": blocks})
    return segments


def history_of(data, **options):
    return parse_history(json.dumps(data), "history.json", **options)


def megabytes(*events):
    return [(sign, storage, int(size * MIB)) for sign, storage, size in events]


RUN = megabytes(
    (1, 0, 0.5), (1, 1, 3), (1, 2, 30), (1, 3, 9), (-1, 2, 30), (1, 4, 12), (1, 5, 20), (-1, 1, 3), (1, 6, 2),
    (-1, 4, 12), (1, 7, 44), (-1, 0, 0.5), (1, 8, 0.25),
)  # fmt: skip


@pytest.mark.parametrize("configuration", ["", "expandable_segments:True"])
@pytest.mark.parametrize("capacity", [None, 130 * MIB], ids=["unlimited", "with a retry"])
@pytest.mark.parametrize("step", [2**36, -(2**36)], ids=["rising", "falling addresses"])
def test_a_run_of_the_same_rules_agrees_event_by_event(configuration, capacity, step):
    settings = parse_alloc_conf(configuration)
    history = history_of(recorded(RUN, settings, capacity, step))
    comparison = compare_history(history, settings)
    assert (comparison.first_difference, comparison.differences) == (None, 0)
    assert (comparison.older_blocks, comparison.older_segment_bytes, comparison.unknown_frees) == (0, 0, 0)
    assert comparison.allocations == 9
    assert comparison.simulated_reserved_bytes == comparison.measured_reserved_bytes
    assert comparison.simulated_allocated_bytes == comparison.measured_allocated_bytes
    assert comparison.simulated.reserved_peak_bytes == comparison.measured_reserved_peak_bytes


@pytest.mark.parametrize("seed", range(16))
def test_any_run_of_the_same_rules_agrees_wherever_its_segments_lie(seed):
    rng = Random(f"history {seed}")
    conf = rng.choice(["", "large_segment_size_mb:40", "max_split_size_mb:30", "roundup_power2_divisions:4"])
    events, alive = [], {}
    for storage in range(60):
        if alive and rng.random() < 0.5:
            gone = rng.choice([*alive])
            events.append((-1, gone, alive.pop(gone)))
        elif rng.random() < 0.1:
            events.append((0, 0, 0))
        else:
            alive[storage] = rng.choice([1, 512, MIB, MIB + 1, 3 * MIB, 10 * MIB, 31 * MIB, 70 * MIB])
            events.append((1, storage, alive[storage]))
    data = recorded(events, parse_alloc_conf(conf), step=None)
    data["segments"].reverse()
    comparison = compare_history(history_of(data), parse_alloc_conf(conf))
    assert (comparison.first_difference, comparison.differences) == (None, 0)
    assert comparison.simulated_reserved_bytes == comparison.measured_reserved_bytes
    assert comparison.simulated.reserved_peak_bytes == comparison.measured_reserved_peak_bytes


def test_without_streams_all_is_of_one():
    data = recorded(RUN)
    whole = history_of(data)
    for one in (*data["device_traces"][1], *data["segments"]):
        del one["stream"]
    assert history_of(data) == whole


def test_the_first_difference_is_named():
    """The run was made with other settings than it is compared with."""
    history = history_of(recorded(RUN, parse_alloc_conf("large_segment_size_mb:40")))
    comparison = compare_history(history, AllocatorSettings())
    first = comparison.first_difference
    assert comparison.differences >= 1
    assert first.event == "alloc of 3145728 bytes"
    assert first.measured.startswith("segment_alloc 41943040 at ")
    assert first.simulated.startswith("segment_alloc 20971520 at ")
    assert history.events[3].action == "alloc"
    assert first.index == 3


@pytest.mark.parametrize(("segments", "rest"), [(4, ""), (5, ", ...")])
def test_no_more_than_four_segments_of_a_difference_are_named(segments, rest):
    taken = [entry("segment_alloc", BASE + number * 2 * MIB, 2 * MIB) for number in range(segments)]
    first = compare_history(history_of({"device_traces": [[*taken, entry("alloc", BASE, 512)]]})).first_difference
    assert first.measured == ", ".join(f"segment_alloc 2097152 at {one['addr']:#x}" for one in taken[:4]) + rest
    none = compare_history(history_of({"device_traces": [[entry("alloc", BASE, 512)]]})).first_difference
    assert none.measured == "no new segment"


def test_a_block_at_another_place_is_a_difference():
    data = recorded(RUN)
    alloc = next(event for event in data["device_traces"][1] if event["action"] == "alloc" and event["size"] == 9 * MIB)
    alloc["addr"] += 512
    comparison = compare_history(history_of(data | {"segments": []}))
    assert comparison.first_difference.measured.startswith("address 0x")


def test_the_settings_in_the_file_are_used():
    settings = parse_alloc_conf("large_segment_size_mb:40")
    data = recorded(RUN, settings) | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:40"}}
    assert compare_history(history_of(data)).differences == 0


def test_an_emptied_cache_is_followed():
    """``empty_cache`` leaves segment_free events without an allocation."""
    data = recorded(megabytes((1, 0, 30), (-1, 0, 30)))
    data["device_traces"][1].append(entry("segment_free", data["segments"][0]["address"], 30 * MIB))
    comparison = compare_history(history_of(data | {"segments": []}))
    assert (comparison.differences, comparison.simulated_reserved_bytes) == (0, 0)


def test_an_address_that_the_driver_hands_out_again_is_followed():
    trace = [entry("segment_alloc", BASE, 30 * MIB), entry("alloc", BASE, 30 * MIB)]
    trace += [entry("free_completed", BASE, 30 * MIB), entry("segment_free", BASE, 30 * MIB)]
    comparison = compare_history(history_of({"device_traces": [trace * 2]}))
    assert (comparison.differences, comparison.simulated.segments) == (0, 1)


def test_the_event_stream_replays():
    history = history_of(recorded(RUN))
    assert replay(births_and_deaths(history)) == replay(RUN)


def test_blocks_older_than_the_history_are_counted_and_take_their_room():
    """One is freed without an allocation, one stands in the final snapshot without an event."""
    data = recorded(RUN)
    trace = data["device_traces"][1]
    start = next(index for index, event in enumerate(trace) if event["size"] == 9 * MIB)
    data["device_traces"][1] = trace[start:]
    comparison = compare_history(history_of(data))
    assert comparison.older_blocks == 3
    assert comparison.older_block_bytes == int(33.5 * MIB)
    assert comparison.unknown_frees == 3
    assert comparison.older_segment_bytes == 52 * MIB
    assert comparison.simulated.requested_peak_bytes == replay(RUN).requested_peak_bytes
    assert comparison.simulated_allocated_bytes == comparison.measured_allocated_bytes


def test_an_older_block_is_no_difference_wherever_it_was():
    trace = [entry("free_completed", BASE + 512 * block, 512) for block in (4, 2)]
    comparison = compare_history(history_of({"device_traces": [trace]}))
    assert (comparison.older_blocks, comparison.allocations, comparison.differences) == (2, 0, 0)


def test_without_completed_frees_the_requests_end_a_life():
    """``skip_actions=["free_completed"]`` leaves only the requests."""
    data = recorded(RUN)
    data["device_traces"][1] = [event for event in data["device_traces"][1] if event["action"] != "free_completed"]
    assert compare_history(history_of(data)).differences == 0


def test_failed_requests_and_other_entries_are_counted():
    data = recorded(RUN)
    data["device_traces"][1] += [
        {"action": "oom", "size": 512, "device_free": 0, "stream": 0},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
        {"action": "user_defined"},
    ]
    comparison = compare_history(history_of(data))
    assert (comparison.out_of_memory, comparison.ignored_events, comparison.differences) == (1, 2, 0)


def test_an_address_allocated_twice_ends_the_first_life():
    data = {"device_traces": [[entry("alloc", BASE, 512), entry("alloc", BASE, 1024)]]}
    assert births_and_deaths(history_of(data)) == [(1, 0, 512), (-1, 0, 1024), (1, 1, 1024)]


def test_the_documented_export_is_read(tmp_path, monkeypatch):
    """The three lines at the head of the module, run on a snapshot."""
    snapshot = recorded(RUN) | {"external_annotations": [object()]}
    torch = SimpleNamespace(cuda=SimpleNamespace(memory=SimpleNamespace(_snapshot=lambda: snapshot)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.chdir(tmp_path)
    lines = memory_history.__doc__.splitlines()
    start = lines.index("    import json, torch")
    exec(dedent("\n".join(lines[start : start + 3])), {})
    assert compare_history(load_history(tmp_path / "history.json")).differences == 0


@pytest.mark.parametrize("name", ["snapshot.pickle", "snapshot.pkl", "snapshot.json", "snapshot.pt"])
@pytest.mark.parametrize("content", [b"\x80\x04\x95", b"PK\x03\x04"])
def test_a_pickle_is_refused_with_what_to_do(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidFileError, match=r"never loads; export it as JSON: json\.dump") as caught:
        load_history(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_history, "MAXIMUM_HISTORY_BYTES", MIB)
    (tmp_path / "history.json").write_bytes(b" " * (MIB + 1))
    with pytest.raises(InvalidFileError, match="larger than 1 MiB: record without stacks"):
        load_history(tmp_path / "history.json")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "device_traces: expected a list"),
        ([], "device_traces: expected a list"),
        ({"device_traces": [[], []]}, "no events"),
        ({"device_traces": [[{"action": 5}]]}, r"device_traces\[0\]\[0\]: expected an event with an action"),
        ({"device_traces": [[entry("alloc", BASE, -5)]]}, r"\[0\]\.size: expected an integer from 1 to .*, got -5"),
        ({"device_traces": [[entry("alloc", BASE, 2.5)]]}, "got 2.5"),
        ({"device_traces": [[entry("alloc", BASE, True)]]}, "got True"),
        ({"device_traces": [[entry("alloc", 2**62, 512)]]}, rf"\[0\]\.addr: expected an integer from 0 to {2**62 - 1}"),
        ({"device_traces": [[entry("alloc", BASE, 512)]], "segments": 3}, "segments: expected a list"),
        ({"device_traces": [[entry("alloc", BASE, 512)]], "segments": [3]}, r"segments\[0\]: expected a segment"),
        ({"device_traces": [[1], [1]]}, "events of devices 0, 1: choose one"),
    ],
)
def test_what_is_wrong_is_named(data, problem):
    with pytest.raises(InvalidFileError, match=problem):
        history_of(data)


@pytest.mark.parametrize(
    ("path", "key", "least", "most"),
    [
        (("device_traces", 0, 0), "addr", 0, 2**62 - 1),
        (("device_traces", 0, 0), "size", 1, 2**50 - 1),
        (("device_traces", 0, 0), "stream", 0, 2**64 - 1),
        (("segments", 0), "address", 0, 2**62 - 1),
        (("segments", 0), "total_size", 1, 2**50 - 1),
        (("segments", 0), "stream", 0, 2**64 - 1),
        (("segments", 0, "blocks", 0), "size", 1, 2**50 - 1),
        (("segments", 0, "blocks", 0), "requested_size", 0, 2**50 - 1),
    ],
)
def test_a_number_is_taken_from_the_least_to_the_most_that_makes_sense(path, key, least, most):
    segment = {"device": 0, "address": BASE, "total_size": 1024, "blocks": [{"size": 1024, "state": "inactive"}]}
    data = {"device_traces": [[entry("alloc", BASE, 512)]], "segments": [segment]}
    part = data
    for step in path:
        part = part[step]
    for number in (least, most):
        part[key] = number
        assert history_of(data).events
    for number in (least - 1, most + 1):
        part[key] = number
        with pytest.raises(InvalidFileError, match=rf"{key}: expected an integer from {least} to {most}, got {number}"):
            history_of(data)


def test_one_of_several_devices_is_chosen():
    data = {"device_traces": [[entry("alloc", BASE, 512)], [entry("alloc", BASE, 1024)]]}
    assert history_of(data, device=1).events[0].size_bytes == 1024
    with pytest.raises(InvalidFileError, match="choose one"):
        history_of(data, device=2)


def test_private_pools_are_not_modelled():
    data = {"device_traces": [[entry("alloc", BASE, 512) | {"pool_id": [0, 1]}]]}
    with pytest.raises(CannotAnswerError, match="CUDA graphs"):
        history_of(data)


@pytest.mark.parametrize("text", ["", "{", '{"device_traces": NaN}', "[" * 100_000, "9" * 5000, "\ufeff{}", "{]"])
def test_text_that_is_not_json_is_refused_in_one_line(text):
    with pytest.raises(InvalidFileError) as caught:
        parse_history(text, "history.json")
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(InvalidFileError, match="no such file"):
        load_history(tmp_path / "absent.json")


ACTIONS = [
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot", "",
]  # fmt: skip
ENTRIES = st.fixed_dictionaries(
    {
        "action": st.sampled_from(ACTIONS),
        "addr": st.integers(0, 6).map(lambda place: place * MIB),
        "size": st.sampled_from([1, 512, MIB, 2 * MIB, 20 * MIB, 2**49]),
        "stream": st.integers(0, 1),
    }
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(ENTRIES, min_size=1, max_size=40), st.sampled_from(["", "expandable_segments:True"]))
def test_senseless_but_well_formed_histories_compare_without_a_crash(entries, configuration):
    data = {"device_traces": [entries]}
    comparison = compare_history(history_of(data), parse_alloc_conf(configuration))
    assert comparison.allocations == sum(event["action"] == "alloc" for event in entries)


@given(JSON_VALUES, JSON_VALUES, JSON_VALUES)
def test_hostile_values_give_memplan_errors_only(value, trace, segment):
    for data in (
        value,
        {"device_traces": value},
        {"device_traces": [[trace]], "segments": value},
        {"device_traces": [[entry("alloc", trace, segment)]], "segments": [{"blocks": [value], "address": segment}]},
    ):
        try:
            compare_history(history_of(data))
        except MemplanError:
            continue
