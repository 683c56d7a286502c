"""A custom autograd function that recomputes, two losses, and a checkpointed part."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

device = "cuda" if torch.cuda.is_available() else "cpu"


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return x * torch.sigmoid(gate)

    @staticmethod
    def backward(ctx, gradient):
        x, gate = ctx.saved_tensors
        open_ = torch.sigmoid(gate)
        return gradient * open_, gradient * x * open_ * (1 - open_)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value, self.gate, self.out = (
            nn.Linear(width, 2 * width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.out(Gated.apply(self.value(x), self.gate(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(192) for _ in range(3))
        self.kind, self.size = nn.Linear(192, 100), nn.Linear(192, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.kind(x), self.size(x)


model = Model().to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)
for _step in range(4):
    x, y = torch.randn(256, 192).to(device), torch.randint(100, (256,)).to(device)
    kind, size = model(x)
    losses = {
        "kind": nn.functional.cross_entropy(kind, y),
        "size": nn.functional.smooth_l1_loss(size, size.detach() + 1),
    }
    total = sum(losses.values())
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    print({name: round(loss.item(), 4) for name, loss in losses.items()})
