"""Activations in host memory: what is there, what stays on the device, and what is refused by name."""

import pytest

import memplan
from memplan.errors import CannotAnswerError
from memplan.step.units.host_memory import copied_widths

FULL = {"activation_checkpointing": "full"}
OFFLOADED = {**FULL, "offload.activations": "cpu"}
TOKENS, HIDDEN, LAYERS = 2 * 1024, 4096, 32
STREAM = 2 * TOKENS * HIDDEN  # of Llama 3.1 8B, in bf16


def plan(stack: str, keys: dict[str, object] = OFFLOADED, config: str = "lora", **more: object):
    settings = {"stack": stack, "micro_batch_size": 2, "sequence_length": 1024, **keys, **more}
    return memplan.plan("llama-3.1-8b", gpu="h100-sxm-80gb", config=config, set=settings).memory


def test_torchtune_pins_inputs_of_all_layers_and_all_that_the_final_norm_saves_as_often_as_it_does():
    squares, roots = 2 * 4 * TOKENS * HIDDEN, 2 * 4 * TOKENS
    assert plan("torchtune").host_bytes == LAYERS * STREAM + squares + roots
    assert plan("torchtune").host.pinned_bytes >= plan("torchtune").host_bytes


def test_trl_pins_each_storage_once_and_what_its_loss_saves():
    rows = TOKENS - 2
    norm = 4 * TOKENS * HIDDEN + 4 * TOKENS
    loss = rows * (2 * HIDDEN + 8 + 4 + 4) + 2 * rows  # chosen rows, labels, two sums; masks
    assert plan("trl").host_bytes == LAYERS * STREAM + norm + loss


def test_llama_factory_copies_inputs_of_all_layers_and_pins_none():
    memory = plan("llama-factory")
    assert (memory.host_bytes, memory.host.pinned_bytes) == (LAYERS * STREAM, 0)


@pytest.mark.parametrize("stack", ["torchtune", "trl", "llama-factory"])
def test_backward_has_one_input_of_a_layer_or_two_in_the_place_of_all(stack):
    before, after = (dict(plan(stack, keys).instants) for keys in (FULL, OFFLOADED))
    saved = before["layer 32 backward"] - after["layer 32 backward"]
    assert (LAYERS - 4) * STREAM <= saved <= LAYERS * STREAM


def test_a_tensor_of_less_than_a_kibibyte_stays_on_the_device():
    model, setup = plan("torchtune").model, plan("torchtune").setup
    assert copied_widths(model.spec, setup, 1024, 1) == (1, 2)
    assert copied_widths(model.spec, setup, 300, 3) == (4, 4)
    assert copied_widths(model.spec, setup, 64, 1) == (9, 9)
    assert copied_widths(model.spec, plan("trl", FULL).setup, 300, 3) == (0, 0)


def test_the_reserve_is_a_share_where_a_stream_of_its_own_copies():
    assert "stream of its own" in plan("torchtune").reserve_by_share
    assert not plan("llama-factory").reserve_by_share


@pytest.mark.parametrize(
    ("stack", "keys", "reason"),
    [
        ("transformers", OFFLOADED, "how transformers keeps activations there is not modelled"),
        ("axolotl", OFFLOADED, "how axolotl keeps activations there is not modelled"),
        ("torchtune", {**OFFLOADED, "activation_checkpointing": "none"}, "every tensor that is saved is copied"),
        ("torchtune", {**OFFLOADED, "parallel.data": 2, "parallel.zero_stage": 3}, "several GPUs"),
        ("trl", {**OFFLOADED, "reentrant_checkpointing": True}, "reentrant checkpointing"),
        ("trl", {**OFFLOADED, "kernels.loss": "fp32"}, "kernels.loss: fused-head is modelled"),
        ("llama-factory", {**OFFLOADED, "weights.hidden_matrix": "llm-int8"}, "multiplied as integers"),
        ("trl@0.29", OFFLOADED, "kernels.loss: fused-head is modelled"),
    ],
)
def test_what_is_not_modelled_is_refused_with_its_reason(stack, keys, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        plan(stack, keys)
