"""torchtitan's mixtures of experts: what is planned of them, and what is refused by name."""

import pytest

from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share

JOB = {"gpu": "h100", "gpus": 8, "config": "mixed-adamw", "stack": "torchtitan", "sequence_length": 2048}
SHARDS = ["parallel.zero_stage=3"]


def planned(*settings, **options):
    return plan_by_share("qwen3-30b-a3b", set=[*SHARDS, *settings], **{**JOB, **options})


@pytest.mark.parametrize(
    ("settings", "gpus", "text"),
    [
        (("parallel.tensor=2",), 8, "over tensor parallelism are not modelled"),
        (("compute_dtype=fp32",), 8, "run in bf16, whatever else does"),
        ((), 256, "are 128, and more GPUs share each by its width"),
    ],
)
def test_experts_that_are_divided_or_multiplied_otherwise_are_refused(settings, gpus, text):
    with pytest.raises(CannotAnswerError, match=text):
        planned(*settings, gpus=gpus)


def test_selective_checkpointing_keeps_no_product_of_experts():
    full, some, none = (
        dict(planned(f"activation_checkpointing={kind}").memory.instants)["forward"]
        for kind in ("full", "selective", "none")
    )
    before, tokens = 47, 2048  # layers in front of the last, in whose forward most is there
    chosen = 8 * (4 + 8)  # what the choice of 8 experts returns: scores in fp32, numbers in 64 bits
    attention = 2 * (32 + 2 * 4) * 128 + 2 * 32 * 128 + 4 * 32  # query, key and value; attention's result and its sums
    assert some - full == before * tokens * (chosen + attention)
    assert none > 1.2 * some


def test_parameters_are_those_that_were_released():
    assert planned().memory.model.inventory != ()
    assert planned().to_dict()["model"]["parameters"] == 30_532_122_624
