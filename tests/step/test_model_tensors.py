"""The tensors of a model in the order in which a stack has them, and those that one weight is stored in."""

from dataclasses import replace

import pytest

from memplan.step.events.model_tensors import in_modules
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
LAYER = "model.layers.{}."


def named(number):
    """Return tensors of a layer and of its adapter as transformers and PEFT have them, each with its name for states."""
    own = ("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.up_proj.weight")
    low = ("self_attn.q_proj.lora_A.weight", "self_attn.q_proj.lora_B.weight")
    return [LAYER.format(number) + name for name in own], [LAYER.format(number) + name for name in low]


def ordered(stack):
    """Return the names of two layers, an embedding and a head in the order that a stack says, without their common part."""
    layers = [named(number) for number in range(2)]
    names = ["model.embed_tokens.weight", *layers[0][0], *layers[1][0], "lm_head.weight", *layers[0][1], *layers[1][1]]
    models = CATALOG.stacks[stack].models
    return [name.replace("model.layers.", "") for name, _ in in_modules([(name, name) for name in names], models)]


def test_adapters_are_beside_their_weight_and_modules_in_the_order_of_torchtunes_layer():
    names = ordered("torchtune")
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "lm_head.weight"
    assert names[1:7] == [
        "0.self_attn.q_proj.weight", "0.self_attn.q_proj.bias", "0.self_attn.q_proj.lora_A.weight",
        "0.self_attn.q_proj.lora_B.weight", "0.mlp.up_proj.weight", "0.input_layernorm.weight",
    ]  # fmt: skip
    assert [name[0] for name in names[1:-1]] == ["0"] * 6 + ["1"] * 6


def test_litgpts_adapters_come_before_their_weight():
    assert ordered("litgpt")[2:5] == [
        "0.self_attn.q_proj.lora_A.weight",
        "0.self_attn.q_proj.lora_B.weight",
        "0.self_attn.q_proj.weight",
    ]


@pytest.mark.parametrize("elements", [16384, 2**20, 16384 * 77])
@pytest.mark.parametrize("name", ["nf4", "nf4-dq", "nf4-torchao"])
def test_the_tensors_of_a_weight_have_the_bytes_of_its_blocks(name, elements):
    layout = CATALOG.formats[name]
    sizes = layout.level_sizes(elements)
    assert sum(sizes) == layout.tensor_storage_bytes(elements)
    assert replace(layout, tensor_parts=(), levels=()).level_bytes(elements) == sum(sizes)
    if layout.tensor_parts:
        assert sum(layout.tensor_parts) == layout.tensor_bytes
        assert sizes[-len(layout.tensor_parts) :] == layout.tensor_parts
