"""memplan's own Muon for matrices, AdamW for the rest."""

import torch
from torch import nn

from memplan.muon import Muon

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    nn.Linear(128, 512, bias=False), nn.GELU(), nn.Linear(512, 128, bias=False), nn.LayerNorm(128)
).to(device)
matrices = [weight for weight in model.parameters() if weight.dim() == 2]
rest = [weight for weight in model.parameters() if weight.dim() < 2]
optimizers = [Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
for step in range(4):
    x = torch.randn(64, 128).to(device)
    loss = (model(x) - x).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    print(step, loss.item())
