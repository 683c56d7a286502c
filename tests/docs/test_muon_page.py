"""The page on the optimizer: its examples run, and it names every option that a reader may need."""

import doctest
import re
from pathlib import Path

import pytest

from memplan.muon.group_options import DEFAULTS, NOT_OFFERED, WEIGHT_ROUNDINGS
from memplan.muon.state_codecs.state_formats import ADAMW_FORMATS, DIVERGING, MOMENTUM_FORMATS

PAGE = Path(__file__).parents[2] / "docs" / "muon.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```pycon\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
ROWS = dict(re.findall(r"^\| (`[^|]+?) \| ([^|]+) \|", TEXT, re.MULTILINE))


def test_the_examples_of_the_page_print_what_it_shows():
    test = doctest.DocTestParser().get_doctest("\n".join(BLOCKS), {}, "muon.md", str(PAGE), 0)
    lines: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=lines.append)
    assert result.attempted > 15
    assert not result.failed, "".join(lines)


def test_the_first_example_has_ten_lines():
    assert len(BLOCKS[0].strip().splitlines()) == 10


def test_every_option_of_the_table_is_one_and_has_these_values():
    options = [name for cell in ROWS for name in re.findall(r"`(\w+)`", cell)]
    assert options
    assert [name for name in options if name not in DEFAULTS] == []
    shown = {cell.strip("`"): re.findall(r"`([\w-]+)`", values) for cell, values in ROWS.items()}
    assert set(shown["momentum_format"]) <= set(MOMENTUM_FORMATS) - DIVERGING
    assert shown["adamw_format"] == list(ADAMW_FORMATS)
    assert shown["rounding"] == list(WEIGHT_ROUNDINGS)


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_what_is_refused_is_said(name):
    assert f"`{name}`" in TEXT.split("Refused in words")[1]


def test_the_page_fits():
    assert [line for line in TEXT.splitlines() if len(line) > 120] == []
