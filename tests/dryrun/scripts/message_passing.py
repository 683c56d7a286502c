"""A graph network with two augmented views, which compares every node with every other."""

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class GCN(nn.Module):
    def __init__(s, i, h, o):
        super().__init__()
        s.a, s.b = nn.Linear(i, h), nn.Linear(h, o)

    def agg(s, x, e, w):
        return torch.zeros_like(x).index_add_(0, e[1], x[e[0]] * w[:, None])

    def forward(s, x, e, w):
        return s.agg(s.b(F.dropout(F.relu(s.agg(s.a(x), e, w)), 0.3, s.training)), e, w)


n, m = 700, 3001
g = torch.Generator().manual_seed(1)
e = torch.randint(0, n, (2, m), generator=g).to(device)
x = torch.randn(n, 61, generator=g).to(device)
y = torch.randint(0, 5, (n,), generator=g).to(device)
deg = torch.bincount(e[1], minlength=n).clamp(min=1).float()
w = deg[e[0]].rsqrt() * deg[e[1]].rsqrt()
train = torch.arange(n, device=device) % 3 == 0
net = GCN(61, 128, 40).to(device)
head = nn.Linear(40, 5).to(device)
opt = torch.optim.Rprop([*net.parameters(), *head.parameters()])
for i in range(4):
    net.train()
    z1, z2 = (net(x * (torch.rand_like(x) > 0.2), e, w) for _ in range(2))
    sim = F.normalize(z1, dim=-1) @ F.normalize(z2, dim=-1).T / 0.5
    loss = F.cross_entropy(sim, torch.arange(n, device=device)) + F.cross_entropy(head(z1[train]), y[train])
    opt.zero_grad()
    loss.backward()
    opt.step()
    net.eval()
    with torch.no_grad():
        acc = (head(net(x, e, w))[~train].argmax(1) == y[~train]).float().mean()
        print(i, round(loss.item(), 3), acc.item())
