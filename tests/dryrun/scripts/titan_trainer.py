"""A trainer in the manner of torchtitan: a mesh of replicas and shards, layers wrapped, checkpoints in parts."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as parts
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


@dataclass
class Config:
    width: int = 256
    layers: int = 3
    vocabulary: int = 4096
    replicas: int = 2


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(c.width), nn.Linear(c.width, 3 * c.width, bias=False)
        self.out, self.second = nn.Linear(c.width, c.width, bias=False), nn.RMSNorm(c.width)
        self.up, self.down = nn.Linear(c.width, 4 * c.width, bias=False), nn.Linear(4 * c.width, c.width, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocabulary, c.width)
        self.layers = nn.ModuleDict({str(number): Block(c) for number in range(c.layers)})
        self.norm, self.output = nn.RMSNorm(c.width), nn.Linear(c.width, c.vocabulary, bias=False)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


class Trainer:
    def __init__(self, config):
        self.device = torch.device(f"cuda:{int(os.environ['LOCAL_RANK'])}")
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl")
        shape = (config.replicas, dist.get_world_size() // config.replicas)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        with torch.device("meta"):
            self.model = Transformer(config)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for name, layer in self.model.layers.items():
            self.model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False)
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.model.to_empty(device=self.device)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.normal_(std=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=8e-4, fused=True)
        self.vocabulary = config.vocabulary

    def train(self):
        for step in range(1, 6):
            ids = torch.randint(self.vocabulary, (2, 257), device=self.device)
            logits = self.model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            del logits
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            print(f"step {step} loss {total.item() / dist.get_world_size():.4f} norm {norm.item():.4f}")
            used = torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(self.device).total_memory
            print(f"memory {used:.1%}")
            parts.save({"model": self.model.state_dict()}, checkpoint_id=f"outputs/step-{step}")


Trainer(Config()).train()
