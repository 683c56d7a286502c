"""A critic whose gradient is penalised, which backward goes through again."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
critic = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).to(device)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9))
for _ in range(4):
    real, made = torch.randn(128, 256).to(device), torch.rand(128, 256).to(device)
    share = torch.rand(128, 1).to(device)
    between = (share * real + (1 - share) * made).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    loss = critic(made).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), penalty.item())
