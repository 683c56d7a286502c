"""Bars and gauges are as long as what they show, and no line of a screen is longer than the terminal."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from memplan.report.canvas import EIGHTHS, Canvas
from memplan.report.document import Document, Table, render

SIZES = st.integers(0, 2**50)
UNICODE = st.booleans()


@given(SIZES, SIZES, st.integers(1, 100), UNICODE)
def test_a_bar_is_as_long_as_its_share_to_half_a_step_and_never_gone(value, more, columns, unicode):
    bar = Canvas(unicode=unicode).bar(value, value + more, columns)
    steps = 8 if unicode else 1
    length = 8 * bar.count("█") + max((0, *map(EIGHTHS.find, bar))) if unicode else bar.count("#")
    assert bool(bar) == (value > 0)
    assert abs(length * (value + more) - steps * columns * value) * 2 <= (value + more) * (2 if unicode else 1)


@given(st.tuples(SIZES, SIZES, SIZES), st.integers(4, 80), UNICODE)
def test_a_gauge_keeps_its_length_and_shows_what_is_beyond_its_end(sizes, columns, unicode):
    expected, worst, usable = sizes
    gauge = Canvas(unicode=unicode).gauge(expected, worst, usable, columns)
    end = gauge.rindex("┤" if unicode else "|")
    assert len(gauge) == columns + 2
    assert (end == len(gauge) - 1) or max(expected, worst) > usable


TEXTS = st.text("abcdefgh ", min_size=1, max_size=16).map(str.strip).filter(bool)
ROWS = st.lists(st.tuples(TEXTS, TEXTS, SIZES, st.sampled_from(["", "<- peak"])), min_size=1, max_size=9)


@given(ROWS, st.integers(60, 140), UNICODE)
def test_no_row_of_bars_is_wider_than_the_terminal(rows, width, unicode):
    lines = Canvas(width, unicode).bars(rows)
    assert len(lines) == len(rows)
    assert max(map(len, lines)) <= width


@given(st.lists(TEXTS, max_size=30), st.integers(30, 100))
def test_parts_are_joined_on_lines_that_fit_and_none_is_lost(parts, width):
    lines = Canvas(width).joined(parts, indent=4)
    assert all(len(line) <= width for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(", ".join(parts).split())


CELLS = st.text("abcdefgh 0123456789.", max_size=30).map(str.strip)
TABLES = st.integers(1, 9).flatmap(
    lambda columns: st.builds(
        Table,
        st.tuples(*[st.sampled_from(["name", ">bytes", "what it is of"])] * columns),
        st.lists(st.tuples(*[CELLS] * columns), min_size=1, max_size=5).map(tuple),
    )
)


@given(TABLES, st.integers(70, 140))
def test_no_table_is_wider_than_the_terminal_and_no_cell_is_lost(table, width):
    text = render(Document({}, (table,)), "table", terminal=True, width=width)
    assert max(map(len, text.split("\n"))) <= width
    words = Counter(word for row in (table.names, *table.rows) for cell in row for word in cell.split())
    assert not words - Counter(text.split())
    if table.width <= width:
        assert text == render(Document({}, (table,)), "plain")
