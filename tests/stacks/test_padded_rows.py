"""Rows that a collator pads: when there are any, and where they are refused; records/trl.padded.json has what TRL's own code did."""

from typing import Any

import pytest

import memplan
from memplan.errors import MemplanError


def planned(stack: str = "trl", rows: int = 2, **keys: Any) -> memplan.Plan:
    setting = {"activation_checkpointing": "none", **keys}
    return memplan.plan(
        "llama-3.2-1b",
        gpu="a100-80gb",
        config="lora",
        stack=stack,
        micro_batch_size=rows,
        sequence_length=512,
        set=setting,
    )


def test_a_micro_batch_of_one_row_has_no_padding_and_no_mask():
    own, padded = planned(rows=1), planned(rows=1, padded_rows=True)
    assert (padded.instants, padded.expected_bytes) == (own.instants, own.expected_bytes)
    assert planned(rows=1, padded_rows="multiple").memory.requested_bytes > own.memory.requested_bytes


def test_padded_rows_repeat_keys_and_values_and_form_a_bias_in_each_layer():
    own, padded = (planned(padded_rows=said).memory for said in (False, True))
    rows, length, layers, width = 2, 512, 16, 32 * 64
    repeated, groups = 2 * rows * length * width * 2, 4  # keys and values of eight heads for all 32, in bf16
    bias = rows * length * length * 2
    more = layers * (repeated - repeated // groups + bias) + rows * length * length
    assert padded.requested_bytes - own.requested_bytes == pytest.approx(more, rel=0.05)


@pytest.mark.parametrize(
    ("stack", "keys", "said"),
    [
        ("litgpt", {}, "litgpt .*gives attention no mask of padding"),
        ("transformers@4.52", {}, "masks of transformers 4.52 are not modelled"),
        ("trl", {"kernels.attention": "flash"}, "flash-attn takes padding out"),
        ("trl", {"joined_rows": True}, "have no padding"),
        ("transformers", {"compile": "model"}, "compile"),
    ],
)
def test_padded_rows_are_refused_where_they_were_not_traced(stack, keys, said):
    with pytest.raises(MemplanError, match=said):
        planned(stack, padded_rows=True, **keys)


def test_an_answer_names_the_kernel_that_runs_under_the_mask():
    own, padded = planned().memory, planned(padded_rows=True).memory
    assert (own.attention, padded.attention) == ("flash", "efficient")
    assert any("attention efficient, norm" in line for line in padded.assumptions)
    assert planned(rows=1, padded_rows=True).memory.attention == "flash"
