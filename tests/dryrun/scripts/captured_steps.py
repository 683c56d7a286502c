"""A whole training step in a CUDA graph: warmed up on a stream of its own, captured, and replayed on new rows."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
rows, wanted = (torch.randn(2048, 1024, device="cuda") for _ in range(2))


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(model(rows), wanted)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(10):
    rows.copy_(torch.randn(2048, 1024, device="cuda"))
    wanted.copy_(torch.randn(2048, 1024, device="cuda"))
    graph.replay()
print(loss.item())
