"""torchtune's models of a family, in full or with its own LoRA and DoRA layers, without memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from memplan.errors import CannotAnswerError
from memplan.model.spec import Attention, Mlp, ModelSpec
from memplan.step.kernels.family_code import UNSCALED_POSITIONS
from memplan.trace.reference.run_options import TORCH_DTYPES
from memplan.training.resolved import TrainingSetup

META = torch.device("meta")
SPLIT = ("q_proj", "k_proj", "v_proj", "o_proj")
PARTS = ("gate_proj", "up_proj", "down_proj")


def built(spec: ModelSpec, setup: TrainingSetup) -> nn.Module:
    """Return torchtune's model of these shapes, adapted and checkpointed as the setup says, without memory.

    Raises:
        CannotAnswerError: torchtune has no such model, or no such adapters.
    """
    adapter, floats = setup.config.adapter, setup.format_names["embedding"]
    if floats not in ("fp32", "bf16"):
        raise CannotAnswerError("torchtune's models are traced with floats in fp32 or bf16")
    builder = _builder(spec, adapted=adapter is not None)
    options = _shapes(spec) | ({} if adapter is None else _adapter_options(setup))
    with training.set_default_dtype(TORCH_DTYPES[floats]), META:
        model: Any = builder(**options)
    for module in model.modules():
        if hasattr(module, "rope_init"):
            module.rope_init()
            module.to(META)
    if adapter is not None:
        set_trainable_params(model, get_adapter_params(model))
    if setup.checkpointing == "full":
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    elif setup.checkpointing != "none":
        raise CannotAnswerError(f"activation_checkpointing: torchtune's recipes have no {setup.checkpointing}")
    model.train()
    return model  # type: ignore[no-any-return]


def _builder(spec: ModelSpec, *, adapted: bool) -> Callable[..., Any]:
    """Return torchtune's function for a family: Llama's is that of the release that is made for so many positions."""
    family = spec.architecture
    if family == "llama":
        shared = spec.max_position_embeddings > UNSCALED_POSITIONS
        family = "llama3_2" if spec.tie_word_embeddings else "llama3_1" if shared else "llama3"
    module = import_module(f"torchtune.models.{family}._component_builders")
    return getattr(module, f"lora_{family}" if adapted else family)  # type: ignore[no-any-return]


def _shapes(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of a builder that say a model's shapes."""
    layer = spec.runs[0].layer
    heads, mlp = layer.attention, layer.feed_forward
    assert isinstance(heads, Attention)
    assert isinstance(mlp, Mlp)
    options: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "num_layers": spec.num_hidden_layers,
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_key_value_heads,
        "embed_dim": spec.hidden_size,
        "max_seq_len": spec.max_position_embeddings,
        "intermediate_dim": mlp.intermediate_size,
    }
    if spec.architecture in ("gemma", "gemma2"):
        return options | {"head_dim": heads.head_dim}
    if heads.query_size != spec.hidden_size:
        raise CannotAnswerError(f"torchtune's {spec.architecture} has heads that together are as wide as the model")
    if spec.architecture == "qwen2":
        options["tie_word_embeddings"] = spec.tie_word_embeddings
    return options


def _adapter_options(setup: TrainingSetup) -> dict[str, Any]:
    """Return the arguments of a builder that say its adapters."""
    adapter = setup.config.adapter
    assert adapter is not None
    targets = (*SPLIT, *PARTS) if "all-linear" in adapter.targets else adapter.targets
    return {
        "lora_attn_modules": [name.replace("o_proj", "output_proj") for name in SPLIT if name in targets],
        "apply_lora_to_mlp": PARTS[0] in targets,
        **({"apply_lora_to_output": True} if "lm_head" in targets else {}),
        "lora_rank": adapter.rank,
        "lora_alpha": 2 * adapter.rank,
        "lora_dropout": adapter.dropout or 0.0,
        "use_dora": adapter.kind == "dora",
        "quantize_base": bool(setup.formats["hidden_matrix"].decoding_temporaries),
    }
