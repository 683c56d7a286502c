"""What ranks of a gloo group do in test_sharded: each in a process of its own, one function for all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer's first call imports it, which takes each rank longer than its steps do
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from memplan.muon import Muon, OptimizerError, predict_optimizer_bytes
from memplan.muon.updates import rounds
from tests.muon.memory import LiveStorages, tensors_of

Layouts = dict[str, tuple[DeviceMesh, tuple[Placement, ...]]]
SHAPES = {"tall": (71, 64), "wide": (16, 128), "few rows": (3, 64), "experts": (5, 16, 64), "more": (71, 64)}
STEPS = 3


def in_ranks(world: int, function: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Run a function on each of so many ranks, forked from one process that has imported torch; what one raises is raised."""
    meeting = folder / f"meeting-{function.__name__}-{world}"
    mp.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(_ranked, (world, function, str(meeting), arguments), nprocs=world, start_method="forkserver")


def _ranked(rank: int, world: int, function: Callable[..., None], meeting: str, arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", timedelta(minutes=3), world, rank)
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo that still end would abort an orderly exit of the interpreter


def layouts(world: int) -> Layouts:
    """Return the ways to divide a matrix over so many ranks that are tried."""
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    found: Layouts = {"rows": (line, (Shard(0),)), "columns": (line, (Shard(1),)), "copies": (line, (Replicate(),))}
    if world > 2:
        grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
        found["rows over replicas"] = (grid, (Replicate(), Shard(0)))
        found["rows, then columns"] = (grid, (Shard(0), Shard(1)))
        found["rows, then rows"] = (grid, (Shard(0), Shard(0)))
    return found


def parameters(options: dict[str, Any]) -> dict[str, nn.Parameter]:
    """Return whole parameters, the same on every rank."""
    torch.manual_seed(3)
    dtype = torch.bfloat16 if options.get("master") else torch.float32
    return {name: nn.Parameter((torch.randn(shape) / 8).to(dtype)) for name, shape in SHAPES.items()}


def gradients() -> Iterator[dict[str, Tensor]]:
    """Yield the whole gradients of each step."""
    for step in range(STEPS):
        torch.manual_seed(50 + step)
        yield {name: torch.randn(shape) for name, shape in SHAPES.items()}


def optimizer_of(matrices: dict[str, nn.Parameter], **options: Any) -> Muon:
    """Return Muon for all but one of the matrices, which AdamW has."""
    muon = [matrix for name, matrix in matrices.items() if name != "more"]
    groups = [{"params": muon, "algorithm": "muon"}, {"params": [matrices["more"]], "algorithm": "adamw"}]
    return Muon(groups, lr=0.02, **{"block_elements": 8, **options})


def divided(
    whole: dict[str, nn.Parameter], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> dict[str, nn.Parameter]:
    """Return parameters divided over ranks."""
    return {name: nn.Parameter(distribute_tensor(p.data.clone(), mesh, placements)) for name, p in whole.items()}


def steps_agree_to_the_bit(options: dict[str, dict[str, Any]]) -> None:
    """Hold every way to divide against whole matrices in one process; and what a step takes against what was foretold."""
    ways = [(name, key, layout) for name, layout in layouts(dist.get_world_size()).items() for key in options]
    for name, key, (mesh, placements) in ways:
        _steps_agree(f"{key}, {name}", options[key], mesh, placements)


def _steps_agree(name: str, options: dict[str, Any], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    whole, shards = parameters(options), divided(parameters(options), mesh, placements)
    alone, together = optimizer_of(whole, **options), optimizer_of(shards, **options)
    foretold, taken = predict_optimizer_bytes(together), []
    states = foretold.optimizer_states + foretold.host_states + foretold.master_weights
    assert together.state_bytes() == states + foretold.step_counters
    for step in gradients():
        for key, gradient in step.items():
            whole[key].grad = gradient.to(whole[key].dtype)
            shards[key].grad = distribute_tensor(gradient.to(whole[key].dtype), mesh, placements)
        alone.step()
        existing = [[shard._local_tensor, shard.grad._local_tensor] for shard in shards.values()]
        with LiveStorages(tensors_of([existing, list(together.state.values())])) as live:
            together.step()
        taken.append(live.extra)
    for key in SHAPES:
        assert torch.equal(shards[key].full_tensor(), whole[key]), (name, key)
    # gloo's thread lets go of a finished exchange, two bf16 copies of a matrix at most, a moment late
    late = 4 * max(prod(shape) for shape in SHAPES.values())
    assert foretold.temporaries <= min(taken) <= foretold.temporaries + late, (name, taken, foretold.temporaries)


def shared_steps_agree_to_the_bit(options: dict[str, dict[str, Any]]) -> None:
    """Hold ranks that share the work on whole matrices against one that does all; and what a step takes against what was foretold."""
    for key, own in options.items():
        alone_has, shared_has = parameters(own), parameters(own)
        alone, shared = optimizer_of(alone_has, **own), optimizer_of(shared_has, share_replicas=True, **own)
        foretold, taken = predict_optimizer_bytes(shared), []
        assert shared.state_bytes() == alone.state_bytes()
        for step in gradients():
            for name, gradient in step.items():
                alone_has[name].grad = gradient.to(alone_has[name].dtype)
                shared_has[name].grad = gradient.to(shared_has[name].dtype)
            alone.step()
            existing = [[p, p.grad] for p in shared_has.values()]
            with (
                LiveStorages(tensors_of([existing, list(shared.state.values())])) as live,
                counted_products() as products,
            ):
                shared.step()
            taken.append(live.extra)
            assert products == {"own": _owned_of_rank()}
        for name in SHAPES:
            assert torch.equal(shared_has[name], alone_has[name]), (key, name)
            states = zip(shared.state[shared_has[name]].values(), alone.state[alone_has[name]].values(), strict=True)
            assert all(torch.equal(one, other) for one, other in states), (key, name)
        late = 4 * max(prod(shape) for shape in SHAPES.values())
        assert foretold.temporaries <= min(taken) <= foretold.temporaries + late, (key, taken, foretold.temporaries)


@contextmanager
def counted_products() -> Iterator[dict[str, int]]:
    """Count the parameters that this rank orthogonalises."""
    counts, original = {"own": 0}, rounds._orthogonalise

    def counted(matrices: Tensor, options: Any) -> None:
        counts["own"] += len(matrices)
        original(matrices, options)

    rounds._orthogonalise = counted
    try:
        yield counts
    finally:
        rounds._orthogonalise = original


def _owned_of_rank() -> int:
    """Each shape is there once, but for the first, which AdamW's matrix has too: the first rank owns all of these rounds."""
    return len(SHAPES) - 1 if dist.get_rank() == 0 else 0


def replicas_train_alike() -> None:
    """Train under DistributedDataParallel, each rank on rows of its own, with and without shared work."""
    found = []
    for share in (False, True):
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5))))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) / 8)
        groups = [{"params": list(model.parameters()), "algorithm": "muon"}]
        optimizer = Muon(groups, lr=0.02, momentum_format="int8", block_elements=32, share_replicas=share)
        for step in range(STEPS):
            torch.manual_seed(100 * dist.get_rank() + step)
            model(torch.randn(16, 32)).square().mean().backward()
            with counted_products() as products:
                optimizer.step()
            optimizer.zero_grad()
        world, rank = dist.get_world_size(), dist.get_rank()
        assert products["own"] == (len(range(rank, 5, world)) if share else 0)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def trained(folder: str, save: bool) -> None:
    """Train a model under fully_shard, and save its optimizer, or load what others saved and hold it against that."""
    model = small_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in (model[1], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Muon.from_model(
        model, lr=0.02, momentum_format="int8", block_elements=16, adamw={"adamw_format": "bf16"}
    )
    if save:
        train(model, optimizer)
    _save_or_load(model, optimizer, folder, save)
    alone = small_model()
    reference = Muon.from_model(
        alone, lr=0.02, momentum_format="int8", block_elements=16, adamw={"adamw_format": "bf16"}
    )
    train(alone, reference)
    saved = optimizer.state_dict()["state"]
    for number, (own, other) in enumerate(zip(saved.values(), reference.state.values(), strict=True)):
        for name, tensor in own.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(whole.reshape(-1), other[name].reshape(-1)), (number, name)


def _save_or_load(model: nn.Module, optimizer: Muon, folder: str, save: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    if save:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def small_model() -> nn.Sequential:
    """Return a model that every rank makes alike; sums over two or four equal gradients are exact."""
    torch.manual_seed(0)
    layers = nn.Embedding(256, 32), nn.Linear(32, 48), nn.Linear(48, 32, bias=False), nn.LayerNorm(32)
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: Muon) -> None:
    """Take a few steps on the same rows on every rank."""
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        model(torch.randint(0, 256, (16,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def divided_models_step_to_the_bit() -> None:
    """Train a model whose matrices ranks share by columns and rows, its shards over other ranks where there are four."""
    for options in ({"momentum_format": "int8", "block_elements": 8}, {"rounding": "golden", "batch_bytes": 1 << 16}):
        model = _divided_model()
        whole = [nn.Parameter(_whole(parameter)) for parameter in model.parameters()]
        own = Muon.from_model(model, lr=0.02, **options)
        groups = [
            {**group, "params": [whole[_place(model, key)] for key in group["params"]]} for group in own.param_groups
        ]
        alone = Muon([{key: value for key, value in group.items() if key != "param_names"} for group in groups])
        for step in range(STEPS):
            torch.manual_seed(100 + step)
            model(torch.randn(8, 32)).square().mean().backward()
            for parameter, other in zip(model.parameters(), whole, strict=True):
                other.grad = _whole(parameter.grad)
            own.step()
            own.zero_grad()
            alone.step()
        assert all(torch.equal(_whole(p), other) for p, other in zip(model.parameters(), whole, strict=True))


def divided_states(folder: str, save: bool) -> None:
    """Train such a model, and save its optimizer, or load what other ranks saved and hold it against one that was trained here."""
    options = {"lr": 0.02, "momentum_format": "int8", "block_elements": 8, "adamw": {"adamw_format": "bf16"}}
    model = _divided_model()
    optimizer = Muon.from_model(model, **options)
    if save:
        _train_on_given(model, optimizer)
    _save_or_load(model, optimizer, folder, save)
    other = _divided_model()
    trained_here = Muon.from_model(other, **options)
    _train_on_given(other, trained_here)
    for own, here in zip(optimizer.state.values(), trained_here.state.values(), strict=True):
        assert own.keys() == here.keys()
        assert all(torch.equal(own[name], here[name]) for name in own)


def _train_on_given(model: nn.Module, optimizer: Muon) -> None:
    """Take a few steps on whole gradients that are the same whatever the ranks."""
    for step in range(STEPS):
        torch.manual_seed(200 + step)
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape)
            spread = DTensor.from_local(whole, parameter.device_mesh, run_check=False)
            parameter.grad = spread.redistribute(placements=parameter.placements)
        optimizer.step()


def _divided_model() -> nn.Module:
    """Return a feed-forward part and a norm as tensor parallelism divides them, sharded by rows where ranks are left for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.GELU(), nn.Linear(48, 32), nn.LayerNorm(32))
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))
    styles = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "3": SequenceParallel(sequence_dim=0),
    }
    parallelize_module(model, mesh["tensor"], styles)
    if world > 2:
        fully_shard(model, mesh=mesh["shard"])
        kinds = {type(placement).__name__ for p in model.parameters() for placement in p.placements}
        assert kinds == {"_StridedShard", "Shard", "Replicate"}
    return model


def _whole(tensor: Any) -> Tensor:
    return tensor.detach().full_tensor().clone()


def _place(model: nn.Module, key: Tensor) -> int:
    return next(place for place, parameter in enumerate(model.parameters()) if parameter is key)


def ranks_refuse_together() -> None:
    """See that a gradient that is not finite on one rank stops all, and that a norm is that of whole gradients."""
    mesh, placements = layouts(dist.get_world_size())["rows"]
    whole, shards = parameters({}), divided(parameters({}), mesh, placements)
    alone, together = optimizer_of(whole), optimizer_of(shards)
    for key, gradient in next(gradients()).items():
        whole[key].grad, shards[key].grad = gradient.clone(), distribute_tensor(gradient, mesh, placements)
    torch.testing.assert_close(together.clip_grad_norm_(1.0), alone.clip_grad_norm_(1.0))
    torch.testing.assert_close(shards["tall"].grad.full_tensor(), whole["tall"].grad)
    before = {key: shard.full_tensor().clone() for key, shard in shards.items()}
    if dist.get_rank() == 0:
        shards["tall"].grad._local_tensor[0, 0] = float("inf")
    where = "the gradient of .* is not finite" if dist.get_rank() == 0 else "not finite on another rank"
    with pytest.raises(OptimizerError, match=where):
        together.step()
    assert all(torch.equal(shard.full_tensor(), before[key]) for key, shard in shards.items())
