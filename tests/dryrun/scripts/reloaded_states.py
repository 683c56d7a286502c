"""A checkpoint of model and optimizer that is saved, loaded again and trained on."""

import os

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


def make():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(130, 700), nn.GELU(), nn.Dropout(0.2), nn.Linear(700, 130)).to(device)
    return m, torch.optim.Adam(m.parameters(), amsgrad=True)


def train(m, o, n):
    for _ in range(n):
        x = torch.randn(257, 130, device=device)
        loss = nn.functional.smooth_l1_loss(m(x), x)
        o.zero_grad()
        loss.backward()
        o.step()
        print(loss.item())


os.makedirs("ckpts", exist_ok=True)
m, o = make()
train(m, o, 2)
torch.save({"model": m.state_dict(), "optim": o.state_dict(), "step": 2}, "ckpts/last.pt")
print(os.path.exists("ckpts/last.pt"))
m2, o2 = make()
c = torch.load("ckpts/last.pt", map_location=device, weights_only=True)
m2.load_state_dict(c["model"])
o2.load_state_dict(c["optim"])
train(m2, o2, 1)
del m, o, c
train(m2, o2, 1)
