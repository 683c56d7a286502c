"""What a script of unsloth is told of a job: the keywords of ``from_pretrained``, ``get_peft_model`` and ``SFTConfig``, and a model's files."""

import json
from pathlib import Path
from typing import Any

from memplan.errors import CannotAnswerError
from memplan.trace.stacks.registry import STEPS, StackInputs
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

PACKAGES = ("unsloth", "unsloth_zoo", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WORDS = {"<pad>": 0, "<eos>": 1, "a": 2}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": WORDS[word], "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for word in ("<pad>", "<eos>")
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "a"},
}
OPTIMIZERS = {
    ("torch.optim.AdamW", "fused"): "adamw_torch_fused",
    ("torch.optim.AdamW", "foreach"): "adamw_torch",
    ("bitsandbytes.optim.AdamW8bit", ""): "adamw_8bit",
    ("bitsandbytes.optim.PagedAdamW8bit", ""): "paged_adamw_8bit",
    ("torch.optim.SGD", ""): "sgd",
}
"""Class and kernel -> what ``optim`` calls it."""


def written_job(inputs: StackInputs, folder: Path) -> str:
    """Write a model's files into a folder; return the job as JSON, which the script reads.

    Raises:
        CannotAnswerError: unsloth's script cannot ask for what the setup says.
    """
    setup, config = inputs.setup, inputs.setup.config
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(config.compute_dtype)
    adapter = config.adapter
    if adapter is None or dtype is None:
        raise CannotAnswerError("the script of unsloth trains adapters in 16 bits")
    _write(folder / "config.json", {**inputs.keys, **ids, "dtype": dtype})
    _write(folder / "tokenizer.json", TOKENIZER)
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    _write(folder / "tokenizer_config.json", tokens)
    length = config.sequence_length
    targets = PROJECTIONS if "all-linear" in adapter.targets else adapter.targets
    offloads = config.offload.activations == "cpu"
    job = {
        "from_pretrained": {
            "model_name": str(folder),
            "max_seq_length": length,
            "load_in_4bit": setup.format_names["hidden_matrix"] not in FLOAT_BYTES,
        },
        "get_peft_model": {
            "r": adapter.rank,
            "lora_alpha": 2 * adapter.rank,
            "lora_dropout": adapter.dropout or 0,
            "target_modules": list(targets),
            "use_gradient_checkpointing": "unsloth" if offloads else setup.checkpointing != "none",
        },
        "arguments": {
            "per_device_train_batch_size": config.micro_batch_size,
            "gradient_accumulation_steps": config.gradient_accumulation_steps,
            "max_length": length,
            "max_steps": STEPS,
            "optim": _optimizer_name(setup),
            "bf16": dtype == "bfloat16",
            "fp16": dtype == "float16",
            "max_grad_norm": 1.0 if config.clip_gradients else 0.0,
            "logging_strategy": "no",
            "save_strategy": "no",
        },
        "flash_attn": config.kernels.attention == "flash",
        "rows": STEPS * config.micro_batch_size * config.gradient_accumulation_steps,
    }
    return json.dumps(job)


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")


def _optimizer_name(setup: TrainingSetup) -> str:
    implementation = setup.optimizers["hidden_matrix"].implementation
    kernel = setup.profile.optimizer if implementation == "torch.optim.AdamW" else ""
    name = OPTIMIZERS.get((implementation, kernel))
    if name is None:
        raise CannotAnswerError(f"the script of unsloth has no optimizer that is {implementation} {kernel}".rstrip())
    return name
