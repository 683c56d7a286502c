"""Three losses weighed by what is learnt of their variance, backward twice through one graph, values clipped."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.body = nn.Sequential(
            nn.Conv1d(5, 48, 7, padding=3),
            nn.ReLU(inplace=True),
            nn.GroupNorm(6, 48),
            nn.Conv1d(48, 96, 3, stride=2, padding=1),
            nn.LeakyReLU(0.1, inplace=True),
        )
        s.seg = nn.ConvTranspose1d(96, 4, 2, stride=2)
        s.cls = nn.Linear(96, 11)
        s.log_vars = nn.Parameter(torch.zeros(3))

    def forward(s, x):
        h = s.body(x)
        return s.seg(h), s.cls(h.mean(-1)), h


net = Net().to(device)
opt = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9, centered=True)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
for _i in range(5):
    x = torch.randn(12, 5, 258, device=device)
    m = torch.randint(0, 4, (12, 258), device=device)
    y = torch.randint(0, 11, (12,), device=device)
    seg, cls, h = net(x)
    losses = torch.stack(
        [nn.functional.cross_entropy(seg, m), nn.functional.cross_entropy(cls, y, label_smoothing=0.1), h.pow(2).mean()]
    )
    opt.zero_grad(set_to_none=False)
    g = torch.autograd.grad(losses[2], h, retain_graph=True)[0]
    (losses * torch.exp(-net.log_vars) + net.log_vars).sum().backward(retain_graph=True)
    (0.1 * losses[1]).backward()
    nn.utils.clip_grad_value_(net.parameters(), 0.5)
    opt.step()
    sched.step()
    print([round(v, 3) for v in losses.tolist()], float(g.norm()), sched.get_last_lr())
