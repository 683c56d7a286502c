"""Plans of encoders: what their own code did to drawn jobs, and what is refused by name."""

import pytest

from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share
from tests.plan.traced_steps import hold_traced, records_of

TRACED = records_of("encoder_steps.json")
"""What Sentence Transformers' and transformers' own code did, on tensors without memory: drawn by ``python -m tests.survey.stacks --encoders``,
with ``--stage embedding`` and ``--stage classification --method full``; those that agreed, of up to 512 tokens."""


@TRACED
def test_a_plan_is_what_the_librarys_own_code_did(record):
    hold_traced(record, 0.02)


def plan(model="bge-base-en-v1.5", stack="sentence-transformers", stage="embedding", config="bf16-adamw", **settings):
    given = {"method.stage": stage, "sequence_length": 128, **{k.replace("__", "."): v for k, v in settings.items()}}
    return plan_by_share(model, gpu="h100", config=config, stack=stack, set=given)


def test_a_projection_that_nothing_reads_has_weights_and_neither_gradients_nor_states():
    states = plan().memory.states
    assert states.gradient_bytes == 2 * (109_482_240 - 768 * 769)
    read = plan(stack="transformers", stage="classification", method__labels=3).memory.states
    assert read.gradient_bytes == 2 * (109_482_240 + 3 * 769)


def test_dropout_of_a_released_config_saves_masks():
    sizes = [dict(plan(dropout=share).memory.instants)["layer 1 backward"] for share in (0.0, 0.1)]
    assert sizes[1] > sizes[0]


def test_rows_with_padding_have_a_mask_and_others_none():
    full, padded = (plan(padded_rows=padded, micro_batch_size=4).memory.requested_bytes for padded in (False, True))
    assert full < padded


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stack": "trl", "stage": "sft"}, "encoder.*sft under trl"),
        ({"stack": "trl", "stage": "dpo"}, "encoder.*dpo"),
        ({"stack": "bundled", "stage": "sft"}, "encoder.*--method embedding --stack sentence-transformers"),
        ({"stack": "transformers", "stage": "sft"}, "encoder.*--method classification --stack transformers"),
        ({"stack": "ms-swift", "stage": "classification", "method__labels": 2}, "encoder"),
        ({"stack": "transformers", "stage": "classification", "method__labels": 2, "config": "lora"}, "adapter"),
        (
            {"config": "lora", "weights__hidden_matrix": "llm-int8", "method__embedding__mini_batch_size": 4},
            "integers, under a cached loss",
        ),
        (
            {"stack": "transformers", "stage": "classification", "method__labels": 2, "parallel__data": 2},
            "several GPUs",
        ),
    ],
)
def test_what_is_not_followed_is_refused_by_name(settings, words):
    with pytest.raises(CannotAnswerError, match=words):
        plan(**settings)
