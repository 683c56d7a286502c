"""The planner's data files say of every bundled format what the optimizer really holds."""

from pathlib import Path

import pytest
import torch

from memplan.muon.byte_model import BlockLayout, layout_bytes, predict_bytes, state_layouts
from memplan.muon.stores.gradient_stores import GRADIENT_FORMATS, GradientStore
from memplan.muon.weights.weight_codecs import WEIGHT_FORMATS
from tests.jobs import yaml_data

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def entries(name):
    return yaml_data(CONFIGS / name)


OPTIMIZERS = entries("optimizers.yaml")
BUNDLED = {name: entry.get("options", {}) for name, entry in OPTIMIZERS.items() if entry.get("bundled") == "muon"}
BUNDLED |= {"adamw-int8": {"algorithm": "adamw", "adamw_format": "int8"}}


def slots_of(entry, elements):
    exempt = elements < entry.get("exempt_below", 0)
    slots = entry["exempt_slots"] if exempt else entry["slots"]
    return [
        BlockLayout(slot.get("block_elements", 1), slot["block_bytes"], slot.get("tensor_bytes", 0))
        for slot in slots
        if slot.get("layout", "elementwise") == "elementwise"
    ]


@pytest.mark.parametrize("name", sorted(WEIGHT_FORMATS))
def test_weight_formats(name):
    entry, chosen = entries("weight_formats.yaml")[name], WEIGHT_FORMATS[name]
    assert (chosen.block_elements, chosen.block_bytes) == (entry["block_elements"], entry["block_bytes"])


@pytest.mark.parametrize("name", sorted(GRADIENT_FORMATS))
def test_gradient_dtypes(name):
    entry = entries("gradient_dtypes.yaml")[name]
    layout = BlockLayout(1, entry["element_bytes"], entry.get("tensor_bytes", 0))
    assert GradientStore.predicted_bytes(name, 1001) == layout_bytes(layout, 1001)


@pytest.mark.parametrize("shape", [(64, 64), (100, 333), (7, 9)], ids=str)
@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_optimizer_states(name, shape):
    group, elements = BUNDLED[name], torch.Size(shape).numel()
    theirs = slots_of(OPTIMIZERS[name], elements)
    ours = state_layouts(group, elements).values()
    assert [layout_bytes(slot, elements) for slot in theirs] == [layout_bytes(slot, elements) for slot in ours]
    assert predict_bytes(shape, group, states=theirs) == predict_bytes(shape, group)
