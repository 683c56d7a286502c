"""Images in a data set, a convolutional network, SGD with momentum and a schedule."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(14400, 10),
).to(device)
images = torch.rand(16, 3, 32, 32)
loader = DataLoader(TensorDataset(torch.arange(640)), batch_size=64, shuffle=True, num_workers=2, pin_memory=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
right = 0
for (rows,) in loader:
    x, y = images[rows % 16].to(device), (rows % 10).to(device)
    scores = model(x)
    loss = nn.functional.cross_entropy(scores, y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    right += (scores.argmax(1) == y).sum().item()
    print(f"{loss.item():.3f} {right}", schedule.get_last_lr())
