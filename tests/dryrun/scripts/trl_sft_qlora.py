"""TRL's SFTTrainer on a model in 4 bits with adapters, as its documentation writes it."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

folder = sys.argv[1]
quantisation = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True
)
model = AutoModelForCausalLM.from_pretrained(
    folder, quantization_config=quantisation, dtype=torch.bfloat16, device_map={"": 0}
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a")),
    pad_token="<pad>",
    eos_token="<eos>",
)
rows = Dataset.from_dict({"input_ids": [[2] * 512] * 64, "labels": [[2] * 512] * 64})
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="out",
        per_device_train_batch_size=1,
        max_length=512,
        gradient_checkpointing=True,
        bf16=True,
        optim="adamw_bnb_8bit",
        report_to=[],
        dataset_kwargs={"skip_prepare_dataset": True},
    ),
    train_dataset=rows,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
