"""The page on the library: its examples run, and it names every function and every error."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import pytest

import memplan

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```pycon\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_the_examples_of_the_page_print_what_it_shows():
    parser = doctest.DocTestParser()
    test = parser.get_doctest("\n".join(BLOCKS), {}, "library.md", str(PAGE), 0)
    lines: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=lines.append)
    assert result.attempted > 20
    assert not result.failed, "".join(lines)


@pytest.mark.parametrize("name", memplan.__all__)
def test_the_page_names_every_function_and_error(name):
    value = getattr(memplan, name)
    if inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, memplan.MemplanError)):
        assert re.search(rf"\b{name}\b", TEXT)
