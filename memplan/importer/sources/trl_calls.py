"""TRL in Python: what a program gives TRL's and transformers' classes, in the keys that TRL's own parser takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from memplan.importer.sources.given_keys import MISSING, GivenKeys

CONFIGS = ("SFTConfig", "DPOConfig", "GRPOConfig", "KTOConfig", "RewardConfig", "ORPOConfig", "CPOConfig", "RLOOConfig", "TrainingArguments")  # fmt: skip
"""Classes of arguments, those of TRL's trainers first."""
TRAINERS: Mapping[str, str] = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "GRPOTrainer": "grpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward_modeling",
    "ORPOTrainer": "orpo",
    "CPOTrainer": "cpo",
    "RLOOTrainer": "rloo",
}
"""TRL's trainers -> its script of each (trl/scripts, examples/scripts)."""
MODELS = ("AutoModelForCausalLM_from_pretrained", "AutoModelForImageTextToText_from_pretrained")
RENAMED: Mapping[str, Mapping[str, str]] = {
    "LoraConfig": {
        "r": "lora_r",
        "target_modules": "lora_target_modules",
        "lora_dropout": "lora_dropout",
        "lora_alpha": "lora_alpha",
        "modules_to_save": "lora_modules_to_save",
        "task_type": "lora_task_type",
        "use_dora": "use_dora",
        "use_rslora": "use_rslora",
    },
    "BitsAndBytesConfig": {
        "load_in_4bit": "load_in_4bit",
        "load_in_8bit": "load_in_8bit",
        "bnb_4bit_quant_type": "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
        "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
    },
    "model": {
        "0": "model_name_or_path",
        "pretrained_model_name_or_path": "model_name_or_path",
        "dtype": "dtype",
        "torch_dtype": "dtype",
        "attn_implementation": "attn_implementation",
        "load_in_4bit": "load_in_4bit",
        "load_in_8bit": "load_in_8bit",
    },
}
"""Class -> its keywords -> the keys of TRL's ``ModelConfig`` (trl/trainer/model_config.py, 1.16.0)."""
OWN: Mapping[str, Mapping[str, Any]] = {"LoraConfig": {"r": 8, "lora_dropout": 0.0}, "model": {"dtype": "auto"}}
"""Class -> its own defaults, where TRL's parser has others (peft/tuners/lora/config.py, 0.21.2; transformers 5.23.0)."""
OF_TRAINERS = (
    "max_seq_length",
    "packing",
    "max_length",
    "max_prompt_length",
    "beta",
    "loss_type",
    "neftune_noise_alpha",
)
"""Keywords that TRL's trainers took themselves until 0.13."""


UNSLOTH = re.compile(r"Fast(Language|Vision|Text)?Model")
"""Classes of unsloth's, whose arguments are read with its own defaults."""


def trains(keys: GivenKeys) -> bool:
    """Whether a program calls unsloth, or one of TRL's trainers."""
    return any(name in TRAINERS or UNSLOTH.search(name) for name in keys.words)


def trl_keys(keys: GivenKeys) -> GivenKeys:
    """Return TRL's keys where a program calls one of its trainers with arguments that stand in it; else the keys as they are.

    A program that wraps its model in adapters itself is left as it is: its adapters are not TRL's.
    """
    arguments = next((name for name in CONFIGS if name in keys.words), None)
    trainer = next((name for name in TRAINERS if name in keys.words), None)
    if trainer is None or arguments is None or any(UNSLOTH.search(word) for word in keys.words):
        return keys
    data: dict[str, Any] = {}
    lines: dict[tuple[str | int, ...], int] = {}

    def take(called: str, name: str, key: str) -> None:
        value = _given(keys, called).get(name, MISSING)
        if value is not MISSING:
            data[key], lines[(key,)] = value, keys.lines.get((called, name), 1)

    for name in _given(keys, arguments):
        take(arguments, name, name)
    for name in OF_TRAINERS:
        take(trainer, name, name)
    models = [model for model in MODELS if model in keys.words]
    if any(type(_given(keys, trainer).get(name)) is str for name in ("0", "model")):
        models = []  # loaded by its name, whatever else the program loads
    if not models:  # TRL loads it by its name
        take(trainer, "0", "model_name_or_path")
        take(trainer, "model", "model_name_or_path")
        inner = data.pop("model_init_kwargs", None)
        data |= {RENAMED["model"].get(name, name): value for name, value in (inner or {}).items()}
    for called in (*models, "LoraConfig", "BitsAndBytesConfig"):
        if called in keys.words:
            kind = "model" if called in MODELS else called
            data |= {RENAMED[kind][name]: value for name, value in OWN.get(kind, {}).items()}
            for name, value in _given(keys, called).items():
                key = RENAMED[kind].get(name, "" if _is_plain(name, value) else f"{called}.{name}")
                if key:
                    take(called, name, key)
    if any(word.endswith("gradient_checkpointing_enable") for word in keys.words):  # arguments switch it on, never off
        data["gradient_checkpointing"] = True
    if "LoraConfig" in keys.words:
        data["use_peft"], lines[("use_peft",)] = True, keys.lines.get(("LoraConfig", "r"), 1)
    return replace(
        keys,
        data=data,
        lines=lines,
        form="file",
        words=("trl", f"{TRAINERS[trainer]}.py"),
        absent=(*keys.absent, *_beyond(keys)),
    )


OWN_ADAPTERS = ("get_peft_model", "prepare_model_for_kbit_training", "PeftModel_from_pretrained")
CHOSEN = ("requires_grad", "requires_grad_")
"""Ends of what a program calls, or sets, to say which weights train."""


def _beyond(keys: GivenKeys) -> Iterator[str]:
    """Yield what has to be said otherwise for the program to be what TRL's own parser would start."""
    first = min(keys.words.index(name) for name in TRAINERS if name in keys.words)
    for word in keys.words[:first]:
        if word in OWN_ADAPTERS:
            yield f"adapters as TRL makes them: {word} makes others, peft_config of its trainer is read"
        elif word.endswith(CHOSEN):
            yield "which weights train: the program sets requires_grad, which unfrozen parts of TRL's model do not say"
        elif word == "torch_compile":
            yield "a model that is not compiled before its trainer has it; torch_compile of its arguments is read"
    quantised = _given(keys, "BitsAndBytesConfig")
    if quantised.get("load_in_4bit") is True and quantised.get("bnb_4bit_compute_dtype") not in ("bfloat16", "float16"):
        yield "bnb_4bit_compute_dtype of 16 bits: products of 4-bit weights in fp32, its default, are not modelled"


def _given(keys: GivenKeys, called: str) -> Mapping[str, Any]:
    inner = keys.data.get(called)
    return inner if isinstance(inner, Mapping) else {}


def _is_plain(name: str, value: Any) -> bool:
    """Tell whether a keyword changes nothing of what is held on a GPU, as it stands."""
    quiet = ("quantization_config", "device_map", "trust_remote_code", "use_cache", "token", "cache_dir", "revision", "low_cpu_mem_usage", "inference_mode", "bnb_4bit_compute_dtype")  # fmt: skip
    return name in quiet or (name == "bias" and value == "none") or value in (None, False)
