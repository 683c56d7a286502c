"""accelerate's loop whose model FSDP2 shards, as its documentation writes it, on a model of transformers."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
loader = DataLoader([torch.randint(2048, (256,)) for _ in range(64)], batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in loader:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"{accelerator.gather(loss.detach()).mean().item():.3f}")
