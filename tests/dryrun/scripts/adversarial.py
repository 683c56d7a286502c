"""Two networks, two optimizers, two backward passes a step."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
maker = nn.Sequential(nn.Linear(64, 512), nn.LeakyReLU(0.2), nn.Linear(512, 784), nn.Tanh()).to(device)
judge = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)).to(device)
making, judging = torch.optim.Adam(maker.parameters(), lr=2e-4), torch.optim.Adam(judge.parameters(), lr=2e-4)
loss_of = nn.BCEWithLogitsLoss()
for step in range(4):
    real = torch.rand(128, 784).to(device)
    made = maker(torch.randn(128, 64).to(device))
    yes, no = torch.ones(128, 1).to(device), torch.zeros(128, 1).to(device)
    judged = loss_of(judge(real), yes) + loss_of(judge(made.detach()), no)
    judging.zero_grad()
    judged.backward()
    judging.step()
    fooled = loss_of(judge(made), yes)
    making.zero_grad()
    fooled.backward()
    making.step()
    print(step, judged.item(), fooled.item())
