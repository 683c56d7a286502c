"""Text from outside is shown, and never obeyed."""

import pytest

from memplan.documents.escaping import csv_cell, escaped, markdown, workflow_data, workflow_property


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Llama 3.1 8B, é 漢 😀", "Llama 3.1 8B, é 漢 😀"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b[31m\x07\x7f\x9b", r"\u001b[31m\u0007\u007f\u009b"),
        ("\u202efdp.exe\u2066\u200f\ufeff", r"\u202efdp.exe\u2066\u200f\ufeff"),
        ("\u2028\u0085\u00a0", r"\u2028\u0085\u00a0"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\udb40\udc41"),
        ("::error::x", r"\u003a:error::x"),
        ("words ::stop-commands::x", r"words \u003a:stop-commands::x"),
        ("torch::sum, a:b", "torch::sum, a:b"),
        ("##[error]x ##vso[task]", r"\u0023#[error]x \u0023#vso[task]"),
        ("## not a command", "## not a command"),
    ],
)
def test_what_a_terminal_or_a_log_obeys_is_shown_as_json_writes_it(text, shown):
    assert escaped(text) == shown


@pytest.mark.parametrize(
    "text", ["=1+1", "+1+1", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "\uff1dA1", "--1", "+A1", "-1 A1"]
)
def test_a_cell_is_no_formula(text):
    assert csv_cell(text) == "'" + text


@pytest.mark.parametrize(
    "text", ["-1", "+1,234", "-1.5 GiB", "+0.25%", "-3.1 %", "-1e-05", "+12 B", "-", "", "a=1", "1-2"]
)
def test_a_number_stays_a_number(text):
    assert csv_cell(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<img src=x>&amp;", "&lt;img src=x&gt;&amp;amp;"),
        ("a|b `c` [d](e) ![f]", "a&#124;b &#96;c&#96; &#91;d&#93;(e) !&#91;f&#93;"),
        ("**a** ~b~ @c \\", "&#42;&#42;a&#42;&#42; &#126;b&#126; &#64;c &#92;"),
        ("# heading", "&#35; heading"),
        ("optimizer_states, -1.5 GiB - 2", "optimizer_states, -1.5 GiB - 2"),
    ],
)
def test_markdown_shows_what_was_written(text, shown):
    assert markdown(text) == shown


def test_a_workflow_command_ends_where_memplan_ends_it():
    assert workflow_data("a%\n::error::b\r") == "a%25%0A\\u003a:error::b\\r"
    assert workflow_property("a:b,c\n") == "a%3Ab%2Cc%0A"
