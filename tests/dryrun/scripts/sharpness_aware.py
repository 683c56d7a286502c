"""Sharpness-aware minimisation by an optimizer of the script's own, and stochastic weight averaging."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

device = "cuda" if torch.cuda.is_available() else "cpu"


class SAM(torch.optim.Optimizer):
    def __init__(s, params, base, rho=0.05, **kw):
        super().__init__(params, dict(rho=rho, **kw))
        s.base = base(s.param_groups, **kw)
        s.param_groups = s.base.param_groups

    @torch.no_grad()
    def first(s):
        n = torch.stack([p.grad.norm(2) for g in s.param_groups for p in g["params"] if p.grad is not None]).norm(2)
        for g in s.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    e = p.grad * (g["rho"] / (n + 1e-12))
                    p.add_(e)
                    s.state[p]["e"] = e
        s.zero_grad()

    @torch.no_grad()
    def step(s, closure=None):
        for g in s.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.sub_(s.state[p]["e"])
        s.base.step()
        s.zero_grad()


net = nn.Sequential(
    nn.Linear(90, 410),
    nn.BatchNorm1d(410),
    nn.PReLU(),
    nn.Linear(410, 203),
    nn.BatchNorm1d(203),
    nn.ELU(),
    nn.Linear(203, 9),
).to(device)
swa = AveragedModel(net)
opt = SAM(net.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
sw = SWALR(opt.base, swa_lr=0.01)
data = [(torch.randn(130, 90, device=device), torch.randint(0, 9, (130,), device=device)) for _ in range(4)]
for i, (x, y) in enumerate(data):
    nn.functional.cross_entropy(net(x), y).backward()
    opt.first()
    loss = nn.functional.multi_margin_loss(net(x), y)
    loss.backward()
    opt.step()
    sw.step()
    swa.update_parameters(net)
    print(i, loss.item())
update_bn((x for x, _ in data), swa, device=device)
with torch.inference_mode():
    swa.eval()
    print((swa(data[0][0]).argmax(-1) == data[0][1]).float().mean().item())
