"""A detector's head: boxes of anchors that hold something, hard negatives, and one anchor's class by its number."""

import torch
import torch.nn.functional as F
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
head = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 200 * 5)).to(device)
optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
for step in range(5):
    guesses = head(torch.randn(8, 64).to(device)).view(8, 200, 5)
    truth = torch.zeros(8, 200, 5)
    truth[:, ::7] = 1
    truth = truth.to(device)
    holds = truth[..., 4] > 0.5
    boxes = F.smooth_l1_loss(guesses[..., :4][holds], truth[..., :4][holds], reduction="sum")
    found = F.binary_cross_entropy_with_logits(guesses[..., 4], truth[..., 4], reduction="none")
    hardest = found.masked_fill(holds, 0).topk(60, dim=1).values
    where = holds.nonzero()
    chosen = guesses[where[:, 0], where[:, 1]].pow(2).mean()
    loss = (boxes + found[holds].sum() + hardest.sum()) / holds.sum().clamp(min=1) + 0.01 * chosen
    if not torch.isfinite(loss):
        raise ValueError("the loss is not finite")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), len(where))
