"""An autoencoder with a codebook: the nearest rows, averaged without gradients; straight through in backward."""

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Codebook(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(rows, width))
        self.register_buffer("counts", torch.zeros(rows))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
        chosen = F.one_hot(distances.argmin(1), len(self.codes)).type_as(flat)
        nearest = (chosen @ self.codes).view_as(x)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.99).add_(chosen.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(chosen.t() @ flat, alpha=0.01)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-5).unsqueeze(1))
        used = chosen.mean(0)
        return x + (nearest - x).detach(), F.mse_loss(x, nearest.detach()), (-(used * (used + 1e-10).log()).sum()).exp()


encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(device)
decoder = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
codebook = Codebook(128, 32).to(device)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
for _ in range(4):
    x = torch.randn(32, 16, 64).to(device)
    codes, commitment, perplexity = codebook(encoder(x))
    loss = F.mse_loss(decoder(codes), x) + 0.25 * commitment
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.4f} {perplexity.item():.1f}")
