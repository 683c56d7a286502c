"""Patterns over names: matching takes no time, or they are refused."""

import re
import time
import warnings

import pytest

from memplan.documents.name_patterns import MOST_STEPS, matching_steps, name_pattern, take_long

NAMES = [f"model.language_model.layers.{layer}.self_attn.q_proj.weight" for layer in range(100)]
SLOW = (
    *("(a+)+$", "(.*)*Z", "(?:.?){60}Z", "(?:(?:.{1,9}){1,9}){1,9}Z", "(?P<x>.+)(?P=x)+Z", "(?:a|a){9}Z"),
    *(
        ".?" * 30,
        "(.|..)" * 20 + "Z",
        ".*" * 4 + "Z",
        "[a-z.]{1,60}" * 3 + "Z",
        "(?=.*.*.*.*)Z",
        "(?P<x>.*.*.*)(?:.*)Z",
        r"\w+\W*" * 3 + "Z",
        "a" * 301,
    ),
)
GOOD = (
    *("lm_head", "layers.(2[0-9]|3[01])", r"^model\.layers\.[0-9]+\.mlp", r"^(?!.*layers\.(30|31)\.).*$", "[[a]]"),
    *(
        ".*layers.*mlp.*",
        r"^model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj$",
        r"\(\|\*",
        "[*+|(]",
        "(?i:X)?y",
    ),
)


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_could_take_long_are_refused(pattern):
    with pytest.raises(ValueError, match="could take long to match"):
        name_pattern(pattern)


@pytest.mark.parametrize("pattern", [*GOOD, ".?" * 9 + "Z", "(.|..)" * 9 + "Z", ".*.*Z", "[a-z.]{1,20}" * 2 + "Z"])
def test_patterns_that_are_taken_are_matched_at_once_and_without_a_warning(pattern):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search = name_pattern(pattern).search
    started = time.process_time()
    for name in NAMES:
        search(name)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("pattern", ["(", "[", r"\1(a)", "a{99999999999}", "(?<=a+)b", "(?a)(?u)x"])
def test_what_is_no_pattern_is_said_to_be_none(pattern):
    with pytest.raises(ValueError, match="is no regular expression: "):
        name_pattern(pattern)


def test_steps_count_what_a_pattern_tries():
    assert matching_steps("a" * 300) == matching_steps("^a") == 64
    assert matching_steps("a(b|c)(d|e|f)?") == 64 * 2 * 3 * 2
    assert matching_steps("a[0-9]+b") == matching_steps(r"a\d*b") == 64 * 3
    assert matching_steps("a{3}b{2,5}c{,3}") == 64 * 4 * 4
    assert matching_steps("^a*b") == 64
    assert matching_steps("a*b") == 64**2 / 2
    assert matching_steps("a.*") == matching_steps("a")
    assert matching_steps("(?P<x>a*)b") == matching_steps("(?=a*)b") == 64**2 / 2
    assert matching_steps(r"(?:[*?|)]+\|\+)") == 64**2 / 2


def test_many_patterns_take_as_long_as_all_of_them():
    assert not take_long(["lm_head"] * (MOST_STEPS // 64))
    assert take_long(["lm_head"] * (MOST_STEPS // 64 + 1))
    assert not take_long([".*x.*y"])
    assert take_long([".*x.*y"] * 3)
    assert all(not take_long([pattern]) and re.compile(pattern) for pattern in GOOD[:4])
