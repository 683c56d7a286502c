"""An exponential average of the weights beside them, and an evaluation of it."""

import copy

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(256, 1024), nn.SiLU(), nn.LayerNorm(1024), nn.Linear(1024, 256)).to(device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(5):
    x = torch.randn(128, 256).to(device)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for kept, current in zip(average.parameters(), model.parameters(), strict=False):
            kept.lerp_(current, 0.01)
        print(step, float(loss), float((average(x) - x).abs().max()))
