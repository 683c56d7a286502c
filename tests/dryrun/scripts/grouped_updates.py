"""An optimizer and a norm that are told to group tensors, as AdamW does by itself where there is a GPU."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for step in range(4):
    loss = model(torch.randn(16, 256, device=device)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    print(step, loss.item())
