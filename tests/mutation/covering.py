"""Which tests come to which functions, so that a mutant is tried with those alone that come to what it changes."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import pytest

Function = tuple[str, str, int]
"""A function's module, its name and its first line."""
Comes = Mapping[Function, Mapping[str, float]]
"""For each function the tests that come to it, each with the seconds that it takes."""


def comes_to(
    tests: str,
    functions: Mapping[Function, Sequence[FunctionType]],
    options: Sequence[str],
    plugins: Sequence[object] = (),
) -> Comes:
    """Run tests once, in a process of its own, and return which functions each of them comes to.

    What is worked out once in a process is seen in the first test alone that asks for it, and what tests do in processes
    of their own is not seen.

    Args:
        tests: A file or folder of tests.
        functions: The functions that are loaded.
        options: Of pytest; likewise ``plugins``.
    """
    keys = list(functions)
    codes = {id(one.__code__): number for number, key in enumerate(keys) for one in functions[key]}
    read, write = os.pipe()
    process = os.fork()
    if not process:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            pytest.main([*options, tests], [_Seen(write, codes), *plugins])
        finally:
            os._exit(0)
    os.close(write)
    comes: dict[Function, dict[str, float]] = {}
    with os.fdopen(read, encoding="utf-8") as told:
        for line in told:
            test, seconds, seen = json.loads(line)
            for number in seen:
                comes.setdefault(keys[number], {})[test] = seconds
    os.waitpid(process, 0)
    return comes


class Chosen:
    """Leaves the tests that are chosen, the quickest first, and the examples of a module.

    Args:
        seconds: What each of them takes, by its name.
        module: The module.
    """

    def __init__(self, seconds: Mapping[str, float], module: str) -> None:
        self._seconds, self._module = seconds, module

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [one for one in items if one.nodeid in self._seconds or one.nodeid.startswith(self._module)]
        items.sort(key=lambda one: self._seconds.get(one.nodeid, 0.0))


class _Seen:
    """Tells of each test which code it comes to."""

    def __init__(self, to: int, codes: Mapping[int, int]) -> None:
        self._to, self._codes = to, codes

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        seen: set[int] = set()
        begin = time.process_time()
        sys.settrace(
            lambda frame, event, arg: seen.add(id(frame.f_code))
        )  # called for functions; lines are not asked for
        try:
            return (yield)  # type: ignore[return-value]
        finally:
            sys.settrace(None)
            numbers = [self._codes[code] for code in seen if code in self._codes]
            line = json.dumps([item.nodeid, time.process_time() - begin, numbers])
            for part in range(0, len(line) + 1, 4096):
                os.write(self._to, f"{line}\n".encode()[part : part + 4096])
