"""Vision-language models trained on rows of text: what a tower that no row passes through costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, Parallel, TrainingConfig
from memplan.errors import CannotAnswerError
from memplan.library.lookup.model_lookup import catalog_model
from memplan.model.inventory import parameter_count
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.solver.search.axes import full_space
from memplan.solver.search.best_first import Search
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
TOWER = 676_550_144
"""Parameters of Qwen2.5-VL-7B that are not those of Qwen2.5-7B: tower and projector."""
LORA = TrainingConfig("test", stack="trl", adapter=Adapter(rank=8))
COMPOSITE = Kernels(adapters="composite")
EIGHT_BIT = {"default": "bf16", "hidden_matrix": "llm-int8"}
FULL = TrainingConfig("test", stack="transformers")


def compiled(config, model="qwen2.5-vl-7b"):
    return CompiledPlan(catalog_model(model, CATALOG), resolve(config, CATALOG, "test"))


def test_the_tower_is_stored_and_has_neither_gradients_nor_optimizer_states():
    whole, text = compiled(FULL).states, compiled(FULL, "qwen2.5-7b").states
    assert whole.weight_bytes - text.weight_bytes == 2 * TOWER
    assert (whole.gradient_bytes, whole.state_bytes) == (text.gradient_bytes, text.state_bytes)
    assert any("rows hold text alone" in note for note in compiled(FULL).model.notes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fit",), ("Rows hold text alone", "runs the text model alone")),
        (("fit", "--config", "qlora"), ("text without images",)),
        (("fit", "--config", "bf16-adamw", "--stack", "bundled"), ("the text model alone",)),
        (("fit", "--method", "inference"), ("prompts hold text alone",)),
        (("compare", "--config", "qlora"), ("Rows hold text alone",)),
    ],
    ids=lambda part: " ".join(part),
)
def test_every_screen_says_that_there_are_no_images(cli, arguments, words):
    command, *options = arguments
    out = " ".join(cli(command, "qwen2.5-vl-3b", "--gpu", "h100", *options).out.split())
    assert all(word in out for word in words)


def test_other_stacks_train_the_text_model_alone():
    plan = compiled(TrainingConfig("test"))
    assert plan.states.weight_bytes == compiled(TrainingConfig("test"), "qwen2.5-7b").states.weight_bytes
    assert plan.model.spec.architecture == "qwen2"
    assert any("left out" in note for note in plan.model.notes)


def test_adapters_on_the_tower_are_weights_and_are_not_trained():
    everywhere, language = compiled(LORA), compiled(replace(LORA, adapter=replace(LORA.adapter, vision=False)))
    blocks = 32 * (8 * (1280 + 3840) + 8 * (1280 + 1280) + 3 * 8 * (1280 + 3420))
    merger = 8 * (5120 + 5120) + 8 * (5120 + 3584)
    width = 4 if everywhere.setup.adapter_dtype == "fp32" else 2
    assert everywhere.states.weight_bytes - language.states.weight_bytes == width * (blocks + merger)
    assert everywhere.states.gradient_bytes == language.states.gradient_bytes


def test_a_frozen_tower_stays_in_the_dtype_that_it_was_loaded_in():
    upcast = replace(FULL, weights={"default": "fp32"}, optimizer={"default": "adamw-fp32"})
    theirs = compiled(replace(upcast, stack="llama-factory")).states.weight_bytes
    assert compiled(upcast).states.weight_bytes - theirs == 2 * TOWER


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (replace(LORA, stack="axolotl"), "lora_qkv_kernel: false"),
        (replace(LORA, stack="axolotl", kernels=COMPOSITE, weights=EIGHT_BIT), "LLM.int8"),
        (replace(FULL, parallel=Parallel(data=8)), "without gradients"),
        (replace(LORA, parallel=Parallel(data=8)), "adapter.vision: false"),
        (replace(LORA, parallel=Parallel(data=8, zero_stage=3)), "sharding"),
    ],
)
def test_what_is_not_modelled_is_refused(config, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        compiled(config)


def test_a_frozen_tower_is_replicated():
    config = replace(LORA, adapter=replace(LORA.adapter, vision=False), parallel=Parallel(data=8))
    assert compiled(config).states.weight_bytes == compiled(replace(config, parallel=Parallel())).states.weight_bytes


def test_a_search_for_settings_has_what_the_stack_trains():
    config = replace(CATALOG.configs["bf16-adamw"], sequence_length=512)
    space, device = full_space(config, CATALOG, (1,)), Device(CATALOG.gpus["h100-sxm-80gb"], "h100")
    for name, stack, weights in (("bundled", "bundled", 0), ("whole", "trl", 2 * TOWER)):
        own = replace(space, base=replace(config, description=name, stack=stack))
        searches = [
            Search(catalog_model(model, CATALOG), own, device, 512, CATALOG, experimental=False)
            for model in ("qwen2.5-vl-7b", "qwen2.5-7b")
        ]
        whole, text = (parameter_count(search.model.inventory) for search in searches)
        assert 2 * (whole - text) == weights
