"""What a plan works out once for many layers is what it would work out for each."""

from __future__ import annotations

import pytest

from memplan.catalog.training_config import Gradients
from memplan.library.lookup import catalog_model
from memplan.plan.planner import CompiledPlan
from memplan.step import instants as phases
from memplan.step.states.model_states import model_states, tensor_states

ALTERNATING = ("smollm3-3b", "gemma-2-9b", "gpt-oss-20b", "gemma-3-12b", "deepseek-v2-lite", "qwen2-57b-a14b")


def test_tensors_of_one_name_are_alike_in_all_runs_of_layers(catalog):
    for name in catalog.models:
        known = {}
        for tensor in catalog_model(name, catalog).inventory:
            assert known.setdefault(tensor.name, (tensor.role, tensor.shape)) == (tensor.role, tensor.shape), name


@pytest.mark.parametrize("config", ["mixed-adamw", "tier3", "muon"])
@pytest.mark.parametrize("name", ["smollm3-3b", "deepseek-v2-lite", "gpt2"])
def test_states_that_are_shared_are_those_of_each_tensor(model, setup_of, name, config):
    setup, inventory = setup_of(config), model(name).inventory
    assert model_states(setup, inventory, ()).tensors == tuple(tensor_states(setup, t, False) for t in inventory)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("lifetime", ["step", "layer"])
@pytest.mark.parametrize("name", ALTERNATING)
def test_layers_left_out_are_never_the_fullest(monkeypatch, model, setup_of, name, lifetime, checkpointing):
    keys = {"activation_checkpointing": checkpointing, "gradients": Gradients(lifetime=lifetime)}
    setup = setup_of(**keys)
    few = CompiledPlan(model(name), setup)
    monkeypatch.setattr(phases, "_ends", iter)
    every = CompiledPlan(model(name), setup)
    assert len(few.candidates) <= len(every.candidates)
    for batch, length in ((1, 1), (1, 256), (3, 1000), (8, 4096), (64, 8192)):
        assert few.requested_bytes(batch, length) == every.requested_bytes(batch, length)
