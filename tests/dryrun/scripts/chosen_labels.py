"""Logits of the labelled tokens alone, which a mask chooses, of rows that are padded."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Embedding(2500, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to(device)
head = nn.Linear(128, 2500).to(device)
optimizer = torch.optim.Adagrad([*model.parameters(), *head.parameters()], lr=1e-2)
lengths = torch.tensor([60, 100, 37, 81])
for _ in range(4):
    ids = torch.randint(1, 2500, (4, 100))
    ids[torch.arange(100) >= lengths[:, None]] = 0
    ids = ids.to(device)
    chosen = ids != 0
    loss = nn.functional.cross_entropy(head(model(ids)[chosen]), ids[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(int(chosen.sum()), loss.item())
