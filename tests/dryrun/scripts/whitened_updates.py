"""An optimizer of the script's own that updates in the eigenbasis of its gradients' second moments."""

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = 512


class Whitened(torch.optim.Optimizer):
    def __init__(self, params, lr=3e-3, decay=0.95):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"], group["decay"])

    def update(self, parameter, state, lr, decay):
        gradient = parameter.grad
        if not state:
            state["first"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
            sides = [size if size <= LARGEST and gradient.dim() == 2 else 0 for size in gradient.shape]
            state["moments"] = [torch.zeros(size, size, device=gradient.device) for size in sides]
        for side, moment in enumerate(state["moments"]):
            if len(moment):
                moment.lerp_(torch.tensordot(gradient, gradient, dims=[[1 - side]] * 2), 1 - decay)
        bases = state.get("bases")
        if bases is None:
            state["bases"] = [torch.linalg.eigh(one)[1].flip(1) if len(one) else one for one in state["moments"]]
        else:
            pairs = zip(state["moments"], bases, strict=True)
            state["bases"] = [torch.linalg.qr(one @ basis)[0] if len(one) else one for one, basis in pairs]
        turned = self.turned(gradient, state["bases"], 0)
        state["first"].mul_(decay).add_(gradient, alpha=1 - decay)
        state["second"].mul_(decay).add_(turned.square(), alpha=1 - decay)
        change = self.turned(state["first"], state["bases"], 0) / (state["second"].sqrt() + 1e-8)
        parameter.add_(self.turned(change, state["bases"], 1), alpha=-lr)

    def turned(self, tensor, bases, side):
        if tensor.dim() < 2:
            return tensor
        for basis in bases:
            tensor = torch.tensordot(tensor, basis, dims=[[0], [side]]) if len(basis) else tensor.t()
        return tensor


model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 1024), nn.GELU(), nn.Linear(1024, 10)).to(device)
optimizer = Whitened(model.parameters())
for _ in range(4):
    rows, labels = torch.randn(64, 256, device=device), torch.randint(10, (64,), device=device)
    loss = F.cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
