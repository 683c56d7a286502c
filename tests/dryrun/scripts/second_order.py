"""A search by L-BFGS, whose closure runs several times a step and whose history grows."""

import sys

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)).to(device)
optimizer = torch.optim.LBFGS(
    model.parameters(), lr=0.8, max_iter=5, history_size=6, line_search_fn=next(iter(sys.argv[1:]), None)
)
points = torch.randn(256, 64).to(device)
heights = torch.sin(points.sum(1, keepdim=True))
for step in range(5):

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(points), heights)
        loss.backward()
        return loss

    print(step, optimizer.step(closure).item())
