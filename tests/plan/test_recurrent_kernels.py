"""Parts that are no attention have kernels of their own: those of others are refused, and what runs them is said."""

import pytest

import memplan
from memplan.errors import CannotAnswerError
from memplan.step.kernels.refused_recurrences import KERNELS

MODELS = {
    "qwen3.5-4b": "gated delta networks",
    "lfm2-1.2b": "short convolutions",
    "lfm2-8b-a1b": "short convolutions",
    "falcon-h1-7b": "state space layers",
    "granite-4.0-h-tiny": "state space layers",
}
CASES = [(model, kernels) for model in MODELS for kernels in ("torch", "fla", "mamba")]


def planned(model, kernels):
    settings = {"kernels.linear_attention": kernels, "adapter.targets": ["q_proj", "v_proj"]}
    return memplan.plan(model, gpu="h100", config="lora", stack="transformers", set=settings)


@pytest.mark.parametrize(("model", "kernels"), [case for case in CASES if case[1] in KERNELS[MODELS[case[0]]]])
def test_kernels_of_a_part_are_said(model, kernels):
    document = planned(model, kernels).to_dict()
    assert any(f" {kernels}: " in line for line in document["assumptions"])


@pytest.mark.parametrize(("model", "kernels"), [case for case in CASES if case[1] not in KERNELS[MODELS[case[0]]]])
def test_kernels_of_other_parts_are_refused(model, kernels):
    with pytest.raises(CannotAnswerError, match=f"{kernels} has no kernels for {MODELS[model]}"):
        planned(model, kernels)
