"""A variational autoencoder with weights that are parametrized, annealed, evaluated and saved."""

import torch
from torch import nn
from torch.nn.utils import parametrizations as P

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class VAE(nn.Module):
    def __init__(s):
        super().__init__()
        s.e = nn.Sequential(nn.Linear(300, 257), nn.Softplus(), P.weight_norm(nn.Linear(257, 2 * 33)))
        s.d = nn.Sequential(P.spectral_norm(nn.Linear(33, 257)), nn.Softplus(), nn.Linear(257, 300))

    def forward(s, x):
        mu, lv = s.e(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * lv).exp()
        return s.d(z), mu, lv


m = VAE().to(device)
opt = torch.optim.ASGD(m.parameters(), lr=1e-3)
for i in range(4):
    x = torch.rand(222, 300, device=device)
    r, mu, lv = m(x)
    bce = nn.functional.binary_cross_entropy_with_logits(r, x, reduction="sum")
    kl = -0.5 * torch.sum(1 + lv - mu**2 - lv.exp())
    loss = bce + min(1.0, i / 3) * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{loss.item() / 222:.3f}")
    if i == 1:
        m.eval()
        torch.save({k: v.cpu() for k, v in m.state_dict().items()}, "vae.pt")
        m.train()
with torch.no_grad():
    print(m.d(torch.randn(500, 33, device=device)).sigmoid().mean().item())
