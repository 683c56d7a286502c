"""Low-rank adapters written out, on a base that is frozen and in bf16."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Adapted(nn.Module):
    def __init__(self, base, rank=8, scale=2.0):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.down = nn.Parameter(torch.randn(rank, base.in_features, device=base.weight.device) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x):
        added = (x.float() @ self.down.t()) @ self.up.t()
        return self.base(x) + (self.scale * added).to(x.dtype)


model = nn.Sequential(*(nn.Linear(384, 384, bias=False) for _ in range(6))).to(device, torch.bfloat16)
for number, layer in enumerate(model):
    model[number] = Adapted(layer)
trained = [weight for weight in model.parameters() if weight.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-3)
print(sum(weight.numel() for weight in trained), "of", sum(weight.numel() for weight in model.parameters()))
for _ in range(4):
    x = torch.randn(256, 384).to(device, torch.bfloat16)
    loss = (model(x).float() - x.float()).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(loss.item())
