"""Epochs of training and of evaluation, whose predictions are kept on the device until the end."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
rows = TensorDataset(torch.randn(96, 64), torch.randint(10, (96,)))
training, held_out = DataLoader(rows, batch_size=32, shuffle=True), DataLoader(rows, batch_size=48)
hidden = [nn.Linear(64, 1536), nn.LayerNorm(1536), nn.Dropout(0.1), nn.SiLU(), nn.Linear(1536, 1536), nn.SiLU()]
model = nn.Sequential(*hidden, nn.Linear(1536, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)


@torch.inference_mode()
def evaluate():
    model.eval()
    scores, labels = [], []
    for x, y in held_out:
        scores.append(model(x.to(device)).softmax(-1))
        labels.append(y.to(device))
    model.train()
    return (torch.cat(scores).argmax(-1) == torch.cat(labels)).float().mean().item()


best = 0.0
for epoch in range(3):
    for x, y in training:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    accuracy = evaluate()
    best = max(best, accuracy)
    print(epoch, loss.item(), accuracy, best)
