"""An autoencoder that goes back to its best checkpoint after every epoch, optimizer included."""

import os
import shutil

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
best = float("inf")
os.makedirs("checkpoints", exist_ok=True)
for epoch in range(5):
    rows = torch.randn(256, 512, device=device)
    loss = (model(rows) - rows).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() < best:
        best = loss.item()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({"epoch": epoch, "loss": best, **states}, "checkpoints/last.tmp")
        os.replace("checkpoints/last.tmp", "checkpoints/last.pt")
        shutil.copyfile("checkpoints/last.pt", "checkpoints/best.pt")
        del states
    checkpoint = torch.load("checkpoints/best.pt", map_location=device, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    print(f"epoch {checkpoint['epoch']}: {checkpoint['loss']:.4f}")
