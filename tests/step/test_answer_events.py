"""Events of losses that look at whole logits of answers: what the formula counts at its peak is there in them too."""

from __future__ import annotations

import pytest

import memplan
from memplan.plan.reserve.simulation import events_of
from tests.step.test_events import peak_of

CASES = [
    *[(stack, stage) for stack in ("llama-factory", "ms-swift") for stage in ("dpo", "kto", "orpo")],
    *[("trl@0.29", stage) for stage in ("dpo", "orpo")],
    ("trl@1.14", "dpo"),
]

ADAPTERS = 16 * 16 * (2 * (2048 + 2048) + 2 * (2048 + 512) + 3 * (2048 + 8192))
"""Parameters of adapters of rank 16 on every linear layer of Llama-3.2-1B, of 16 layers."""
OUTSIDE = ("qlora", "llama-factory", "orpo")
"""The job at whose peak events still have the 16-bit casts of adapters that autocast lets go of as the model returns: its loss is outside."""


@pytest.mark.parametrize(("stack", "stage"), CASES)
@pytest.mark.parametrize("config", ["qlora", "bf16-adamw"])
def test_the_peak_of_the_formula_is_among_the_events(stack, stage, config):
    settings = {"method.stage": stage, "reserve": "0 GiB"}
    job = {"stack": stack, "config": config, "micro_batch_size": 2, "sequence_length": 512, "set": settings}
    plan = memplan.plan("llama-3.2-1b", gpu="h100", **job).memory
    assert plan.reserve_by_share == ""
    casts = 2 * ADAPTERS if (config, stack, stage) == OUTSIDE else 0
    assert peak_of(events_of(plan)) == pytest.approx(plan.requested_bytes + casts, rel=1e-4)
