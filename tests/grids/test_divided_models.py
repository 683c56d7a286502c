"""``memplan fit`` for models whose matrices GPUs share: torch's DTensor as torchtitan applies it."""

import pytest

from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share
from memplan.model.inventory import parameter_count

JOB = {"gpu": "h100", "config": "bf16-adamw", "stack": "torchtitan"}


def plan(tensor: int, gpus: int, *more: str, model: str = "llama-8b"):
    return plan_by_share(model, gpus=gpus, set=[f"parallel.tensor={tensor}", *more], **JOB).memory


def test_ranks_share_matrices_and_have_whole_norms():
    whole, divided = plan(1, 8), plan(8, 8)
    norms = sum(t.elements * t.count for t in whole.model.inventory if t.role == "norm")
    assert divided.states.weight_bytes == 2 * ((parameter_count(whole.model.inventory) - norms) // 8 + norms)
    assert divided.model.inventory == whole.model.inventory


def test_what_is_left_of_the_gpus_is_sharded_over():
    both = plan(4, 16)
    assert (both.setup.config.parallel.data, both.setup.config.parallel.zero_stage) == (4, 3)
    assert both.requested_bytes < plan(4, 4).requested_bytes


def test_the_sequence_is_shared_between_matrices():
    batch = "micro_batch_size=16"
    assert plan(8, 8, batch, "parallel.sequence=true").requested_bytes < plan(8, 8, batch).requested_bytes


@pytest.mark.parametrize(
    ("tensor", "gpus", "more", "words"),
    [
        (6, 6, (), "6 GPUs do not share 32 attention heads of Llama-3.1-8B evenly; 4 do"),
        (16, 16, (), "16 GPUs do not share 8 key and value heads of Llama-3.1-8B evenly; 8 do"),
        (8, 12, (), "12 GPUs are no multiple of tensor x pipeline x context = 8; the nearest that is: 8"),
        (
            8,
            8,
            ("parallel.sequence=true", "sequence_length=2049"),
            "8 GPUs do not share a sequence of 2049 tokens evenly",
        ),
    ],
)
def test_degrees_that_do_not_divide_are_one_line_with_what_does(tensor, gpus, more, words):
    with pytest.raises(InvalidFileError, match=words):
        plan(tensor, gpus, *more)


@pytest.mark.parametrize(
    ("more", "model", "words"),
    [
        ((), "llama-3.2-1b", "embedding and the head of Llama-3.2-1B one by one"),
        (("parallel.zero_stage=0",), "llama-8b", "fully_shard on every rank; use 3"),
        (("kernels.loss=bf16",), "llama-8b", "bf16 is not modelled for torchtitan"),
        (("evaluation=true",), "llama-8b", "evaluation: it is not modelled where the model is divided"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(more, model, words):
    with pytest.raises(CannotAnswerError, match=words):
        plan(8, 16, *more, model=model)
