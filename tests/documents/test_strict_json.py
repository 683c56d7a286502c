"""JSON is read as strictly as its grammar is, and within bounds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.documents import strict_json
from memplan.documents.loading import MAXIMUM_DEPTH
from memplan.documents.strict_json import parse_json, parse_object
from memplan.errors import InvalidFileError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "file:1: not valid JSON: Expecting property name"),
        ("\n\n]", "file:3: not valid JSON: Expecting value"),
        ('{"a": 1, "a": 2}', "key 'a' is given twice"),
        ('{"b": {"\\u001b": 1, "\\u001b": 2}}', "is given twice"),
        ("[NaN]", "NaN is no number"),
        ("-Infinity", "-Infinity is no number"),
        ("[1e999]", "1e999 is too large"),
        ("1" * 41, "a number of 41 digits"),
        ("9" * 5000, "a number of 5,000 digits"),
        ('"\\ud800"', "half of a surrogate pair"),
        ('{"\\udfff": 1}', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * (MAXIMUM_DEPTH + 1) + "]" * (MAXIMUM_DEPTH + 1), "nested too deeply"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested too deeply"),
        ("\ufeff{}", "not valid JSON"),
    ],
)
def test_what_is_no_json_is_refused_in_one_line(text, said):
    with pytest.raises(InvalidFileError) as caught:
        parse_json(text, "file")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_text_with_more_values_than_memory_is_for_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(strict_json, "MAXIMUM_VALUES", 5)
    assert parse_json("[1,2,3,4]", "file") == [1, 2, 3, 4]
    with pytest.raises(InvalidFileError, match="more than 5 values"):
        parse_json("[{},{},{}]", "file")


@pytest.mark.parametrize("text", ["[]", "1", "null", '"a"'])
def test_an_object_is_an_object(text):
    with pytest.raises(InvalidFileError, match="expected an object with keys"):
        parse_object(text, "file")


def test_a_whole_surrogate_pair_is_a_character():
    assert parse_json('"\\ud83d\\ude00"', "file") == "\U0001f600"


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**39), 10**39)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_json_is_read_as_python_reads_it(value):
    assert parse_json(json.dumps(value), "file") == value
