"""What a plan works out once for many layers is what it would work out for each."""

from dataclasses import replace

import pytest

from memplan.catalog.training_config import Gradients
from memplan.model.inventory import merged
from memplan.plan.planner import CompiledPlan
from memplan.step import instants
from memplan.step.ends.embedding_on_tape import embedding_section
from memplan.step.ends.head_on_tape import evaluated_head, head_on_tape
from memplan.step.layers.decoder_layer import layer_section
from memplan.step.states.model_states import model_states
from memplan.step.tensors.tensor_states import tensor_states
from memplan.training.adapters import adapter_tensors

ALTERNATING = ("smollm3-3b", "gemma-2-9b", "gpt-oss-20b", "gemma-3-12b", "deepseek-v2-lite", "qwen2-57b-a14b")
VARIED = tuple(
    (config, kind) for config in ("bf16-adamw", "tier3", "mixed-adamw") for kind in ("none", "selective", "full")
)


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
    assert few.candidates
    monkeypatch.setattr(instants, "ends", lambda places, around_of: iter(places))
    every = CompiledPlan(model(name), setup)
    assert len(few.candidates) <= len(every.candidates)
    for batch, length in ((1, 1), (1, 256), (3, 1000), (8, 4096), (64, 8192)):
        assert few.requested_bytes(batch, length) == every.requested_bytes(batch, length)


def forget_parts():
    for part in (layer_section, embedding_section, head_on_tape, evaluated_head):
        part.cache_clear()


@pytest.mark.parametrize("name", ALTERNATING)
def test_parts_shared_between_plans_are_those_of_a_plan_alone(model, setup_of, name):
    bases = [(setup_of(config), kind) for config, kind in VARIED]
    setups = [replace(base, config=replace(base.config, activation_checkpointing=kind)) for base, kind in bases]
    forget_parts()
    together = [CompiledPlan(model(name), setup).forms for setup in setups]
    for setup, forms in zip(setups, together, strict=True):
        forget_parts()
        assert CompiledPlan(model(name), setup).forms == forms


@pytest.mark.parametrize("config", ["mixed-adamw", "tier3", "muon", "qlora"])
@pytest.mark.parametrize("name", ALTERNATING)
def test_sums_over_merged_tensors_are_those_over_all(model, setup_of, name, config):
    setup, own = setup_of(config), model(name)
    adapters = adapter_tensors(own, setup)
    one, all_ = (
        model_states(setup, merged(own.inventory), merged(adapters)),
        model_states(setup, own.inventory, adapters),
    )
    assert replace(one, tensors=()) == replace(all_, tensors=())
    assert all_.weight_bytes == sum(entry.weight_bytes * entry.tensor.count for entry in all_.tensors)
    assert all_.host_bytes == sum(entry.host_bytes * entry.tensor.count for entry in all_.tensors)
