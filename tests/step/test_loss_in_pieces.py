"""LitGPT's loss over pieces of 128 tokens: what all moments of a step take, of one row and of two, of one piece and of more."""

from bisect import bisect_right
from dataclasses import replace

import pytest

from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import events_of
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


def test_what_a_stretch_without_labels_has_saved_goes_with_the_name_of_its_logits(catalog):
    keys = {"weights": {"default": "fp32"}, "compute_dtype": "bf16", "sequence_length": 129, "stack": "litgpt"}
    config = replace(catalog.configs["lora"], micro_batch_size=5, activation_checkpointing="none", **keys)
    model = cut_model("llama-3.1-8b", catalog, layers=1)
    card = Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb")
    plan = CompiledPlan(model, resolve(config, catalog, "stretches")).evaluate(card)
    assert plan.setup.profile.loss == "fp32-stretches"
    events = events_of(plan, 2)
    copy_bytes = 2 * model.spec.vocab_size * model.spec.hidden_size
    places = [place for place, _ in events.stream.phases]
    freed = [
        events.stream.phases[bisect_right(places, place) - 1][1]
        for place, code in enumerate(events.codes)
        if code & 1 and events.sizes[code >> 1] == copy_bytes
    ]
    assert freed == ["loss backward", "forward", "loss backward"]  # the last one of the second step is there still
