"""Loops over the chunks of a tensor.

They all start here: every turn takes and gives back the same memory, but for a shorter last one. On
tensors without memory a trace can therefore run the first turns for all (``first_turns``), where a
tensor of a billion elements has a thousand; tests hold that against every turn.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_most_turns: int | None = None


def starts(length: int, step: int) -> range:
    """Return where each chunk of ``step`` begins in ``length``."""
    return range(0, length if _most_turns is None else min(length, _most_turns * step), step)


@contextmanager
def first_turns(count: int) -> Iterator[None]:
    """Let loops over chunks run no more than their first ``count`` turns."""
    global _most_turns  # backward runs on threads of its own, which a context variable does not reach
    before, _most_turns = _most_turns, count
    try:
        yield
    finally:
        _most_turns = before
