"""accelerate's loop with mixed precision and accumulation, on a model of transformers."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
loader = DataLoader([torch.randint(2048, (256,)) for _ in range(64)], batch_size=2, shuffle=True)
schedule = get_cosine_schedule_with_warmup(optimizer, 10, 100)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for ids in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.print(f"{accelerator.gather(loss.detach()).mean().item():.3f}")
