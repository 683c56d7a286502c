"""transformers' Trainer with callbacks, evaluation, metrics and an early end."""

import sys

import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        row = torch.randint(0, 1000, (128,))
        return {"input_ids": row, "labels": row}


class Telling(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("memory", torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            assert float(logs["loss"]) > 0


arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    eval_strategy="steps",
    eval_steps=1,
    save_steps=1,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    max_steps=8,
    bf16=True,
    report_to=[],
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Rows(),
    eval_dataset=Rows(),
    compute_metrics=lambda given: {"accuracy": float((given.predictions == given.label_ids).mean())},
    preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    callbacks=[Telling(), EarlyStoppingCallback(early_stopping_patience=50)],
)
trainer.train()
