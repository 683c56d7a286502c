"""Training that halves its batch for as long as the GPU cannot hold it."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
rows = 65536
while True:
    try:
        for _ in range(4):
            batch = torch.randn(rows, 1024, device="cuda")
            nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        break
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        print(f"{rows} rows are too many")
    batch = None
    optimizer.zero_grad()
    torch.cuda.empty_cache()
    rows //= 2
