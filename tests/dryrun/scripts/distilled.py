"""A student learns from a teacher's distribution and from the labels."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"


def network(width):
    return nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1000))


teacher, student = network(1024).to(device).eval().requires_grad_(False), network(256).to(device)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
heat = 2.0
for _ in range(5):
    x, y = torch.randn(128, 128).to(device), torch.randint(1000, (128,)).to(device)
    with torch.no_grad():
        goal = (teacher(x) / heat).softmax(-1)
    scores = student(x)
    soft = nn.functional.kl_div((scores / heat).log_softmax(-1), goal, reduction="batchmean") * heat**2
    hard = nn.functional.cross_entropy(scores, y)
    loss = 0.7 * soft + 0.3 * hard
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(soft.item(), hard.item())
