"""A selective scan in plain torch, where no kernel for it is installed; optional packages are asked for first."""

import math

import torch
import torch.nn.functional as F
from torch import nn

try:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
except ImportError:
    selective_scan_fn = None
try:
    import xformers.ops as xops
except ImportError:
    xops = None
device = "cuda" if torch.cuda.is_available() else "cpu"


class Scan(nn.Module):
    def __init__(self, width=64, states=8, taps=4):
        super().__init__()
        self.inner, self.states, self.rank, self.taps = 2 * width, states, math.ceil(width / 16), taps
        self.norm, self.into = nn.RMSNorm(width), nn.Linear(width, 4 * width, bias=False)
        self.filter = nn.Parameter(torch.randn(taps, self.inner))
        self.chosen = nn.Linear(self.inner, self.rank + 2 * states, bias=False)
        self.rate, self.out = nn.Linear(self.rank, self.inner), nn.Linear(self.inner, width, bias=False)
        self.decay = nn.Parameter(torch.log(torch.arange(1, states + 1).float().repeat(self.inner, 1)))
        self.skip = nn.Parameter(torch.ones(self.inner))

    def forward(self, x):
        before, (x, gate) = x, self.into(self.norm(x)).split(self.inner, -1)
        padded = F.pad(x, (0, 0, self.taps - 1, 0))
        x = F.silu(sum(padded[:, tap : tap + x.shape[1]] * self.filter[tap] for tap in range(self.taps)))
        rate, b, c = self.chosen(x).split([self.rank, self.states, self.states], -1)
        rate = F.softplus(self.rate(rate))
        decays = torch.exp(torch.einsum("bld,dn->bldn", rate, -torch.exp(self.decay.float())))
        inputs = torch.einsum("bld,bln,bld->bldn", rate, b, x)
        state, outputs = torch.zeros(x.shape[0], self.inner, self.states, device=x.device), []
        for place in range(x.shape[1]):
            state = decays[:, place] * state + inputs[:, place]
            outputs.append(torch.einsum("bdn,bn->bd", state, c[:, place]))
        return before + self.out((torch.stack(outputs, 1) + x * self.skip) * F.silu(gate))


model = nn.Sequential(nn.Embedding(256, 64), Scan(), Scan(), nn.RMSNorm(64), nn.Linear(64, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(4):
    ids = torch.randint(256, (4, 33), device=device)
    loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("bits", loss.item() / math.log(2))
