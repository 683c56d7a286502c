"""Weights that are updated by a gradient of a gradient: the model is called with others than its own."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 16)).to(device)
optimizer = torch.optim.Adam(model.parameters())
for step in range(5):
    total = torch.zeros((), device=device)
    for _task in range(2):
        points, heights = torch.randn(40, 128).to(device), torch.randn(40, 16).to(device)
        weights = dict(model.named_parameters())
        first = F.mse_loss(functional_call(model, weights, (points[:20],)), heights[:20])
        gradients = torch.autograd.grad(first, tuple(weights.values()), create_graph=True)
        weights = {name: weights[name] - 0.01 * one for name, one in zip(weights, gradients, strict=True)}
        total = total + F.mse_loss(functional_call(model, weights, (points[20:],)), heights[20:])
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    print(step, total.item())
