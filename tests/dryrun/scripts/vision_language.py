"""A frozen tower for images, a projector that is trained, and a decoder behind them that sees both."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


class Tower(nn.Module):
    def __init__(self, width=96, patch=8):
        super().__init__()
        self.patch, self.embed = patch, nn.Linear(3 * patch * patch, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(2)
        )

    def forward(self, pixels):
        p = self.patch
        patches = pixels.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = self.embed(patches)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Decoder(nn.Module):
    def __init__(self, width=128, vocabulary=1500):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(3)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


tower, projector, decoder = Tower().to(device), nn.Linear(96, 128).to(device), Decoder().to(device)
tower.requires_grad_(False)
optimizer = torch.optim.AdamW([*projector.parameters(), *decoder.parameters()], lr=1e-4)
for _ in range(4):
    pixels, ids = torch.rand(4, 3, 64, 64).to(device), torch.randint(1500, (4, 48)).to(device)
    with torch.no_grad():
        seen = tower(pixels)
    logits = decoder(torch.cat([projector(seen), decoder.embed(ids)], 1))[:, -48:-1]
    loss = nn.functional.cross_entropy(logits.reshape(-1, 1500), ids[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
