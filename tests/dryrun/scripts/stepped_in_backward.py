"""Every weight is updated as soon as its gradient is there, by an optimizer of its own."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(
    device
)
optimizers = {weight: torch.optim.Adam([weight], lr=1e-3, foreach=False) for weight in model.parameters()}


def step(weight):
    optimizers[weight].step()
    optimizers[weight].zero_grad()


for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(step)
for _ in range(5):
    x = torch.randn(64, 256).to(device)
    loss = (model(x) - x).abs().mean()
    loss.backward()
    print(loss.item())
