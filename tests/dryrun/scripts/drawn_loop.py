"""A loop of one's own around a model of any family: ``drawn_loop.py FOLDER ROWS TOKENS DTYPE ARGUMENTS``, the last as JSON."""

import contextlib
import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

folder, rows, tokens, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), getattr(torch, sys.argv[4])
arguments = json.loads(sys.argv[5])
config = AutoConfig.from_pretrained(folder)
model = AutoModelForCausalLM.from_config(config, dtype=dtype).to("cuda")
if arguments["gradient_checkpointing"]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused="fused" in arguments["optim"] or None)
steps = arguments["gradient_accumulation_steps"]
for _ in range(4):
    for _ in range(steps):
        ids = torch.randint(0, config.vocab_size, (rows, tokens))
        batch = {
            name: value.cuda()
            for name, value in {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}.items()
        }
        with torch.autocast("cuda", dtype=torch.bfloat16) if arguments["bf16"] else contextlib.nullcontext():
            out = model(**batch)
        (out.loss / steps if steps > 1 else out.loss).backward()
    if arguments["max_grad_norm"]:
        torch.nn.utils.clip_grad_norm_(model.parameters(), arguments["max_grad_norm"])
    optimizer.step()
    optimizer.zero_grad()
