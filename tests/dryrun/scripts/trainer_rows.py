"""transformers' Trainer on rows of one length."""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

config = AutoConfig.from_pretrained(sys.argv[1])
config.use_cache = False
attention = "flash_attention_2" if "--flash" in sys.argv else "sdpa"
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        row = torch.randint(0, 1000, (512,))
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row}


arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    num_train_epochs=1,
    optim="adamw_torch",
    max_grad_norm=0.0,
    bf16="--bf16" in sys.argv,
    use_liger_kernel="--liger" in sys.argv,
    logging_steps=1,
    save_steps=1,
    report_to=[],
)
trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
trainer.train()
trainer.save_model("out/final")
