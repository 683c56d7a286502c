"""A small GPT trained by a loop of its own: mixed precision, clipping, accumulation, evaluation and checkpoints."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()
VOCABULARY, TOKENS, HEADS = 512, 64, 4
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.attention(self.before(x)).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def batch():
    ids = torch.randint(VOCABULARY, (options.batch, TOKENS + 1))
    if device == "cuda":
        ids = ids.pin_memory().to(device, non_blocking=True)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


model = GPT(options.width).to(device)
if options.compile:
    model = torch.compile(model)
assert model.head.weight is model.tokens.weight
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
scaler = torch.amp.GradScaler(device, enabled=options.dtype == "float16")
region = torch.autocast(device_type=device, dtype=getattr(torch, options.dtype), enabled=options.dtype != "float32")
os.makedirs("out", exist_ok=True)
for step in range(100):
    for _ in range(options.accumulate):
        ids, targets = batch()
        with region:
            logits, loss = model(ids, targets)
            loss = loss / options.accumulate
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if torch.isnan(loss):
        raise SystemExit("the loss is not a number")
    print(f"step {step}: loss {loss.item():.4f}, norm {norm:.2f}, scale {scaler.get_scale()}")
    if step % 2 == 0:
        with torch.no_grad():
            print("evaluation", model(*batch())[1].item())
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join("out", "ckpt.pt"))
