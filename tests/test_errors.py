"""Errors refine a built-in, carry their exit code, and name the nearest match."""

import pickle

import pytest

from memplan import errors
from memplan.errors import (
    CannotAnswerError,
    CatalogError,
    InvalidFileError,
    MemplanError,
    UnitError,
    UnknownNameError,
    nearest_match,
    normalised_name,
    unknown_name,
)


@pytest.mark.parametrize(
    ("error", "parent"),
    [
        (UnitError, ValueError),
        (InvalidFileError, ValueError),
        (CatalogError, ValueError),
        (UnknownNameError, LookupError),
    ],
)
def test_an_error_also_is_the_built_in_that_it_refines(error, parent):
    assert issubclass(error, parent)


@pytest.mark.parametrize("error", [InvalidFileError(["a: b", "c"], [("weights", 0)]), CannotAnswerError("one reason")])
def test_an_error_of_another_process_says_what_it_said_there(error):
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))


def test_bad_input_exits_with_2_and_no_answer_with_3():
    bad_input = (MemplanError, UnitError, InvalidFileError, CatalogError, UnknownNameError)
    assert {error.exit_code for error in bad_input} == {2}
    assert CannotAnswerError.exit_code == 3


def test_every_error_of_the_module_is_a_memplan_error():
    raised = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    raised = [value for value in raised if not issubclass(value, Warning)]
    assert all(issubclass(value, MemplanError) for value in raised)


@pytest.mark.parametrize(
    "spelling", ["Llama-3.1-8B", "llama3.1-8b", "llama_3_1_8b", "LLAMA 3.1 8B", "llama/3.1:8b", "llama318b"]
)
def test_case_and_separators_do_not_count(spelling):
    assert normalised_name(spelling) == "llama318b"


@pytest.mark.parametrize(
    ("given", "nearest"), [("h100-sxm", "h100-sxm-80gb"), ("RTX4900", "rtx4090"), ("zzzzzz", None), ("", None)]
)
def test_the_nearest_match_is_close_or_none(given, nearest):
    assert nearest_match(given, ["h100-sxm-80gb", "rtx4090", "t4"]) == nearest


def test_an_unknown_name_says_what_was_given_the_nearest_match_and_where_to_look():
    error = unknown_name("GPU", "h100-sxm", ["h100-sxm-80gb"], "memplan list gpus")
    assert str(error) == "unknown GPU 'h100-sxm'; did you mean 'h100-sxm-80gb'? (see: memplan list gpus)"


def test_an_endless_name_is_not_repeated_in_full():
    assert len(str(unknown_name("GPU", "x" * 10_000, ["t4"]))) < 120


def test_the_problems_of_a_file_are_one_line_each():
    assert str(InvalidFileError(["a:1: one", "a:2: two"])) == "a:1: one\na:2: two"


def test_a_line_is_cut_however_much_it_quotes():
    quoted = "\x00" * 10_000
    assert max(map(len, str(errors.InvalidFileError([quoted, "short"])).split("\n"))) == errors.LONGEST_PROBLEM
    assert errors.printable(quoted, 20) == "\\u0000\\u0000\\u000..."
