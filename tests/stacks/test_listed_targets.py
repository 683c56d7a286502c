"""Adapters on the linear layers that libraries list by name, held against PEFT's own on transformers' models, experts among them."""

import pytest
import torch

from memplan.training.adapters import adapter_tensors
from tests.survey.drawn_jobs import Job, resolved

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT reads what transformers 5.24 renames

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 500,
}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False}
CHOSEN = {"num_experts_per_tok": 2}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "head_dim": 8, "n_group": 2, "topk_group": 1}
GROUPED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
MODELS = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "mlp_only_layers": [0]},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts": 4},
    "glm4_moe": {**GROUPED, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**GROUPED, **LATENT, "n_routed_experts": 8},
    "lfm2_moe": {
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_dense_layers": 1,
        "layer_types": ["full_attention", "conv", "full_attention"],
    },
    "olmoe": {"num_experts": 4},
    **{family: {"num_local_experts": 4} for family in ("mixtral", "minimax_m2", "granitemoe", "gpt_oss")},
}


def listed(model):
    """Return the last words of linear layers' names, without the head, as ``find_all_linear_modules`` does in
    llamafactory/model/model_utils/misc.py (0.9.5); axolotl's and ms-swift's lists are taken to be alike."""
    layers = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return sorted({name.rpartition(".")[2] for name in layers if name != "lm_head"})


@pytest.mark.parametrize("family", MODELS)
def test_listed_layers_have_the_adapters_that_peft_puts_on_them(family, catalog):
    keys = {**SMALL, **CHOSEN, **MODELS[family], "model_type": family}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**keys))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=listed(model), task_type="CAUSAL_LM"))
    own = [parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad]
    for stack in ("llama-factory", "axolotl", "ms-swift"):
        training = {"description": "", "stack": stack, "weights": {"default": "bf16"}, "compute_dtype": "bf16"}
        training |= {"micro_batch_size": 1, "sequence_length": 64, "optimizer": {"default": "adamw-fp32"}}
        tensors = adapter_tensors(*resolved(Job(keys, {**training, "adapter": {"kind": "lora", "rank": 4}}), catalog))
        assert [sum(t.count for t in tensors), sum(t.count * t.elements for t in tensors)] == [len(own), sum(own)]
