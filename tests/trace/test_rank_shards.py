"""What each rank keeps under ``fully_shard``: the table of ``memplan fit --rank all`` beside real shards on a fake group."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memplan
import memplan.muon

UNEVEN = memplan.Shapes(layers=1, hidden=72, intermediate=100, heads=6, kv_heads=2, head_dim=12, vocab=101, tied=False)


def own_adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=False)


def coded_adamw(parameters):
    return memplan.muon.Muon([{"params": list(parameters), "algorithm": "adamw", "adamw_format": "int8"}])


def kept_by(rank, world, tensors, optimizer_of=own_adamw):
    """Return the bytes of weights and states of one rank, each storage once."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        module = nn.ParameterList([nn.Parameter(torch.zeros(t.shape)) for t in tensors for _ in range(t.count)])
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
        optimizer = optimizer_of(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        weights = [parameter.to_local() for parameter in module.parameters()]
        moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
        states = [moment.to_local() if hasattr(moment, "to_local") else moment for moment in moments]
        return tuple(sum(part.untyped_storage().nbytes() for part in parts) for parts in (weights, states))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world", "keys", "optimizer_of"),
    [(5, {}, own_adamw), (24, {}, own_adamw), (5, {"optimizer.default": "adamw-int8"}, coded_adamw)],
)
def test_every_rank_keeps_what_the_table_says(world, keys, optimizer_of):
    options = {"gpu": "h100", "config": "fp32-adamw", "sequence_length": 64}
    answer = memplan.plan_ranks(shapes=UNEVEN, gpus=world, set=keys, **options)
    tensors = answer.memory.model.inventory
    assert sum(row.ranks for row in answer.rows) == world
    assert len(answer.rows) > 1
    for row in answer.rows:
        assert kept_by(row.last, world, tensors, optimizer_of) == (row.weight_bytes, row.state_bytes), row


SMALL = memplan.Shapes(layers=1, hidden=192, intermediate=500, heads=6, kv_heads=2, head_dim=32, vocab=101, tied=False)
TORCHAO = {
    (3, "adamw-8bit-torchao"): {0: 807656, 2: 795368},
    (4, "adamw-fp8-torchao"): {0: 743616, 3: 734400},
    (8, "adamw-4bit-torchao"): {0: 364672, 7: 343168},
    (24, "adamw-8bit-torchao"): {0: 145856, 20: 133568, 21: 124352, 22: 121280, 23: 108992},
}
"""Ranks and optimizer -> rank -> bytes of what ``_new_buffer`` of torchao 0.13.0 makes for its shards in fp32, on a fake group."""


@pytest.mark.parametrize(("ranks", "optimizer"), TORCHAO)
def test_states_of_torchao_are_of_a_rank_s_own_rows(ranks, optimizer):
    keys = {"stack": "trl", "optimizer.default": optimizer}
    answer = memplan.plan_ranks(shapes=SMALL, gpu="h100", config="bf16-adamw", gpus=ranks, sequence_length=64, set=keys)
    assert {row.first: row.state_bytes for row in answer.rows} == TORCHAO[ranks, optimizer]


def test_a_last_rank_whose_states_are_not_coded_is_refused():
    keys = {"stack": "trl", "optimizer.default": "adamw-4bit-torchao"}
    with pytest.raises(memplan.CannotAnswerError, match="26 of 101 rows, as most ranks have"):
        memplan.plan(shapes=SMALL, gpu="h100", config="bf16-adamw", gpus=4, sequence_length=64, set=keys)


def test_states_in_host_memory_are_on_no_rank():
    options = {"gpu": "h100", "config": "fp32-adamw", "gpus": 5, "sequence_length": 64}
    options["set"] = {"stack": "transformers", "offload.weights": "cpu", "offload.optimizer_states": "cpu"}
    (row,) = memplan.plan_ranks(shapes=UNEVEN, **options).rows
    assert (row.ranks, row.persistent_bytes) == (5, 0)
