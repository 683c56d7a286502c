"""Names, shapes and counts equal those of transformers' own implementations, tensor by tensor."""

import copy
import json
import math
from dataclasses import replace

import pytest

from memplan.model.families import around, families, model_spec, read_config, with_towers
from memplan.model.inventory import parameter_count
from memplan.model.parameter_tensors import inventory_of

from .test_model_catalog import ENTRIES
from .tiny import CASES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def real_shapes(architecture, config):
    """Return the shape of each parameter of transformers' model; tied ones come once."""
    real = transformers.AutoConfig.for_model(architecture, **(copy.deepcopy(config) | IDS))
    auto = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
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
    real = transformers.AutoConfig.for_model(architecture, **(copy.deepcopy(config) | IDS))
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
def test_every_released_model_equals_that_of_transformers(name):
    entry = ENTRIES[name]
    shapes = real_shapes(entry["architecture"], entry["config"])
    assert inventory_shapes(entry["architecture"], entry["config"]) == shapes
    assert sum(math.prod(shape) for shape in shapes.values()) == entry["expected_parameters"]


def test_every_family_has_a_case():
    assert {architecture for architecture, _ in CASES.values()} == set(families())


def test_every_family_says_what_libraries_do_with_it():
    heads = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    for name in families():
        said = around(name)
        assert said.scored == (name in heads), name
        assert [said.wrapped is not None, said.ahead is not None] == [name in with_towers()] * 2, name
