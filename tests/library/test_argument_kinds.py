"""Whatever a program gives a function of the library: an answer, a refusal in lines, or the TypeError that is documented."""

import re
from fractions import Fraction
from inspect import signature
from pathlib import Path

import pytest

import memplan
from memplan.library.job_options import JobOptions

TORCH = ("run", "trace")
FUNCTIONS = sorted(name for name in memplan.__all__ if name[0].islower() and name not in ("__version__", *TORCH))


class Faulty:
    """A value whose own code has a fault."""

    def __repr__(self):
        raise RuntimeError("of no use")


HOLDS_ITSELF: list[object] = []
HOLDS_ITSELF.append(HOLDS_ITSELF)
ODD = {
    "a float": 2.5, "not a number": float("nan"), "digits": 10**5000, "bytes": b"x", "a list": [1], "a list of nothing": [None],
    "a set": {1}, "numbers as keys": {1: 2}, "an object in keys": {"kernels.loss": object()}, "a function": len, "a class": int,
    "an iterator": iter(()), "a fraction": Fraction(1, 2), "faulty": Faulty(), "itself": HOLDS_ITSELF, "escapes": "\x1b[31m\u2028",
    "a surrogate": "\udcff", "a null": "a\x00b", "many digits in a list": {"set": [10**5000]},
}  # fmt: skip
DOCUMENTED = re.compile(r"memplan\.\w+\(\) (takes no|got an unexpected keyword)")
ROOT = Path(__file__).parents[2]
FIRST = {
    "check": "memplan-budget.yaml", "import_file": ROOT / "tests/trainers/examples/trl.yaml", "replay": "no.json",
    "rewrite": ROOT / "tests/trainers/examples/trl.yaml",
}  # fmt: skip
JOB = {"gpu": "h100", "config": "lora"}
"""Where the first argument is no model: what it is; and what makes a job of a model."""


def _arguments(name: str) -> list[str]:
    parameters = list(signature(getattr(memplan, name)).parameters)
    return [*parameters[:-1], *JobOptions.__annotations__] if parameters[-1] == "options" else parameters


def _given(name: str) -> dict[str, object]:
    first = next(iter(signature(getattr(memplan, name)).parameters))
    given = {first: FIRST.get(name, "gpt2")} if first != "options" else {}
    return given | (JOB if name not in FIRST else {}) | ({"trainer": "trl"} if name == "emit" else {})


def _said(name: str, given: dict[str, object]) -> str:
    """Return what a call is refused with, or nothing where it is answered."""
    try:
        getattr(memplan, name)(**given)
    except memplan.MemplanError as error:
        return str(error) or "nothing is said"
    except TypeError as error:
        if DOCUMENTED.match(str(error)) is None:
            raise
    return ""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_odd_arguments_are_answered_or_refused_in_lines(name):
    pairs = [
        (argument, kind)
        for argument in _arguments(name)
        for kind in ODD
        if argument != "progress" or not callable(ODD[kind])  # which is called, as it is said, and may fail as it likes
    ]
    said = {pair: _said(name, _given(name) | {pair[0]: ODD[pair[1]]}) for pair in pairs}
    assert any(said.values())
    assert not [pair for pair, text in said.items() if not all(line.isprintable() for line in text.split("\n"))]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("plan", {"gpu": 3}, "gpu: expected text or a Device, got 3"),
        ("plan", {"config": b"lora"}, "config: expected text or keys and values or a path, got b'lora'"),
        ("plan", {"beside": "ds.json"}, "beside: expected a list of text or a path, got 'ds.json'"),
        ("plan", {"set": 2.5}, "set: expected keys and values or a list of text or text, got 2.5"),
        ("plan", {"set": {"kernels.loss": {1}}}, "set: expected text, numbers, true, false, None, and lists or keys and values of these"),
        ("compare", {"configs": "lora"}, "configs: expected a list of text or keys and values, got 'lora'"),
        ("compare", {"configs": []}, "configs: expected at least one training config"),
        ("where", {"price": 2}, "price: expected text or a path, got 2"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_named_with_what_is_taken(name, given, said):
    with pytest.raises(memplan.InvalidFileError, match=re.escape(said)):
        getattr(memplan, name)("gpt2", **given)


def test_a_list_that_is_text_is_no_list_of_letters():
    with pytest.raises(memplan.InvalidFileError, match="batches: expected a list"):
        memplan.frontier("gpt2", gpu="h100", batches="124")


@pytest.mark.parametrize("gpu", [[1], 2.5, {}], ids=repr)
def test_a_jobs_plan_takes_a_gpu_by_its_name(gpu):
    with pytest.raises(memplan.InvalidFileError, match="gpu: expected text or a Device"):
        memplan.job("gpt2").plan(gpu)


def test_what_a_job_leaves_to_its_plans_is_refused():
    with pytest.raises(TypeError, match="takes no host_memory"):
        memplan.job("gpt2", host_memory="nonsense")


@pytest.mark.parametrize("question", ["where", "suggest_configs"])
def test_the_memory_of_a_host_is_read_on_every_gpu_too(question):
    given = () if question == "suggest_configs" else ("gpt2",)
    with pytest.raises(memplan.UnitError, match="'1' is not a size"):
        getattr(memplan, question)(*given, host_memory="1")
