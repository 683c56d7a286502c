"""LitGPT's loss over pieces of 128 tokens: what all moments of a step take, of one row and of two, of one piece and of more."""

from dataclasses import replace

import pytest

from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.training.resolution.resolve_config import resolve
from tests.survey.agreement import cut_model

MOMENTS = {(1, 100): 22_645_229_196, (1, 300): 27_876_726_324, (2, 100): 25_903_626_036, (2, 300): 35_493_270_204}
"""Rows and their tokens -> bytes of all moments together, the fullest one or not."""


@pytest.mark.parametrize("case", MOMENTS, ids=str)
def test_every_moment_takes_as_much_as_it_did(case, catalog):
    rows, length = case
    config = replace(
        catalog.configs["bf16-adamw"],
        micro_batch_size=rows,
        sequence_length=length,
        stack="litgpt",
        zero_gradients="free",
    )
    model = cut_model("llama-3.1-8b", catalog, layers=1)
    card = Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb")
    plan = CompiledPlan(model, resolve(config, catalog, "pieces")).evaluate(card)
    assert plan.setup.profile.loss == "fp32-pieces"
    assert sum(one.form.total_bytes(plan.values) for one in plan.forms.candidates) == MOMENTS[case]
