"""Proximal policy optimisation: rollouts without gradients, advantages, minibatches that are drawn."""

import torch
from torch import nn
from torch.distributions import Categorical

device = "cuda" if torch.cuda.is_available() else "cpu"


class AC(nn.Module):
    def __init__(s, o, a, h=200):
        super().__init__()
        s.b = nn.Sequential(nn.Linear(o, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh())
        s.pi = nn.Linear(h, a)
        s.v = nn.Linear(h, 1)

    def forward(s, x):
        h = s.b(x)
        return Categorical(logits=s.pi(h)), s.v(h).squeeze(-1)


net = AC(31, 6).to(device)
opt = torch.optim.Adam(net.parameters(), lr=2.5e-4, eps=1e-5)
T, N = 40, 16
for update in range(5):
    obs = torch.zeros(T, N, 31, device=device)
    act = torch.zeros(T, N, device=device)
    logp, rew, val, done = (torch.zeros(T, N, device=device) for _ in range(4))
    o = torch.randn(N, 31, device=device)
    for t in range(T):
        with torch.no_grad():
            d, v = net(o)
            a = d.sample()
        obs[t], act[t], logp[t], val[t] = o, a, d.log_prob(a), v
        rew[t] = o[:, 0]
        o = torch.randn(N, 31, device=device)
    with torch.no_grad():
        adv = torch.zeros_like(rew)
        last = 0
        nv = net(o)[1]
        for t in reversed(range(T)):
            nxt = nv if t == T - 1 else val[t + 1]
            delta = rew[t] + 0.99 * nxt * (1 - done[t]) - val[t]
            adv[t] = last = delta + 0.99 * 0.95 * (1 - done[t]) * last
        ret = adv + val
    fo, fa, fl, fadv, fr = obs.reshape(-1, 31), act.reshape(-1), logp.reshape(-1), adv.reshape(-1), ret.reshape(-1)
    idx = torch.randperm(T * N, device=device)
    for mb in idx.split(320):
        d, v = net(fo[mb])
        ratio = (d.log_prob(fa[mb]) - fl[mb]).exp()
        A = fadv[mb]
        A = (A - A.mean()) / (A.std() + 1e-8)
        loss = (
            torch.max(-A * ratio, -A * ratio.clamp(0.8, 1.2)).mean()
            + 0.5 * (v - fr[mb]).square().mean()
            - 0.01 * d.entropy().mean()
        )
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        with torch.no_grad():
            kl = ((ratio - 1) - ratio.log()).mean()
        if kl > 1e6:
            break
    print(update, loss.item(), rew.mean().item())
