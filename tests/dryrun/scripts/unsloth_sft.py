"""A model in 4 bits with adapters, trained by TRL as unsloth patches it."""

import sys

import unsloth  # before all that it patches  # noqa: F401
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel

LENGTH = 1024

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name=sys.argv[1], max_seq_length=LENGTH, load_in_4bit=True, local_files_only=True
)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    lora_alpha=16,
    lora_dropout=0,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    use_gradient_checkpointing="unsloth",
)
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"text": ["a " * LENGTH] * 64}),
    args=SFTConfig(
        output_dir="out", per_device_train_batch_size=2, max_length=LENGTH, optim="adamw_8bit", bf16=True, report_to=[]
    ),
)
trainer.train()
