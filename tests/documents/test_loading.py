"""Outside text becomes validated values, or one line per problem with file, line and key."""

import json
import os
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.catalog.training_config import TrainingConfig
from memplan.documents.loading import load_document, parse_document
from memplan.documents.opening import MAXIMUM_TEXT_BYTES, read_text
from memplan.documents.schemas import build, validate
from memplan.errors import InvalidFileError, MemplanError


@dataclass(frozen=True, slots=True)
class Inner:
    size: int
    kind: Literal["exact", "stated"] = "exact"


@dataclass(frozen=True, slots=True)
class Outer:
    name: str
    inner: Inner
    more: tuple[Inner, ...] = ()
    by_name: Mapping[str, int] = field(default_factory=dict)
    ratio: float | None = None
    flag: bool = False


def problems(text: str, cls: type = Outer) -> list[str]:
    with pytest.raises(InvalidFileError) as caught:
        validate(cls, parse_document(text, "file.yaml"))
    return list(caught.value.problems)


# ------------------------------------------------------------------ reading
def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidFileError) as caught:
        read_text(tmp_path / "absent.yaml")
    assert caught.value.problems == (f"{tmp_path / 'absent.yaml'}: no such file",)


def test_a_directory_is_no_file(tmp_path):
    with pytest.raises(InvalidFileError, match="is a directory"):
        read_text(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_cannot_be_read(write):
    path = write("secret.yaml", "a: 1")
    path.chmod(0)
    with pytest.raises(InvalidFileError, match="cannot be read"):
        read_text(path)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_no_file(path):
    with pytest.raises(InvalidFileError, match="is a device"):
        read_text(Path(path))


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InvalidFileError):
        read_text(tmp_path / "pipe.yaml")


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0byte"])
def test_a_path_that_no_file_can_have_is_refused(name):
    with pytest.raises(InvalidFileError):
        read_text(Path(name))


def test_a_file_that_is_too_large_is_refused_without_reading_it_whole(write):
    with pytest.raises(InvalidFileError, match="larger than 4 MiB"):
        read_text(write("large.yaml", b"#" * (MAXIMUM_TEXT_BYTES + 1)))


@pytest.mark.parametrize("content", [b"a: \xff\xfe", "a: ä".encode("latin-1"), "a: 1".encode("utf-16")])
def test_text_that_is_not_utf_8_is_refused(write, content):
    with pytest.raises(InvalidFileError, match="not UTF-8 text"):
        read_text(write("latin.yaml", content))


def test_a_byte_order_mark_is_skipped(write):
    assert load_document(write("marked.yaml", b"\xef\xbb\xbfa: 1")).data == {"a": 1}


# ------------------------------------------------------------------ parsing
def test_json_is_read_as_yaml_is():
    data = {"name": "a", "inner": {"size": 1}, "more": [], "ratio": 1.5, "flag": True, "by_name": {}}
    assert parse_document(json.dumps(data, indent=2), "file.json").data == data


def test_json_with_tabs_and_escapes_is_read():
    assert parse_document('{\n\t"a": "\\u00e9\\n",\n\t"b": [1,2]\n}', "file.json").data == {"a": "é\n", "b": [1, 2]}


@pytest.mark.parametrize("text", ["", "# nothing", "---", "null"])
def test_an_empty_file_holds_nothing(text):
    assert parse_document(text, "file.yaml").data is None
    assert problems(text) == ["file.yaml:1: expected keys and values, got an empty file"]


@pytest.mark.parametrize(
    "text", ["a: [1", "a: b: c", "{", "\t- x", "a: 'b", "%bad", "a: *nowhere", "--- a\n--- b", "a: \x00", "a: \x07"]
)
def test_text_that_is_not_yaml_is_refused_with_its_line(text):
    with pytest.raises(InvalidFileError, match=r"^file\.yaml:\d+: ") as caught:
        parse_document(text, "file.yaml")
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


def test_duplicate_keys_are_refused_with_both_lines():
    assert problems("name: a\ninner: {size: 1}\nname: b\n") == [
        "file.yaml:3: name: duplicate key, first given on line 1"
    ]


def test_duplicate_keys_deep_inside_are_refused():
    assert problems("name: a\ninner:\n  size: 1\n  size: 2\n") == [
        "file.yaml:4: inner.size: duplicate key, first given on line 3"
    ]


def test_the_merge_key_is_no_way_around_the_schema():
    assert problems("<<: {name: a}\nname: a\ninner: {size: 1}\n")[0].startswith("file.yaml:1: <<: unknown key")


