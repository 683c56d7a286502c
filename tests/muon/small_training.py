"""A small model in training, for the tests of what users of torch expect."""

import torch
from torch import nn

from memplan.muon import quantise_

TOKENS = torch.arange(24).view(4, 6)
FORMS = [
    {},
    {"momentum_format": "int8", "adamw_format": "int8"},
    {"gradient_format": "fp8-e4m3", "momentum_format": "gauss2"},
    {"offload": True},
]
"""Options of the optimizer, each of which keeps state or gradients in another way."""


def network(format=None, dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Embedding(50, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64, bias=False)
    model = nn.Sequential(*layers).to(dtype)
    return model if format is None else quantise_(model, format)


def backward(model):
    loss = model(TOKENS).float().square().mean()
    loss.backward()
    return loss


def train(model, optimizer, steps=2):
    for _ in range(steps):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [value.clone() for value in model.state_dict().values()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
