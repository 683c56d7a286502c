"""Calls of the library drawn at random: its functions with values of every kind in the places of names, numbers and keys."""

import re
from collections.abc import Callable
from fractions import Fraction
from inspect import signature
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

import memplan
from memplan.errors import InvalidFileError
from memplan.library.job_options import JobOptions

from .any_settings import MODELS, setting
from .arguments import CONFIGS, EXAMPLES, GPUS, SIZES
from .hostile import some_text

SLOW = frozenset(("fit", "largest", "run", "suggest", "suggest_configs", "suggest_layouts", "trace", "where"))
"""Functions that plan hundreds of jobs, or start torch."""
FUNCTIONS = tuple(name for name in memplan.__all__ if name[0].islower() and name not in SLOW)


class PathOfBytes:
    """A path-like object as ``os.fspath`` takes it, whose path is bytes."""

    def __fspath__(self) -> bytes:
        return b"x\xff"


class Several:
    """What NumPy's arrays are in a comparison: many answers, of which none is true or false."""

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("the truth value of several is ambiguous")

    __hash__ = None  # type: ignore[assignment]


KINDS: tuple[Any, ...] = (
    None, True, 0, 1, -1, 8, 10**30, 10**5000, 2.5, float("nan"), float("-inf"), 1j, Fraction(4), b"x", bytearray(b"x"), "", "x",
    "\x1b[31m", "\u2028", "\udcff", "a\x00b", [], [1], [None], [[]], (), ("a",), {}, {"a": 1}, {1: 2}, {"a": 10**5000}, set(), {1},
    range(3), object(), len, int, ..., Path("x"), Path("/dev/zero"), Path(), ValueError("x"), memoryview(b"x"),
    range(10**9), repeat(1), repeat("a=1"), PathOfBytes(), Several(),
)  # fmt: skip
GOOD: dict[str, tuple[Any, ...]] = {
    "gpu": GPUS, "gpu_memory": SIZES, "gpus": (1, 2, 8), "host_memory": SIZES, "config": CONFIGS, "micro_batch_size": (1, 2, 2**24),
    "sequence_length": (1, 512, 2**30), "activation_checkpointing": ("none", "full"), "trainer": ("trl", "axolotl"), "rank": ("all", "0"),
}  # fmt: skip
DOCUMENTED = re.compile(r"memplan\.\w+\(\) (takes no|got an unexpected keyword)")


def library_call(random: Random) -> tuple[str, Callable[[], object]]:
    """Return a call, as a text and to be made."""
    name = random.choice(FUNCTIONS)
    function = getattr(memplan, name)
    first, *others = signature(function).parameters
    if "options" in others:
        others[others.index("options") :] = JobOptions.__annotations__
    given = {one: _argument(random, one) for one in random.sample(others, min(len(others), random.randrange(4)))}
    of_file = name in ("check", "import_file", "replay", "rewrite")
    subject = random.choice(KINDS) if not random.randrange(6) else random.choice(EXAMPLES if of_file else MODELS)
    arguments = {first: subject, **({"gpu": "h100"} if "gpu" in others and random.randrange(4) else {}), **given}
    return f"memplan.{name}: {sorted(arguments)}", lambda: _answered(function, arguments)


def _argument(random: Random, name: str) -> Any:
    if name == "set" and random.randrange(4):
        return [setting(random)] if random.randrange(2) else {setting(random).partition("=")[0]: random.choice(KINDS)}
    if name in GOOD and random.randrange(3):
        return random.choice(GOOD[name])
    return random.choice(KINDS) if random.randrange(4) else some_text(random)


def _answered(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call a function and show what it answers; a TypeError that is documented is a refusal."""
    try:
        answer = function(**arguments)
    except TypeError as error:
        if DOCUMENTED.match(str(error)) is None:
            raise
        raise InvalidFileError([str(error)]) from None
    if hasattr(answer, "to_dict"):
        answer.to_dict()
        repr(answer)
