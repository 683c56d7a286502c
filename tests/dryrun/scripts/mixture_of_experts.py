"""A decoder whose tokens a router sends to two of eight experts, expert by expert."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Experts(nn.Module):
    def __init__(self, width=128, count=8):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return out.view_as(x)


model = nn.Sequential(nn.Embedding(1000, 128), *(Experts() for _ in range(2)), nn.Linear(128, 1000)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    ids = torch.randint(1000, (4, 64)).to(device)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
