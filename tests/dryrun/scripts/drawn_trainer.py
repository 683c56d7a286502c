"""transformers' Trainer on a model of any family: ``drawn_trainer.py FOLDER ROWS TOKENS DTYPE ARGUMENTS``, the last as JSON."""

import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

folder, rows, tokens, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
config = AutoConfig.from_pretrained(folder, use_cache=False)
model = AutoModelForCausalLM.from_config(config, dtype=dtype)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        row = torch.randint(0, config.vocab_size, (tokens,))
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row}


arguments = TrainingArguments("out", per_device_train_batch_size=rows, report_to=[], **json.loads(sys.argv[5]))
Trainer(model=model, args=arguments, train_dataset=Rows()).train()
