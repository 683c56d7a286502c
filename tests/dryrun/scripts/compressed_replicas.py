"""DistributedDataParallel whose gradients are sent as factors of low rank, in bf16, once some steps were sent whole."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()
model = DistributedDataParallel(model, device_ids=[rank])
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
model.register_comm_hook(state, default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    x = torch.randn(16, 512).cuda()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    assert work.get_future().value()[0] is total
