"""Names, shapes and counts equal those of transformers' own implementations, tensor by tensor."""

import copy
import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from memplan.model.families import around, families, model_spec, read_config, transformers_rows, with_towers
from memplan.model.inventory import parameter_count
from memplan.model.parameter_tensors import inventory_of

from .test_model_catalog import ENTRIES
from .tiny import CASES

transformers = pytest.importorskip("transformers")

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NO_MULTIPLE_OF_HEADS = {"kanana-1.5-2.1b", "kanana-nano-2.1b"}
"""Llama models whose width is no multiple of their heads, which ``LlamaConfig`` refuses since 5.0 whatever ``head_dim`` says."""


ENCODERS = {
    name
    for name, _ in CASES.values()
    if name.rpartition("_")[2] in ("bert", "distilbert", "modernbert", "mpnet", "roberta")
}
"""Families without a head of their own."""


def model_type(family):
    """Return what transformers calls a family."""
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    return family if family in known else family.replace("_", "-")


def real_shapes(architecture, config):
    """Return the shape of each parameter of transformers' model; tied ones come once."""
    real = transformers.AutoConfig.for_model(model_type(architecture), **(copy.deepcopy(config) | IDS))
    auto = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    auto = transformers.AutoModel if architecture in ENCODERS else auto
    with torch.device("meta"):
        model = auto.from_config(real)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def inventory_shapes(architecture, config):
    inventory = inventory_of(model_spec({"model_type": architecture} | config, "tiny", "tiny"))
    return {name: tensor.shape for tensor in inventory for name in tensor.expanded_names()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_parameters_equal_those_of_transformers(case):
    architecture, config = CASES[case]
    assert inventory_shapes(architecture, config) == real_shapes(architecture, config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_saved_config_is_read_without_an_unknown_key(case):
    architecture, config = CASES[case]
    real = transformers.AutoConfig.for_model(model_type(architecture), **(copy.deepcopy(config) | IDS))
    saved, notes = read_config(json.loads(real.to_json_string(use_diff=False)), "tiny", "tiny")
    given = model_spec({"model_type": architecture} | config, "tiny", "tiny")
    defaults = {
        "max_position_embeddings": saved.max_position_embeddings,
        "window": saved.window,
        "full_layers": saved.full_layers,
    }
    assert replace(given, **defaults) == saved
    assert not [note for note in notes if note.startswith("ignored")]


@pytest.mark.parametrize("case", CASES)
def test_no_parameter_is_named_twice(case):
    architecture, config = CASES[case]
    inventory = inventory_of(model_spec({"model_type": architecture} | config, "tiny", "tiny"))
    names = [name for tensor in inventory for name in tensor.expanded_names()]
    assert len(names) == len(set(names)) == sum(tensor.count for tensor in inventory)
    assert parameter_count(inventory) > 0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.one_in(10)
def test_every_released_model_equals_that_of_transformers(name, monkeypatch):
    entry = ENTRIES[name]
    if name in NO_MULTIPLE_OF_HEADS:
        assert entry["config"]["hidden_size"] % entry["config"]["num_attention_heads"]
        monkeypatch.setattr(transformers.LlamaConfig, "__class_validators__", [])
    shapes = real_shapes(entry["architecture"], entry["config"])
    assert inventory_shapes(entry["architecture"], entry["config"]) == shapes
    assert sum(math.prod(shape) for shape in shapes.values()) == entry["expected_parameters"]


def test_every_family_has_a_case():
    assert {architecture for architecture, _ in CASES.values()} == set(families())


def test_every_family_says_what_libraries_do_with_it():
    heads = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    for name in families():
        said = around(name)
        assert said.scored == (model_type(name) in heads), name
        assert [said.wrapped is not None, said.ahead is not None] == [name in with_towers()] * 2, name


def test_a_family_with_experts_says_what_peft_does_with_them():
    for architecture, config in CASES.values():
        spec = model_spec({"model_type": architecture} | config, "tiny", "tiny")
        if any(run.layer.mixture for run in spec.runs):
            assert around(architecture).adapted_experts, architecture


def test_what_peft_does_with_experts_is_what_families_say():
    weights = pytest.importorskip("peft.utils.transformers_weight_conversion")
    patterns, mapped = weights._MODEL_TO_CONVERSION_PATTERN, weights._MOE_TARGET_MODULE_MAPPING
    for name in families():
        if said := around(name).adapted_experts:
            assert (said != "left") == (patterns.get(name) in mapped), name


def forward_order(architecture, config):
    """Return the names of the modules of a real model that run and have parameters, and how many axes what is dropped has."""
    real = transformers.AutoConfig.for_model(model_type(architecture), **(copy.deepcopy(config) | IDS))
    for key in [key for key in vars(real) if key.endswith(("dropout", "pdrop"))]:
        setattr(real, key, 0.1)
    auto = transformers.AutoModel if architecture in ENCODERS else transformers.AutoModelForCausalLM
    model = auto.from_config(real, attn_implementation="eager").train()
    order = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, given, made: order.append(("dropout", made.dim())))
        elif list(module.parameters(recurse=False)):
            module.register_forward_hook(lambda module, given, made, name=name: order.append((name, 0)))
    model(torch.ones(1, 6, dtype=torch.long))
    return order


TEXTS = {family: case for case, (family, config) in CASES.items() if "vision_config" not in config}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TEXTS.values())
def test_modules_of_dropout_stand_where_a_family_says(case):
    """An activation's or a router's own modules are not asked for: names are those of modules with parameters."""
    architecture, config = CASES[case]
    order, said = forward_order(architecture, config), around(architecture)
    pairs = list(pairwise(order))
    behind = {first for (first, _), (second, axes) in pairs if (second, axes) == ("dropout", 3)}
    before = {second for (first, axes), (second, _) in pairs if (first, axes) == ("dropout", 4)}
    expected = said.dropouts or ()
    assert all(name.endswith(expected) for name in behind)
    assert all(any(name.endswith(part) for name in behind) for part in expected)
    called = transformers_rows()[architecture].get("dropout_modules", "residual") in ("both", "attention")
    assert before <= {name for name, _ in order if name.endswith(said.scores_dropout)}
    assert bool(before) == (called and bool(said.scores_dropout))
