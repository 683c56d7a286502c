"""A decoder whose layers are sharded by torch's fully_shard, as under torchrun: its own group, mesh and mixed precision."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
mesh = init_device_mesh("cuda", (dist.get_world_size(),))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, width=512, vocabulary=4096):
        super().__init__()
        self.embed, self.layers = nn.Embedding(vocabulary, width), nn.ModuleList(Layer(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


with torch.device("meta"):
    model = Decoder()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.to_empty(device=device)
for parameter in model.parameters():
    nn.init.normal_(parameter, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step in range(10):
    ids = torch.randint(4096, (2, 513)).to(device)
    logits = model(ids[:, :-1]).float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(step, total.item(), float(norm.full_tensor()))
dist.destroy_process_group()
