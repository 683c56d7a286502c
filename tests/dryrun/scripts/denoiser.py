"""A denoising model: times drawn at random, noise predicted, weights averaged."""

import math

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Denoiser(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.width, self.time = width, nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.enter, self.leave = nn.Linear(196, width), nn.Linear(width, 196)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(4)
        )

    def forward(self, x, t):
        half = self.width // 2
        rates = torch.exp(-math.log(10_000) * torch.arange(half, device=x.device) / half)
        angles = t[:, None].float() * rates
        x = self.enter(x) + self.time(torch.cat([angles.cos(), angles.sin()], -1))
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


model = Denoiser().to(device)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
kept = torch.linspace(1, 0.01, 1000).to(device)
for _ in range(4):
    x, t = torch.rand(64, 196).to(device), torch.randint(1000, (64,)).to(device)
    noise = torch.randn_like(x)
    share = kept[t][:, None]
    loss = nn.functional.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    average.update_parameters(model)
    print(loss.item())
