"""What the page may ask for: names of the catalog and numbers; and the command line beside it."""

import re
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.cli.ui.answers import Question, question_of, quick_answer
from memplan.errors import MemplanError
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
ASKED = [
    {},
    {"model": "gpt2", "gpu": "t4", "config": "lora", "length": "512", "batch": "3"},
    {"model": "llama-3.2-1b", "config": "bf16-adamw", "gpus": "4", "gpu": "h100", "checkpointing": "full"},
    {"model": "llama-3.2-1b", "config": "lora", "precision": "fp16", "stack": "transformers"},
    {"model": "llama-3.2-1b", "config": "mixed-adamw", "precision": "fp32"},
    {"model": "llama-3.2-1b", "config": "bf16-adamw", "precision": "fp32"},
]


@pytest.mark.parametrize("given", ASKED, ids=str)
def test_the_command_line_asks_the_same(cli, given):
    question = question_of(given, CATALOG)
    command = question.command(CATALOG)
    data = cli(*shlex.split(command)[1:], "--json").data
    shown = quick_answer(question, None)["sections"]["answer"]
    assert f'<code id="command" tabindex="0">{command}</code>' in re.sub("</?span>", "", shown)
    assert data["training"]["micro_batch_size"] == question.batch
    assert data["training"]["sequence_length"] == question.length
    assert (data["model"]["name"] in shown, data["gpu"]["name"] in shown) == (True, True)
    if question.precision:
        assert data["training"]["compute_dtype"] == question.precision


def test_names_are_those_of_the_catalog_in_any_spelling():
    question = question_of({"model": "Llama_3.1-8B", "gpu": "4090", "stack": "TRL"}, CATALOG)
    assert (question.model, question.gpu, question.stack) == ("llama-3.1-8b", "rtx4090", "trl")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"modle": "gpt2"}, "did you mean 'model'"),
        ({"model": "lama-8b"}, "unknown model"),
        ({"model": "/etc/passwd"}, "unknown model"),
        ({"model": "-"}, "unknown model"),
        ({"config": "../configs/training/qlora.yaml"}, "unknown training config"),
        ({"gpu": "local"}, "unknown GPU"),
        ({"stack": "trl@1.0"}, "unknown stack"),
        ({"batch": "0"}, "batch: expected"),
        ({"batch": "1e3"}, "batch: expected"),
        ({"length": "9" * 5000}, "length: expected"),
        ({"length": "٣"}, "length: expected"),
        ({"gpus": "-1"}, "gpus: expected"),
        ({"precision": "int3"}, "precision: expected"),
        ({"checkpointing": "all"}, "checkpointing: expected"),
    ],
)
def test_anything_else_is_one_line(given, said):
    with pytest.raises(MemplanError) as refused:
        question_of(given, CATALOG)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 400


@given(
    st.dictionaries(
        st.sampled_from([*Question.__dataclass_fields__, "x"]), st.text("/.-<>'\"$\\\x00é1", max_size=12), max_size=3
    )
)
@settings(max_examples=60, deadline=None)
def test_any_text_is_a_question_or_refused(given):
    try:
        question = question_of(given, CATALOG)
    except MemplanError:
        return
    assert question.model in CATALOG.models


def test_one_compiled_job_answers_every_batch_and_length(monkeypatch):
    quick_answer(Question(model="gpt2", config="lora", length=128), None)
    monkeypatch.setattr(memplan, "job", None)
    shown = [quick_answer(Question(model="gpt2", config="lora", length=128 * n, batch=n), None) for n in (1, 2, 3)]
    assert len({str(answer) for answer in shown}) == 3
