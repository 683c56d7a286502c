"""What accelerate makes of Trainer's model on several GPUs, on a process group that sends nothing."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.fsdp
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.step.states.parallel_shards import runs_engine
from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.trace.ranks import fully_shard
from memplan.trace.ranks.flat_shards import flat_shards
from memplan.trace.ranks.fully_shard import ShardedRecorder
from memplan.trace.ranks.host_tensors import HostTensors, host_tensors
from memplan.trace.ranks.replicated import Replica, UnfilledHostTensors, process_group
from memplan.trace.recording.recorder import Recorder
from memplan.training.resolved import TrainingSetup


@contextmanager
def several_gpus(recorder: Recorder, setup: TrainingSetup, trainer: Any) -> Iterator[None]:
    """Let accelerate take this process for the first of a setup's ranks, and its own code prepare a trainer's model."""
    parallel = setup.config.parallel
    if setup.steps_on_host and runs_engine(parallel):
        assert isinstance(recorder, ShardedRecorder)
        with HostTensors(recorder, engine=True):
            yield
    elif parallel.data == 1 or runs_engine(parallel):
        yield
    elif isinstance(recorder, ShardedRecorder):
        with _shards(recorder, setup, trainer):
            yield
    else:
        with _replicas(recorder, parallel.data):
            yield


@contextmanager
def _distributed(kind: DistributedType) -> Iterator[None]:
    """Let accelerate take this process for one of several of a kind."""
    with (
        patch.object(Accelerator, "distributed_type", property(lambda _: kind)),
        patch.object(
            Accelerator, "use_distributed", property(lambda _: True)
        ),  # else micro-steps do not wait (``no_sync``)
    ):
        yield


@contextmanager
def _replicas(recorder: Recorder, ranks: int) -> Iterator[None]:
    """Put replicas that are told to ``recorder`` in the place of DistributedDataParallel."""

    class Recorded(Replica):
        def __init__(self, module: Any, **options: Any) -> None:
            super().__init__(module, recorder, **options)

    with (
        replaced(torch.nn.parallel, {"DistributedDataParallel": Recorded}),
        _distributed(DistributedType.MULTI_CPU),
        process_group(ranks),
        UnfilledHostTensors(),  # type: ignore[no-untyped-call]
    ):
        yield


@contextmanager
def _shards(recorder: ShardedRecorder, setup: TrainingSetup, trainer: Any) -> Iterator[None]:
    """Let accelerate's FSDP shard a trainer's model, with its plugin's defaults, by collectives that move nothing."""
    parallel = setup.config.parallel
    flat = parallel.engine == "fsdp1"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1 if flat else 2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        cpu_offload=setup.offloads_weights,
        transformer_cls_names_to_wrap=_named_classes(trainer.model, setup),
        **(_flat_options(parallel) if flat else {"reshard_after_forward": parallel.reshard_after_forward}),
    )
    state = trainer.accelerator.state
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin, trainer.is_fsdp_enabled = plugin, True
    _tell_apart(trainer.model)
    shared = flat_shards(parallel, recorder) if flat else None
    degrees = fully_shard.mesh_degrees(parallel)
    host = host_tensors(recorder) if setup.offloads_weights else nullcontext()
    sharding = shared or fully_shard.sharding(torch.distributed.fsdp, degrees, recorder)
    with _distributed(DistributedType.FSDP), sharding, host:
        if getattr(trainer, "ref_model", None) is not None:
            trainer.ref_model = import_module("trl.models.utils").prepare_fsdp(trainer.ref_model, trainer.accelerator)
        yield


def _tell_apart(model: torch.nn.Module) -> None:
    """Give each parameter an address of its own, by which accelerate knows it again when it is a shard; no name is left for one."""
    for number, parameter in enumerate(model.parameters()):
        parameter.data_ptr = partial(int, number)  # type: ignore[method-assign]


def _named_classes(model: torch.nn.Module, setup: TrainingSetup) -> list[str] | None:
    """Return the classes of layers, and of a tower's blocks where these are units too; None leaves that to transformers."""
    lists = [
        (name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList) and len(part)
    ]
    towers = [
        part
        for name, part in lists
        if name.endswith(("visual.blocks", "encoder.layers", "encoder.layer", "transformer.layers"))
    ]
    wraps = setup.config.parallel.tower_blocks
    if not towers or (wraps is None and not any(type(part[0]).__name__.startswith("Siglip") for part in towers)):
        return None
    layers = [part for name, part in lists if name.endswith(("language_model.layers", "text_model.layers"))]
    return [type(part[0]).__name__ for part in (*layers, *(towers if wraps else ()))]


def _flat_options(parallel: Parallel) -> dict[str, Any]:
    """Return the plugin's keywords for FSDP1."""
    flat, hybrid = parallel.flat, parallel.replicate > 1
    if parallel.reshard_after_forward:
        strategy = "HYBRID_SHARD" if hybrid else "FULL_SHARD"
    else:
        strategy = "HYBRID_SHARD_ZERO2" if hybrid else "SHARD_GRAD_OP"
    when = {"none": "NO_PREFETCH", "pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}[flat.backward_prefetch]
    return {"use_orig_params": flat.use_orig_params, "backward_prefetch": when, "sharding_strategy": strategy}