def test_an_alias_bomb_is_refused_quickly_and_in_little_memory():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(InvalidFileError, match="too many or too deeply nested values"):
        parse_document("\n".join(lines), "bomb.yaml")
    assert time.process_time() - started < 10
    assert tracemalloc.get_traced_memory()[1] < 300 * 2**20
    tracemalloc.stop()


def test_one_long_list_that_is_named_many_times_is_refused_and_a_short_one_is_read():
    def text(count):
        return f"a: &a [{', '.join('x' * count)}]\nb: [{', '.join(['*a'] * count)}]\n"

    with pytest.raises(InvalidFileError, match="too many or too deeply nested values"):
        parse_document(text(2_000), "quadratic.yaml")
    assert parse_document(text(20), "short.yaml").data["b"] == [["x"] * 20] * 20


def test_an_alias_to_itself_is_refused():
    with pytest.raises(InvalidFileError):
        parse_document("a: &a [*a]", "loop.yaml")


@pytest.mark.parametrize("depth", [100, 2_000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", "{}"], ids=["lists", "mappings"])
def test_deep_nesting_is_refused(depth, brackets):
    opening = "[" if brackets == "[]" else "{a: "
    with pytest.raises(InvalidFileError, match=r"^deep\.yaml:1: .*nest"):
        parse_document(opening * depth + brackets[1] * depth, "deep.yaml")


@pytest.mark.parametrize("opening", ["- ", "? ", "- ? "])
def test_deep_nesting_without_brackets_is_refused(opening):
    with pytest.raises(InvalidFileError, match=r"^deep\.yaml:1: .*nested"):
        parse_document(opening * 50_000 + "x", "deep.yaml")


def test_deep_indentation_is_refused():
    with pytest.raises(InvalidFileError, match=r"^deep\.yaml:\d+: .*nested"):
        parse_document("\n".join(" " * depth + "a:" for depth in range(2_500)), "deep.yaml")


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "1e999", "9" * 5000, "1e5000000"])
def test_numbers_that_are_none_are_refused_by_numeric_keys(number):
    found = problems(f"name: a\ninner: {{size: {number}}}\nratio: {number}\n")
    assert [line.split(": expected")[0] for line in found] == ["file.yaml:2: inner.size", "file.yaml:3: ratio"]
    assert all(len(line) < 140 for line in found)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!custom 1"])
def test_no_tag_runs_code(tag):
    assert parse_document(f"a: {tag}", "file.yaml").data in ({"a": ["true"]}, {"a": ""}, {"a": "1"})


@pytest.mark.parametrize(
    ("text", "value"),
    [("0x10", 16), ("0b11", 3), ("017", 15), ("1_000", 1000), ("-5", -5), ("+5", 5), ("0", 0), ("00", 0)],
)
def test_integers_are_those_of_yaml(text, value):
    assert parse_document(f"a: {text}", "file.yaml").data == {"a": value}


# ------------------------------------------------------------------ validating
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("size: '8e10'", "inner.size: expected an integer, got '8e10'"),
        ("size: 8e10", "inner.size: expected an integer, got '8e10'"),
        ("size: 1.5", "inner.size: expected an integer, got 1.5"),
        ("size: true", "inner.size: expected an integer, got true (YAML reads unquoted yes, no, on and off so)"),
        ("size: null", "inner.size: expected an integer, got None"),
        ("size: [1]", "inner.size: expected an integer, got [1]"),
        ("size: 1, kind: exactt", "inner.kind: expected exact or stated, got 'exactt'; did you mean 'exact'?"),
        ("size: 1, sizes: 2", "inner.sizes: unknown key; did you mean 'size'?"),
        ("size: 1, zzz: 2", "inner.zzz: unknown key; known keys: kind, size"),
        ("kind: exact", "inner.size: required key is missing"),
    ],
)
def test_a_problem_names_file_line_key_what_was_given_and_what_is_allowed(line, message):
    assert problems(f"name: a\ninner: {{{line}}}\n") == [f"file.yaml:2: {message}"]


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("Name: a\nname: a\ninner: {size: 1}", "1: Name", "'name'"),
        ("name: a\ninner: {size: 1, Kind: exact}", "2: inner.Kind", "'kind'"),
        ("name: a\ninner: {size: 1}\nmore:\n- {size: 1}\n- {Size: 1, size: 1}", "5: more.1.Size", "'size'"),
        ("name: a\ninner: {size: 1}\nNone: 1", "3: None", ""),
        ("name: a\ninner: {size: 1}\nint: 1", "3: int", ""),
        ("name: a\ninner: {size: 1}\nInner: 1", "3: Inner", "'inner'"),
    ],
)
def test_a_key_with_capitals_or_the_name_of_a_type_is_named_in_full(text, key, hint):
    (problem,) = problems(text)
    assert problem.startswith(f"file.yaml:{key}: unknown key; ")
    assert hint in problem


