"""A recipe in the manner of torchtune: a class with its configuration, logits and loss in chunks, layers recomputed."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    width: int = 128
    layers: int = 3
    vocabulary: int = 2000
    rows: int = 4
    tokens: int = 128
    accumulate: int = 2
    chunks: int = 4


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class ChunkedLoss(nn.Module):
    def __init__(self, chunks):
        super().__init__()
        self.chunks = chunks

    def forward(self, head, hidden, labels):
        total = sum(
            nn.functional.cross_entropy(head(part).flatten(0, 1), goal.flatten(), ignore_index=-100, reduction="sum")
            for part, goal in zip(hidden.chunk(self.chunks, 1), labels.chunk(self.chunks, 1), strict=True)
        )
        return total / (labels != -100).sum()


class Recipe:
    def __init__(self, config):
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def setup(self):
        c = self.config
        with self.device:
            self.embed = nn.Embedding(c.vocabulary, c.width)
            self.layers = nn.ModuleList(Layer(c.width) for _ in range(c.layers))
            self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        self.model = nn.ModuleDict({"embed": self.embed, "layers": self.layers, "head": self.head})
        self.loss = ChunkedLoss(c.chunks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5)

    def batch(self):
        ids = torch.randint(self.config.vocabulary, (self.config.rows, self.config.tokens))
        labels = ids.clone()
        labels[:, : self.config.tokens // 4] = -100
        return ids.to(self.device), labels.to(self.device)

    def train(self):
        for step in range(4):
            for _ in range(self.config.accumulate):
                ids, labels = self.batch()
                hidden = self.embed(ids)
                for layer in self.layers:
                    hidden = checkpoint(layer, hidden, use_reentrant=False)
                loss = self.loss(self.head, hidden, labels) / self.config.accumulate
                del hidden
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            print(f"{step}|{loss.item():.3f}|{float(norm):.3f}")


if __name__ == "__main__":
    recipe = Recipe(Config())
    recipe.setup()
    recipe.train()
