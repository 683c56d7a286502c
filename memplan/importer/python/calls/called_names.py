"""Names of trainers, classes and functions that programs in Python call, and the keys of files that what they give them is."""

import re
from collections.abc import Mapping
from typing import Any

from memplan.importer.python.calls.embedding_calls import ARGUMENTS, TRAINER

TRAINERS: Mapping[str, str] = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "GRPOTrainer": "grpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward_modeling",
    "ORPOTrainer": "orpo",
    "CPOTrainer": "cpo",
    "RLOOTrainer": "rloo",
    "PPOTrainer": "ppo",
    "GKDTrainer": "gkd",
    **{f"{name}Trainer": name.lower() for name in ("A2PO", "AsyncDistillation", "AsyncGRPO", "BCO", "Distillation", "GMPO", "GOLD", "IWOPD", "MiniLLM", "NashMD", "OnlineDPO", "PAPO", "PRM", "SDFT", "SDPO", "ServerDistillation", "TPO", "XPO")},
}  # fmt: skip
"""TRL's trainers -> its script of each (trl/scripts, examples/scripts); those of trl/experimental (1.16.0) are refused by it."""
PLAIN_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
CONFIGS = (*(f"{name.removesuffix('Trainer')}Config" for name in TRAINERS), *PLAIN_ARGUMENTS, ARGUMENTS)
"""Classes of arguments, those of TRL's trainers first."""
PLAIN_DEFAULTS = {"gradient_checkpointing": False, "bf16": False}
"""What transformers' own class of arguments hands on to a trainer of TRL's, whose defaults are others (trl/trainer/sft_trainer.py, 1.16.0, line 654)."""
PLAIN = ("Trainer", "Seq2SeqTrainer", TRAINER)
"""transformers' own trainers, and that of Sentence Transformers."""
DIRECT: Mapping[str, tuple[str, str]] = {
    "TrainArguments": ("swift", "sft"),
    "SftArguments": ("swift", "sft"),
    "PretrainArguments": ("swift", "pt"),
    "RLHFArguments": ("swift", "rlhf"),
    "run_exp": ("llamafactory-cli", "train"),
    "DictDefault": ("axolotl", "train"),
}
"""What other trainers take from a program in Python, whose keys are those of their files -> the command that does the same."""
DIRECT_CALLS = ("sft_main", "pt_main", "rlhf_main", "run_exp", "train", "do_train")
MODEL = re.compile(r"(?!.*(?:Tokenizer|Processor|Extractor|Config|Peft)).*(?:Model|For[A-Z]\w+)_from_pretrained")
"""Calls that load a model; those of tokenizers, processors and adapters are others."""
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
        "use_flash_attention_2": "use_flash_attention_2",
        "load_in_4bit": "load_in_4bit",
        "load_in_8bit": "load_in_8bit",
        "num_labels": "num_labels",
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
    "model_init_kwargs",
    "teacher_model",
)
"""Keywords that TRL's trainers took themselves until 0.13, and a teacher, which they take still."""
OTHER_ADAPTERS = ("IA3Config", "PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig", "AdaLoraConfig", "LoHaConfig", "LoKrConfig", "OFTConfig", "BOFTConfig", "VeraConfig", "LNTuningConfig", "VBLoRAConfig", "FourierFTConfig", "HRAConfig", "BoneConfig", "RandLoraConfig", "XLoraConfig", "AdaptionPromptConfig", "MultitaskPromptTuningConfig")  # fmt: skip
"""Classes of PEFT's for what is not LoRA (peft/tuners, 0.21.2)."""
