"""Events of losses that look at whole logits of answers: what the formula counts at its peak is there in them too."""

import pytest

import memplan
from memplan.allocator.streams.stream_replay import Stream
from memplan.plan.reserve.simulation import events_of
from memplan.trace.stacks.registry import STEPS
from tests.step.test_events import peak_of
from tests.survey.drawn_jobs import Job, as_made
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned

CASES = [
    *[(stack, stage) for stack in ("llama-factory", "ms-swift") for stage in ("dpo", "kto", "orpo")],
    *[("trl@0.29", stage) for stage in ("dpo", "orpo")],
    ("trl@1.14", "dpo"),
]


@pytest.mark.parametrize(("stack", "stage"), CASES)
@pytest.mark.parametrize("config", ["qlora", "bf16-adamw"])
def test_the_peak_of_the_formula_is_among_the_events(stack, stage, config):
    settings = {"method.stage": stage, "reserve": "0 GiB"}
    job = {"stack": stack, "config": config, "micro_batch_size": 2, "sequence_length": 512, "set": settings}
    plan = memplan.plan("llama-3.2-1b", gpu="h100", **job).memory
    assert plan.reserve_by_share == ""
    assert peak_of(events_of(plan)) == pytest.approx(plan.requested_bytes, rel=1e-4)


def test_answers_to_other_prompts_pass_through_the_model_first_where_trl_estimates_a_divergence(catalog):
    model = {"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 2}
    model |= {
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
    }
    training = {"description": "", "stack": "trl", "compute_dtype": "fp32", "weights": {"default": "fp32"}}
    training |= {"micro_batch_size": 2, "sequence_length": 65, "optimizer": {"default": "adamw-fp32"}}
    training |= {"activation_checkpointing": "none", "clip_gradients": True}
    training |= {"method": {"stage": "kto", "reference_model": "precomputed"}}
    job = Job({**model, "tie_word_embeddings": False}, training)
    events = events_of(as_made(planned(StackJob(job, "8.9", reentrant=True), catalog)), STEPS)
    assert Stream(events.sizes, events.codes).peaks().reserved_bytes == 40_712_011_776  # as KTOTrainer's own trace
