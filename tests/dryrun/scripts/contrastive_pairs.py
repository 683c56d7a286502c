"""Two towers, a learnt temperature, and the contrastive loss of both directions beside a classifying one."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
words = nn.Embedding(3000, 192).to(device)
text = nn.Sequential(nn.Linear(192, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
image = nn.Sequential(nn.Linear(768, 512), nn.GELU(), nn.Linear(512, 64)).to(device)
temperature = nn.Parameter(torch.tensor(2.6592, device=device))
kinds = nn.Linear(64, 12).to(device)
optimizer = torch.optim.AdamW(
    [*words.parameters(), *text.parameters(), *image.parameters(), *kinds.parameters(), temperature], lr=5e-4
)
for _ in range(4):
    ids, pixels = torch.randint(3000, (128, 16)).to(device), torch.randn(128, 768).to(device)
    kind = torch.randint(12, (128,)).to(device)
    a = nn.functional.normalize(text(words(ids).mean(1)), dim=-1)
    b = nn.functional.normalize(image(pixels), dim=-1)
    scores = temperature.exp() * a @ b.t()
    same = torch.arange(128, device=device)
    contrast = (nn.functional.cross_entropy(scores, same) + nn.functional.cross_entropy(scores.t(), same)) / 2
    sorted_ = nn.functional.cross_entropy(kinds(b), kind)
    loss = contrast + 0.1 * sorted_
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        temperature.clamp_(0, 4.6052)
    print(contrast.item(), sorted_.item())
