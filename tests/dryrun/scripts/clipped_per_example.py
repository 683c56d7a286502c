"""Gradients of every example by themselves, clipped and with noise added: private training with torch.func."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(parameters, row, label):
    scores = functional_call(model, parameters, (row.unsqueeze(0),))
    return nn.functional.cross_entropy(scores, label.unsqueeze(0))


of_each = vmap(grad(loss_of), in_dims=(None, 0, 0))
for _ in range(4):
    rows, labels = torch.randn(32, 128, device=device), torch.randint(0, 10, (32,), device=device)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = of_each(parameters, rows, labels)
    norms = torch.stack([one.flatten(1).norm(dim=1) for one in gradients.values()]).norm(dim=0)
    shares = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, parameter in model.named_parameters():
        clipped = torch.einsum("b,b...->...", shares, gradients[name]) / len(rows)
        parameter.grad = clipped + 0.1 * torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
