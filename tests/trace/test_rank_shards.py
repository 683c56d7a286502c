"""What each rank keeps under ``fully_shard``: the table of ``memplan fit --rank all`` beside real shards on a fake group."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memplan

UNEVEN = memplan.Shapes(layers=1, hidden=72, intermediate=100, heads=6, kv_heads=2, head_dim=12, vocab=101, tied=False)


def kept_by(rank, world, tensors):
    """Return the bytes of weights, gradients and states of one rank, each storage once."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        module = nn.ParameterList([nn.Parameter(torch.zeros(t.shape)) for t in tensors for _ in range(t.count)])
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        weights = [parameter.to_local() for parameter in module.parameters()]
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        states = [moment.to_local() for moment in moments]  # step counters are on the host
        return tuple(sum(part.untyped_storage().nbytes() for part in parts) for parts in (weights, states))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [5, 24])
def test_every_rank_keeps_what_the_table_says(world):
    answer = memplan.plan_ranks(shapes=UNEVEN, gpu="h100", config="fp32-adamw", gpus=world, sequence_length=64)
    tensors = answer.memory.model.inventory
    assert sum(row.ranks for row in answer.rows) == world
    assert len(answer.rows) > 1
    for row in answer.rows:
        assert kept_by(row.last, world, tensors) == (row.weight_bytes, row.state_bytes), row


def test_states_in_host_memory_are_on_no_rank():
    options = {"gpu": "h100", "config": "fp32-adamw", "gpus": 5, "sequence_length": 64}
    options["set"] = {"stack": "transformers", "offload.weights": "cpu", "offload.optimizer_states": "cpu"}
    (row,) = memplan.plan_ranks(shapes=UNEVEN, **options).rows
    assert (row.ranks, row.persistent_bytes) == (5, 0)
