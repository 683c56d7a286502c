"""A small model whose layers are compiled one by one, with a compiled loss, as torchtitan and torchtune compile theirs."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, TOKENS = 1003, 128, 96


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 352, bias=False), nn.Linear(WIDTH, 352, bias=False), nn.Linear(352, WIDTH, bias=False)
        )  # fmt: skip

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@torch.compile(disable="--eager" in sys.argv)
def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


model = Model().to("cuda", torch.bfloat16)
if "--eager" not in sys.argv:
    for layer in model.layers:
        layer.compile(fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    ids = torch.randint(VOCABULARY, (8, TOKENS + 1), device="cuda")
    loss = loss_of(model(ids[:, :-1]), ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
