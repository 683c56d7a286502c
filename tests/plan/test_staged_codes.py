"""4-bit weights that axolotl stages on the CPU: what its functions of adapters keep decoded, and what is refused."""

import pytest

from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share
from memplan.step.blocks.fused_adapters import decoded_weight_bytes

STAGED = {"parallel.zero_stage": 3, "parallel.staged_codes": True}
DECODED = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 2048 * 8192) * 2
"""Bytes of all layers' matrices of Llama-3.2-1B in bf16."""


def planned(**keys):
    settings = {"stack": "axolotl", **STAGED, "activation_checkpointing": "full", **keys}
    return plan_by_share("llama-3.2-1b", gpu="h100", gpus=4, config="qlora", set=settings)


def test_functions_keep_decoded_weights_of_every_layer_though_layers_are_computed_again():
    fused, apart = planned(), planned(**{"kernels.adapters": "composite"})
    assert decoded_weight_bytes(fused.memory.model, fused.memory.setup) == DECODED
    assert fused.instants["loss backward"] - apart.instants["loss backward"] == DECODED
    assert fused.memory.persistent_bytes == apart.memory.persistent_bytes
    assert any("lora_mlp_kernel: false" in line for line in fused.memory.assumptions)
    assert not any("lora_mlp_kernel: false" in line for line in apart.memory.assumptions)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"adapter.kind": "dora"}, "axolotl refuses dora"),
        ({"parallel.replicate": 2}, "axolotl refuses groups"),
        ({"activation_checkpointing": "selective"}, "selective checkpointing"),
        ({"parallel.zero_stage": 0}, "counts where axolotl's own code, newer"),
        ({"weights.hidden_matrix": "bf16"}, "counts with weights in nf4"),
        ({"stack": "axolotl@0.19"}, "newer than 0.19"),
        ({"parallel.engine": "fsdp1"}, "counts where axolotl's own code, newer"),
    ],
)
def test_what_it_does_not_run_with_is_refused(keys, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        planned(**keys)
