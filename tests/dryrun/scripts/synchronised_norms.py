"""A convolutional network in replicas: norms over all processes, the older names of autocast, objects sent around, nvidia-smi."""

import contextlib
import os
import subprocess

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl", init_method="env://")
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
used = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,nounits,noheader"]
layers = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers, nn.Linear(16, 10))).to(device)
model = DistributedDataParallel(model, device_ids=[rank], find_unused_parameters=True, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size(), momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler()
for step in range(10):
    images = torch.randn(16, 3, 32, 32).to(device, memory_format=torch.channels_last)
    labels = torch.tensor([step % 10] * 16, pin_memory=True).cuda(non_blocking=True)
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
    with contextlib.nullcontext() if step % 2 else model.no_sync():
        scaler.scale(loss).backward()
    if step % 2:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, {"rank": dist.get_rank(), "loss": loss.item()})
    print(step, mean.item() / len(told), int(subprocess.check_output(used, text=True).split()[0]), "MiB")
