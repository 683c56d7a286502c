"""Hostile names, keys and contents through every command and format: they are only ever text.

The default run takes some seconds. The long one, with as many cases as there is time for:

    MEMPLAN_FUZZ_CASES=20000 pytest -m slow tests/fuzz/test_output.py
"""

import json
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.catalog.catalog import data_directory
from memplan.documents.escaping import escaped_json
from memplan.report.document import Document, Table, render

from .hostile_output import ANSWERED, FORMATS, REFUSED, TEXTS
from .outputs import check_lines, check_output, strings

SHORT_RUN = 25
LONG_RUN = int(os.environ.get("MEMPLAN_FUZZ_CASES", "2000"))
WORST = "m\n::error::x\x1b[31m|<b>[bold]\u202e##[error]"
FORMATS_OF = [(name, form) for name, (_, forms) in ANSWERED.items() for form in forms]
FIRST = [case for at, case in enumerate(FORMATS_OF) if case[0] == "check" or at % 4 == 0]
"""Of every command a format or two, each format for several commands; and all formats of checks."""


def drawn(cases: int, **more: bool) -> settings:
    checks = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
    return settings(max_examples=cases, deadline=None, database=None, suppress_health_check=checks, **more)


def answered(cli, name: str, form: str, text: str) -> int:
    """Ask, and hold the answer against the rules of its format; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        ran = cli(*ANSWERED[name][0](text, Path(folder)), "--format", form)
    assert ran.exit_code in (0, 1, 2, 3), ran.err
    check_lines(ran.err)
    check_lines(ran.out, annotations=form == "github")
    if ran.exit_code in (0, 1) or ran.out:
        check_output(form, ran.out)
    if ran.exit_code in (2, 3) and name != "check":
        assert ran.out == ""
        assert all(line.startswith("memplan: ") for line in ran.err.splitlines())
    return ran.exit_code


def refused(cli, name: str, text: str) -> None:
    """Ask for what is not there, and hold the refusal against the rules of standard error."""
    with tempfile.TemporaryDirectory() as folder:
        ran = cli(*REFUSED[name](text, Path(folder)))
    assert ran.exit_code in (0, 1, 2, 3), ran.err
    check_lines(ran.err)
    check_lines(ran.out, annotations=name == "budget")
    if ran.exit_code:
        assert ran.err.startswith(("memplan: ", "Usage: "))


@pytest.mark.parametrize(("name", "form"), FIRST, ids=lambda part: part)
def test_the_worst_of_names_is_only_text_in_every_command_and_format(cli, name, form):
    code = answered(cli, name, form, WORST)
    assert code in (0, 1), "this case answers nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [case for case in FORMATS_OF if case not in FIRST], ids=lambda part: part)
def test_the_worst_of_names_is_only_text_in_the_other_formats(cli, name, form):
    assert answered(cli, name, form, WORST) in (0, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_the_worst_of_names_is_only_text_in_every_refusal(cli, name):
    refused(cli, name, WORST)


@drawn(SHORT_RUN, derandomize=True)
@given(case=st.sampled_from(FORMATS_OF), text=TEXTS)
def test_any_text_is_only_text_in_an_answer(cli, case, text):
    answered(cli, *case, text)


@drawn(SHORT_RUN, derandomize=True)
@given(name=st.sampled_from(sorted(REFUSED)), text=TEXTS)
def test_any_text_is_only_text_in_a_refusal(cli, name, text):
    refused(cli, name, text)


@pytest.mark.slow
@drawn(LONG_RUN)
@given(case=st.sampled_from(FORMATS_OF), text=TEXTS)
def test_any_text_is_only_text_in_an_answer_at_length(cli, case, text):
    answered(cli, *case, text)


@pytest.mark.slow
@drawn(LONG_RUN)
@given(name=st.sampled_from(sorted(REFUSED)), text=TEXTS)
def test_any_text_is_only_text_in_a_refusal_at_length(cli, name, text):
    refused(cli, name, text)


# ------------------------------------------------------------------ documents, without a command around them
@drawn(60, derandomize=True)
@given(texts=st.lists(TEXTS, min_size=4, max_size=4), form=st.sampled_from(FORMATS), width=st.integers(1, 130))
def test_any_document_is_only_text(texts, form, width):
    title, name, cell, line = texts
    table = Table((name, ">bytes", "what"), ((cell, cell, cell), ("a", "1", line)), title)
    document = Document({name: [cell, {line: title}]}, (line, table, (line, cell)))
    check_output(form, render(document, form, width=width))
    if form == "json":
        assert json.loads(render(document, form)) == json.loads(json.dumps(document.data))


@drawn(60, derandomize=True)
@given(text=TEXTS, color=st.booleans(), width=st.integers(40, 130))
def test_a_terminal_gets_no_control_sequence_but_colours_of_ours(text, color, width):
    document = Document({}, (text, Table((text, text), ((text, text),), text), (text, "FITS: " + text)))
    shown = render(document, "table", terminal=True, color=color, width=width)
    check_lines(re.sub(r"\x1b\[(\d+(;\d+)*)?m", "", shown) if color else shown)


@drawn(60, derandomize=True)
@given(data=st.dictionaries(TEXTS, TEXTS))
def test_escaped_json_reads_as_what_it_was(data):
    text = escaped_json(json.dumps(data, ensure_ascii=False))
    assert json.loads(text) == json.loads(json.dumps(data))
    check_lines(text)


def test_strings_of_json_are_exact(cli, tmp_path):
    text = "m\n\x9b\u202e::error::##[x]é"
    path = tmp_path / text
    path.mkdir()
    (path / "config.json").write_text(
        '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100}'
    )
    assert text in strings(cli("show", path, "--json").data)


def test_texts_in_a_picture_are_only_text(cli, tmp_path):
    pytest.importorskip("matplotlib")
    text = WORST + "$\\frac$ $x^2$ 漢\ufffe"
    shipped = (data_directory() / "configs" / "evidence" / "lab-variance.json").read_text()
    (tmp_path / "record.json").write_text(shipped.replace('"you-jiacheng"', json.dumps(text)))
    assert text not in shipped
    ran = cli("lab", "show", tmp_path / "record.json", "--plot", tmp_path / "picture.svg")
    assert (ran.exit_code, ran.err) == (0, "")
    check_output("svg", (tmp_path / "picture.svg").read_text())
