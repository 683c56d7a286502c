"""The page on the library: its examples run, and it names every function and every error."""

import doctest
import inspect
import re
import typing
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


def test_the_page_names_every_function_and_error():
    public = {name: getattr(memplan, name) for name in memplan.__all__}
    errors = {n for n, value in public.items() if inspect.isclass(value) and issubclass(value, memplan.MemplanError)}
    named = errors | {name for name, value in public.items() if inspect.isfunction(value)}
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", TEXT)] == []


ROWS = re.findall(r"^\| [^|]+ \| `memplan\.(\w+)\(.*?\)`.*\| `(\w+)`: (.+) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("function", "answer", "named"), ROWS, ids=[row[0] for row in ROWS])
def test_an_answer_has_what_the_table_says(function, answer, named):
    kind = getattr(memplan, answer)
    assert kind in typing.get_type_hints(getattr(memplan, function))["return"].__mro__
    members = {*dir(kind), *kind.__dataclass_fields__}
    assert [name for name in re.findall(r"`(\w+)", named) if name not in members | set(memplan.__all__)] == []
