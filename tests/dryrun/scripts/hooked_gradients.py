"""Hooks on modules, parameters and activations, and what is written into in place."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(
    nn.Linear(150, 600), nn.Hardswish(), nn.Linear(600, 600), nn.SELU(inplace=True), nn.Linear(600, 1)
).to(device)
kept = {}
net[2].register_forward_hook(lambda m, i, o: kept.__setitem__("act", o.detach().clone()))
norms = []
for p in net.parameters():
    p.register_hook(lambda g: g * 0.5)
net[0].register_full_backward_hook(lambda m, gi, go: norms.append(go[0].norm().item()))
x0 = torch.randn(511, 150, device=device)
opt = torch.optim.NAdam(net.parameters())
for _i in range(4):
    x = x0 + 0.1 * torch.randn_like(x0)
    y = net(x).squeeze(1)
    y = y.clone()
    y[::3].mul_(2)
    y.clamp_(-5, 5)
    loss = (y - x.sum(1)).abs().mean()
    h = y.register_hook(lambda g: g.clamp(-0.1, 0.1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    h.remove()
    if not torch.isfinite(loss):
        raise SystemExit("diverged")
    print(f"{loss:.4f} {kept['act'].mean():.3f} {norms[-1]:.4f}")
