"""DistributedDataParallel as under torchrun: its own group, a sampler of its share, accumulation without sending."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group(backend="nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512)).to(rank)
if "--compile" in sys.argv:
    model = torch.compile(model)
model = DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)
rows = TensorDataset(torch.randn(512, 512))
sampler = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=16, sampler=sampler, pin_memory=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler.set_epoch(0)
for number, (x,) in enumerate(loader, start=1):
    x = x.to(rank, non_blocking=True)[:16]
    sends = number % 2 == 0
    with contextlib.nullcontext() if sends else model.no_sync(), torch.autocast("cuda", torch.bfloat16):
        loss = (model(x).float() - x).square().mean() / 2
        loss.backward()
    if sends:
        optimizer.step()
        optimizer.zero_grad()
        losses = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss.detach())
        print(sum(one.item() for one in losses))
    if number == 8:
        dist.barrier()
        hosts = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, {"rank": dist.get_rank()})
        assert all("rank" in host for host in hosts)
        break
dist.destroy_process_group()