def test_a_part_that_is_nothing_is_not_taken_for_the_whole():
    document = parse_document("name: a\ninner:\n", "file.yaml")
    with pytest.raises(InvalidFileError, match=r"file\.yaml:2: inner: expected keys and values, got None"):
        validate(Inner, document, document.data["inner"], ("inner",))


def test_keys_are_fit_to_print():
    (problem,) = problems('name: a\ninner: {size: 1}\n"a\\nb\\e[31m": 1\n')
    assert problem.startswith(r"file.yaml:3: a\nb\u001b[31m: unknown key")


def test_more_values_than_any_honest_file_has_are_refused_before_they_are_all_in_memory():
    tracemalloc.start()
    with pytest.raises(InvalidFileError, match="too many or too deeply nested values"):
        parse_document("[" + "a," * 1_000_000 + "]", "long.yaml")
    assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    tracemalloc.stop()


def test_a_file_with_thousands_of_problems_lists_some_and_counts_the_rest():
    text = "name: a\ninner: {size: 1}\n" + "".join(f"k{i}: 1\n" for i in range(2_000))
    with pytest.raises(InvalidFileError) as caught:
        validate(Outer, parse_document(text, "file.yaml"))
    assert len(caught.value.problems) == 2_000
    assert str(caught.value).splitlines()[-1] == "... and 1,980 more"
    assert len(str(caught.value).splitlines()) == 21


def test_types_are_strict():
    text = "name: 1\ninner: {size: 1}\nflag: 'yes'\nratio: '1'\n"
    assert [line.split(":")[2].strip() for line in problems(text)] == ["name", "flag", "ratio"]


def test_items_of_lists_and_maps_are_named_too():
    text = "name: a\ninner: {size: 1}\nmore:\n  - {size: 1}\n  - {size: x}\nby_name:\n  b: c\n"
    assert [line.split(": expected")[0] for line in problems(text)] == [
        "file.yaml:5: more.1.size",
        "file.yaml:7: by_name.b",
    ]


TEN_MISTAKES = """\
descripton: a typo in a key
status: prooven
weights: {default: 3}
master_weights: int4
compute_dtype: fp8
gradients: {dtype: bf16, lifetime: forever}
micro_batch_size: '4'
activation_checkpointing: off
kernels: {attention: flash3}
dropout: none
"""


def test_ten_mistakes_in_a_config_are_reported_as_ten():
    found = problems(TEN_MISTAKES, TrainingConfig)
    named = [line.split(": ")[1] for line in found if "required key" not in line]
    assert named == [
        "descripton", "status", "weights.default", "master_weights", "compute_dtype", "gradients.lifetime",
        "micro_batch_size", "activation_checkpointing", "kernels.attention", "dropout",
    ]  # fmt: skip
    lines = [int(line.split(":")[1]) for line in found if "required key" not in line]
    assert lines == list(range(1, 11))
    assert [line for line in found if "required key" in line] == ["file.yaml:1: description: required key is missing"]


def test_building_and_validating_give_the_same_value():
    text = "name: a\ninner: {size: 1}\nmore: [{size: 2, kind: stated}]\nby_name: {x: 3}\nratio: 0.5\nflag: true\n"
    document = parse_document(text, "file.yaml")
    expected = Outer("a", Inner(1), (Inner(2, "stated"),), {"x": 3}, 0.5, True)
    assert build(Outer, document.data) == validate(Outer, document) == expected


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text):
    problems: tuple[str, ...] = ()
    try:
        parse_document(text, "file.yaml")
    except InvalidFileError as error:
        problems = error.problems
    assert all(problem.startswith("file.yaml:") for problem in problems)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*TrainingConfig.__dataclass_fields__, "x"]), JSON_VALUES, max_size=6))
def test_any_values_in_a_config_are_read_or_refused(data):
    message = "file.json:"
    try:
        validate(TrainingConfig, parse_document(json.dumps(data), "file.json"))
    except MemplanError as error:
        message = str(error)
    assert message.startswith("file.json:")
