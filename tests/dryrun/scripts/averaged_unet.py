"""A U-Net that predicts noise, with an average of its weights: sixteen rows of fp32, which NNPACK convolves on CPUs."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, given, made, width):
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, given), nn.SiLU(), nn.Conv2d(given, made, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, made), nn.SiLU(), nn.Conv2d(made, made, 3, padding=1))
        self.time = nn.Linear(width, made)
        self.skip = nn.Conv2d(given, made, 1) if given != made else nn.Identity()

    def forward(self, x, time):
        return self.skip(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])


class UNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Embedding(1000, 4 * width)
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.middle = Block(width, width, 4 * width), Block(width, 2 * width, 4 * width)
        self.halve, self.up = nn.Conv2d(width, width, 3, stride=2, padding=1), Block(3 * width, width, 4 * width)

    def forward(self, x, t):
        time = F.silu(self.time(t))
        wide = self.down(self.enter(x), time)
        narrow = self.middle(self.halve(wide), time)
        return self.leave(self.up(torch.cat([F.interpolate(narrow, scale_factor=2), wide], 1), time))


model = UNet().to(device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
share = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), 0)
for step in range(4):
    x, t = torch.randn(16, 3, 32, 32).to(device), torch.randint(1000, (16,)).to(device)
    noise, part = torch.randn_like(x), share[t][:, None, None, None]
    loss = F.mse_loss(model(part.sqrt() * x + (1 - part).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for kept, current in zip(average.parameters(), model.parameters(), strict=True):
            kept.mul_(0.999).add_(current, alpha=0.001)
    print(step, loss.item())
