"""A compiled module whose buffers change, in training and in evaluation."""

import sys

import torch
from torch import nn


class M(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.Linear(64, 128)
        s.bn = nn.BatchNorm1d(128)
        s.b = nn.Linear(128, 64)
        s.register_buffer("mean", torch.zeros(64))
        s.register_buffer("cache", torch.zeros(1, 256, 64))

    def forward(s, x, pos=None):
        y = s.b(s.bn(s.a(x)).relu())
        if s.training:
            s.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        else:
            s.cache.index_copy_(1, pos, y[None].detach())
            y = y + s.cache.mean((0, 1))
        return y


m = M().cuda()
c = torch.compile(m)
opt = torch.optim.AdamW(m.parameters())
for i in range(3):
    x = torch.randn(32, 64, device="cuda")
    loss = (c(x) - x).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(i, loss.item())
    if "--evaluate" in sys.argv:
        m.eval()
        with torch.no_grad():
            print(c(x, torch.arange(32, device="cuda")).shape)
        m.train()
