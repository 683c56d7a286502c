"""Frozen values whose methods come late behave as those of the standard library do."""

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field

import pytest

import memplan.documents.frozen_values


def declared(decorator):
    @decorator(frozen=True, slots=True)
    class Value:
        """A value."""

        size: int
        names: list = field(default_factory=list)
        note: str = field(default="", compare=False, repr=False)
        factor: int = field(default=2, kw_only=True)

        def __post_init__(self):
            if self.size < 0:
                raise ValueError("size")

    return Value


OURS, THEIRS = declared(memplan.documents.frozen_values.dataclass), declared(dataclasses.dataclass)


@pytest.mark.parametrize("made", [0, memplan.documents.frozen_values.UNCOMPILED])
def test_the_first_values_are_those_of_a_compiled_constructor(made):
    fresh = declared(memplan.documents.frozen_values.dataclass)
    for _ in range(made):
        fresh(0)
    for given, named in (((3,), {}), ((3, ["a"]), {"factor": 4}), ((), {"size": 1, "note": "b"}), ((1, [], "c"), {})):
        assert dataclasses.astuple(fresh(*given, **named)) == dataclasses.astuple(THEIRS(*given, **named))
    for given, named in (((), {}), ((1, [], "", 3), {}), ((1,), {"size": 2}), ((1,), {"unknown": 2}), ((-1,), {})):
        with pytest.raises((TypeError, ValueError)) as theirs:
            THEIRS(*given, **named)
        with pytest.raises(type(theirs.value)) as ours:
            fresh(*given, **named)
        assert str(ours.value) == str(theirs.value)


@memplan.documents.frozen_values.dataclass(frozen=True, slots=True)
class Pair:
    """Two numbers."""

    first: int
    second: int = 0


@pytest.mark.parametrize(
    "ask",
    [
        lambda cls: repr(cls(1, ["a"], "note", factor=3)),
        lambda cls: (cls(1) == cls(1, note="other"), cls(1) == cls(2), cls(1) == 1),
        lambda cls: hash(cls(1, ())) == hash(cls(1, (), "other")),
        lambda cls: repr(dataclasses.replace(cls(1), size=5)),
        lambda cls: dataclasses.asdict(cls(1)),
        lambda cls: cls(1).names is cls(1).names,
        lambda cls: str(inspect.signature(cls)),
        lambda cls: copy.deepcopy(cls(1, ["a"])) == cls(1, ["a"]),
        lambda cls: cls.__match_args__,
        lambda cls: hasattr(cls(1), "__dict__"),
    ],
)
def test_values_answer_as_dataclasses_do(ask):
    assert ask(OURS) == ask(THEIRS)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda cls: setattr(cls(1), "size", 2),
        lambda cls: delattr(cls(1), "size"),
        lambda cls: cls(),
        lambda cls: cls(1, [], "", 3),
        lambda cls: cls(-1),
        lambda cls: cls(1, unknown=2),
    ],
)
def test_values_refuse_as_dataclasses_do(break_it):
    with pytest.raises((TypeError, ValueError, AttributeError)) as theirs:
        break_it(THEIRS)
    with pytest.raises(type(theirs.value)):
        break_it(OURS)


def test_values_are_pickled():
    assert pickle.loads(pickle.dumps(Pair(1, 2))) == Pair(1, 2)
