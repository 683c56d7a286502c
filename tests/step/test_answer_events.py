"""Events of losses that look at whole logits of answers: what the formula counts at its peak is there in them too."""

import pytest

import memplan
from memplan.plan.reserve.simulation import events_of
from tests.step.test_events import peak_of

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
