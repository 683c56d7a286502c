"""Whatever memplan is given, it answers or refuses: in a readable line, at once, in little memory.

Valid files of every kind are damaged (values, keys, text, bytes), and command lines drawn at random.
The default run takes some hundred cases; as many as are wanted, such as 200,000, are run by::

    MEMPLAN_FUZZ_CASES=200000 pytest -m slow tests/fuzz/test_input.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .arguments import command_lines
from .hostile import damaged, damages, edited, edits, serialised
from .running import called, check, outcome, peak_bytes
from .seeds import safetensors, seeds

FILE_CASES, LINE_CASES = 300, 100
LONG_RUN = int(os.environ.get("MEMPLAN_FUZZ_CASES", "20000"))
COMMAND_EVERY = 8
"""Damaged files that a reader takes directly, which is a hundred times faster, to one that a command is run on."""
CHUNK = 1_000
"""Cases of one search; what hypothesis remembers of a longer one would slow it down."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with every seed written into a folder of its own."""
    place = tmp_path_factory.mktemp("fuzz")
    return [(seed, seed.written(place / str(index))) for index, seed in enumerate(seeds(place))]


def searched(cases: int, case: Callable[[Any], None]) -> None:
    """Run ``case`` with so many draws, in searches of bounded length."""
    for number, start in enumerate(range(0, cases, CHUNK)):
        chosen = settings(
            max_examples=min(CHUNK, cases - start),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        hypothesis.seed(number)(chosen(given(st.data())(case)))()


def damaged_files(workplace, cases: int) -> None:
    """Damage files of every kind and run a command that reads them."""
    peak = peak_bytes()

    def case(data) -> None:
        seed, path = data.draw(st.sampled_from(workplace))
        content = seed.content
        if seed.data is not None and data.draw(st.integers(0, 3)):
            content = serialised(edited(seed.data, data.draw(edits())))
            content = safetensors(content) if path.suffix == ".safetensors" else content
        else:
            content = damaged(content, data.draw(damages()))
        path.write_bytes(content)
        if data.draw(st.integers(0, COMMAND_EVERY - 1)):
            check(called(lambda: seed.read(path), str(path)), peak)
        else:
            check(outcome(seed.arguments(data.draw(st.sampled_from(seed.commands)), path), content), peak)

    searched(cases, case)


def random_command_lines(cases: int) -> None:
    """Run command lines drawn at random."""
    peak = peak_bytes()
    searched(cases, lambda data: check(outcome(*data.draw(command_lines())), peak))


def test_every_seed_is_read_as_it_is(workplace):
    wrong = []
    for seed, path in workplace:
        for command in seed.commands:
            ran = outcome(seed.arguments(command, path), seed.content)
            wrong += [(seed.file, command, ran.err)] if ran.exit_code not in (0, 1) else []
    assert not wrong


def test_damaged_files_are_answered_or_refused(workplace):
    damaged_files(workplace, FILE_CASES)


def test_command_lines_drawn_at_random_are_answered_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random_command_lines(LINE_CASES)


@pytest.mark.slow
def test_many_damaged_files_are_answered_or_refused(workplace):
    damaged_files(workplace, LONG_RUN // 2)


@pytest.mark.slow
def test_many_command_lines_are_answered_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random_command_lines(LONG_RUN - LONG_RUN // 2)
