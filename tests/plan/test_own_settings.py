"""Suggested settings in the words of the stack that runs the job."""

from dataclasses import replace

import pytest

import memplan
from memplan.training.own_settings import OwnSetting, is_settable, own_settings
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
SAMPLE = replace(
    CATALOG.stack("bundled"),
    keys={"micro_batch_size": "per_device_train_batch_size", "weights.hidden_matrix": "load_in_4bit"},
    values={"weights.hidden_matrix": {"nf4-dq": {"load_in_4bit": "true", "use_bnb_nested_quant": "true"}}},
)

FP32 = {"weights": "fp32", "compute_dtype": "fp32"}


def test_a_setting_has_the_key_of_the_stack():
    assert own_settings(SAMPLE, [("micro_batch_size", 4)]) == (
        OwnSetting("micro_batch_size=4", "per_device_train_batch_size", "4"),
    )


def test_one_value_may_take_several_keys():
    own = own_settings(SAMPLE, [("weights.hidden_matrix", "nf4-dq")])
    assert [item.text for item in own] == ["load_in_4bit: true", "use_bnb_nested_quant: true"]


@pytest.mark.parametrize("setting", [("weights.hidden_matrix", "q4-0"), ("gradients.lifetime", "layer")])
def test_what_the_stack_has_no_words_for_is_said_to_have_none(setting):
    assert own_settings(SAMPLE, [setting])[0].own_key is None
    assert not is_settable(SAMPLE, [("micro_batch_size", 1), setting])


def test_a_stack_without_keys_of_its_own_takes_memplans():
    assert is_settable(CATALOG.stack("bundled"), [("gradients.lifetime", "layer")])
    assert own_settings(CATALOG.stack("bundled"), [("clip_gradients", False)])[0].text == ""


def test_a_card_that_only_emulates_bf16_is_suggested_fp16_whose_key_has_the_loss_scale_with_it():
    plan = memplan.plan("llama-3.2-1b", gpu="t4", config="lora", micro_batch_size=16)
    change = next(change for change in plan.suggestions if change.flips_verdict)
    assert change.own_text.startswith("fp16: true, dtype: float16, per_device_train_batch_size: ")


def test_suggestions_are_written_in_the_stacks_own_keys_and_name_nothing_it_cannot_do(cli):
    plan = memplan.plan(
        "llama-8b", gpu="rtx4090", config="bf16-adamw", stack="transformers", micro_batch_size=4, set=FP32
    )
    assert plan.suggestions
    assert all(own.own_key is not None for suggestion in plan.suggestions for own in suggestion.own)
    assert not any("gradients.lifetime" in suggestion.change for suggestion in plan.suggestions)
    asked = (
        "fit", "llama-8b", "--gpu", "rtx4090", "--full", "--stack", "transformers", "-b", "4", "--set",
        "weights=fp32", "--set", "compute_dtype=fp32",
    )  # fmt: skip
    assert "[per_device_train_batch_size: 1]" in cli(*asked, "-v").out
    rows = cli(*asked, "--json").data["suggestions"]
    least = next(row for row in rows if row["change"] == "micro_batch_size=1")
    assert least["own"] == [
        {"setting": "micro_batch_size=1", "own_key": "per_device_train_batch_size", "own_value": "1"}
    ]
