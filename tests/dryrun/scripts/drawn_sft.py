"""TRL's SFTTrainer, with adapters or without: ``drawn_sft.py FOLDER ROWS TOKENS DTYPE ARGUMENTS``, the last as JSON."""

import json
import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

folder, rows, tokens, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
arguments = json.loads(sys.argv[5])
rank = arguments.pop("rank", 0)
words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
    args=SFTConfig(
        "out",
        per_device_train_batch_size=rows,
        max_length=tokens,
        report_to=[],
        dataset_kwargs={"skip_prepare_dataset": True},
        **arguments,
    ),
    train_dataset=Dataset.from_dict({"input_ids": [[2] * tokens] * 100, "labels": [[2] * tokens] * 100}),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    peft_config=LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM") if rank else None,
).train()
