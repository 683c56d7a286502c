"""A reward model of transformers, trained on pairs in a loop of its own."""

import sys

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

config = AutoConfig.from_pretrained(sys.argv[1], num_labels=1, pad_token_id=0)
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], config=config, dtype=torch.bfloat16).to("cuda")
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
for _ in range(4):
    ids = torch.randint(1, 2048, (8, 96))
    ids[3, 70:] = 0
    ids = ids.to("cuda")
    rewards = model(input_ids=ids, attention_mask=(ids != 0).long()).logits.squeeze(-1)
    better, worse = rewards.chunk(2)
    loss = -torch.nn.functional.logsigmoid((better - worse).float()).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), (better > worse).float().mean().item())
