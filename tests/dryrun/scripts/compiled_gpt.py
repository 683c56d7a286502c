"""nanoGPT's model, compiled, in nanoGPT's loop: ``compiled_gpt.py VOCABULARY LENGTH LAYERS WIDTH HEADS BATCH MICRO_STEPS DTYPE``."""

import sys

import torch

from memplan.model.families import model_spec
from memplan.trace.stacks.nanogpt_train import _Gpt

vocabulary, length, layers, width, heads, batch, steps = map(int, sys.argv[1:8])
shape = {"vocab_size": vocabulary, "n_positions": length, "n_layer": layers, "n_embd": width, "n_head": heads}
spec = model_spec({"model_type": "gpt2", "activation_function": "gelu", **shape}, "gpt", "the script")
model = _Gpt(spec, 0.0).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
model = torch.compile(model)


def rows():
    x, y = (torch.randint(vocabulary, (batch, length)) for _ in range(2))
    return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)


x, y = rows()
for _ in range(100):
    for _ in range(steps):
        with torch.amp.autocast(device_type="cuda", dtype=getattr(torch, sys.argv[8])):
            logits, loss = model(x, y)
            loss = loss / steps
        x, y = rows()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
