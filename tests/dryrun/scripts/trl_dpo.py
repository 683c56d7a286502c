"""TRL's DPOTrainer with adapters."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="a"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
pairs = {"prompt": ["a " * 40] * 32, "chosen": ["b " * 60] * 32, "rejected": ["a " * 50] * 32}
trainer = DPOTrainer(
    model=model,
    args=DPOConfig(output_dir="out", per_device_train_batch_size=2, max_length=128, report_to=[], bf16=True),
    train_dataset=Dataset.from_dict(pairs),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
