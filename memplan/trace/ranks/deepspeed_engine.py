"""DeepSpeed's own engine on ``meta`` tensors: one rank of several, whose collectives send nothing."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from memplan.errors import CannotAnswerError
from memplan.step.states.parallel_shards import runs_engine
from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.trace.ranks.replicated import UnfilledHostTensors, process_group
from memplan.trace.recording.recorder import Recorder
from memplan.training.resolved import TrainingSetup


def zero_config(setup: TrainingSetup) -> dict[str, Any]:
    """Return the configuration that DeepSpeed is given for a setup."""
    parallel, dtype = setup.config.parallel, setup.config.compute_dtype
    zero = parallel.deepspeed
    return {
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16"},
        "zero_optimization": {
            "stage": parallel.zero_stage,
            "overlap_comm": zero.overlap_comm,
            "reduce_bucket_size": zero.reduce_bucket_size,
            "reduce_scatter": zero.reduce_scatter,
            "round_robin_gradients": zero.round_robin_gradients,
            "stage3_param_persistence_threshold": zero.persistence_threshold,
            "sub_group_size": zero.sub_group_size,
            "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
            "stage3_max_live_parameters": zero.max_live_parameters,
            "stage3_max_reuse_distance": zero.max_reuse_distance,
            **_offloaded(setup),
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


def _offloaded(setup: TrainingSetup) -> dict[str, Any]:
    """Return what DeepSpeed is told to keep in host memory."""
    offload, zero = setup.config.offload, setup.config.parallel.deepspeed
    states = {"device": offload.optimizer_states, "pin_memory": zero.pinned_optimizer}
    weights = {"device": offload.weights, "pin_memory": zero.pinned_weights}
    record_engine = {"offload_optimizer": states, "offload_param": weights}
    return {name: what for name, what in record_engine.items() if what["device"] != "none"}


@contextmanager
def deepspeed_ranks(setup: TrainingSetup, rank: int) -> Iterator[None]:
    """Let DeepSpeed take this process for one of a setup's ranks; nothing where another engine runs it.

    Raises:
        CannotAnswerError: DeepSpeed is not installed.
    """
    if not runs_engine(setup.config.parallel):
        yield
        return
    ranks = setup.config.parallel.data
    variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    own = functional.linear
    with patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        try:
            _pretend()
            with replaced(Tensor, {"record_stream": _nothing}), process_group(ranks, rank), UnfilledHostTensors():  # type: ignore[no-untyped-call]
                yield
        finally:
            functional.linear = own  # stage 3 puts its own there, for good
            _forget_groups()


def record_engine(trainer: Any, recorder: Recorder) -> None:
    """Tell a recorder of the engine that a trainer has just made: its copies of weights, and when it steps."""
    engine = trainer.model_wrapped
    optimizer, step = engine.optimizer, engine.step
    if engine.zero_optimization_partition_weights():
        _pieces(engine, getattr(trainer, "ref_model", None), recorder)
        partitions = optimizer.fp32_partitioned_groups_flat
    else:
        for tensor in (tensor for group in optimizer.round_robin_bit16_meta for tensor in group):
            recorder.without_memory(tensor)
        partitions = optimizer.single_partition_of_fp32_groups
    for partition in partitions:
        recorder.mark(partition, "master_weights")
    if getattr(optimizer, "cpu_offload", False):
        recorder.mark(optimizer.temp_grad_buffer_for_gpu_offload, "communication")
        recorder.mark(optimizer.temp_grad_buffer_for_cpu_offload, "communication")
        for copy in optimizer.param_buffer_of_bit16_for_cpu_offload_groups:
            recorder.mark(copy, "weights")

    def stepping(*args: Any, **options: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            recorder.instant("optimizer step")
            for gradient in _of_zeros(optimizer):
                recorder.mark(gradient, "gradients")
            summed = getattr(optimizer, "accumulated_grads_in_cpu", {}).values()
            for gradient in (*summed, *(part.grad for part in partitions if part.grad is not None)):
                recorder.book_apart(gradient, "gradients")
            if engine.zero_optimization_partition_weights():
                recorder.book_apart(optimizer.grad_partitions_flat_buffer, "gradients")
        return step(*args, **options)

    engine.step = stepping
    if hasattr(optimizer, "copy_grads_in_partition"):
        copy = optimizer.copy_grads_in_partition

        def copied(*args: Any, **options: Any) -> None:
            copy(*args, **options)
            if optimizer.grads_in_partition is not None:
                recorder.mark(optimizer.grads_in_partition, "gradients")

        optimizer.copy_grads_in_partition = copied


def _of_zeros(optimizer: Any) -> Iterator[Tensor]:
    """Yield the gradients of a rank's partition, those of zeros among them, that are no padding."""
    if hasattr(optimizer, "grads_in_partition"):
        for group in optimizer.averaged_gradients.values():
            yield from (gradient for gradient in group or () if not getattr(gradient, "_zero_padding", False))


def _pieces(engine: Any, reference: Any, recorder: Recorder) -> None:
    """Tell a recorder what stage 3 keeps of every parameter and its gradient, and of a reference model's parameters."""
    for parameter in (*engine.module.parameters(), *(reference.parameters() if reference is not None else ())):
        recorder.mark(parameter.ds_tensor, "weights")
    recorder.mark(engine.optimizer.grad_partitions_flat_buffer, "gradients")
    for bucket in engine.optimizer.ipg_buckets.values():
        recorder.mark(bucket.buffer, "communication")


def _forget_groups() -> None:
    """Let DeepSpeed make its groups anew for the next job."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # else the next model is built as this one's configuration says
    groups._release_process_group_references(group=None)
    comm.cdb = None


def _device_on(accelerator: Any) -> Any:
    """Return a class of devices without memory, made of DeepSpeed's for the CPU."""

    class Device(accelerator):  # type: ignore[misc]
        """A device without memory."""

        Stream, Event = _Stream, _Event

        def device_name(self, _: Any = None) -> str:
            return "meta"

        def current_device_name(self) -> str:
            return "meta"

        def current_device(self) -> int:
            return 0

        def is_synchronized_device(self) -> bool:
            return False

        def stream(self, stream: Any) -> Any:
            return torch.cpu.stream(_COMPUTES if stream is _MAIN else stream)

        def current_stream(self, _: Any = None) -> Any:
            stream = torch.cpu.current_stream()
            return _MAIN if stream is _COMPUTES else stream

        def default_stream(self, _: Any = None) -> Any:
            return _MAIN

        def available_memory(self, _: Any = None) -> int:
            return 2**60

        def is_fp16_supported(self) -> bool:
            return True

        def on_accelerator(self, tensor: Tensor) -> bool:
            return not tensor.is_cpu

        def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
            del make_copy, match_shape  # what nobody has told the device of is the CPU's
            return tensor if tensor.is_meta else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    return Device


@cache
def _pretend() -> None:
    """Let DeepSpeed take ``meta`` for a device that works beside the host, and every number for finite."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.accelerator import real_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.ops.op_builder import CPUAdamBuilder
        from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3, stage_1_and_2
    except ImportError:
        raise CannotAnswerError("tracing parallel.engine: deepspeed needs deepspeed: pip install deepspeed") from None

    real_accelerator.set_accelerator(_device_on(CPU_Accelerator)())
    for module, optimizer in (
        (stage_1_and_2, stage_1_and_2.DeepSpeedZeroOptimizer),
        (stage3, stage3.DeepSpeedZeroOptimizer_Stage3),
    ):
        optimizer.has_overflow = _finite(optimizer.has_overflow)
        module.is_invalid_grad_norm = lambda _: False
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = _nothing
    CPUAdamBuilder.load = _UpdatedInPlace
    gather = partition_parameters._dist_allgather_fn
    partition_parameters._dist_allgather_fn = lambda piece, *rest: _Gathering(piece, gather(piece, *rest))


def _finite(looks: Callable[..., Any]) -> Callable[..., bool]:
    def finite(*args: Any, **options: Any) -> bool:
        looks(*args, **options)
        return False

    return finite


class _UpdatedInPlace:
    """Stands for the kernels of DeepSpeed's Adam on the CPU, which update what they are given in place (csrc/includes/cpu_adam.h)."""

    def __init__(self, *_: Any) -> None:
        self.create_adam = self.adam_update = self.destroy_adam = _nothing


class _Gathering:
    """Keeps what is sent until somebody waits for it.

    Source:
        ``WorkNCCL::stash`` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (v2.13.0).
    """

    def __init__(self, piece: Tensor, work: Any) -> None:
        self._piece: Tensor | None = piece
        self._work = work

    def wait(self, *args: Any, **options: Any) -> Any:
        """Let go of it."""
        self._piece = None
        return self._work.wait(*args, **options)


class _Event:
    """Stands for an event of a device without any."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _nothing


class _Stream(_Event, torch.cpu.Stream):
    """A stream of the CPU, which stands for one of a card and has nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        torch.cpu.Stream.__init__(self)


_COMPUTES, _MAIN = torch.cpu.current_stream(), _Stream()
"""The stream that all operators run on, and what stands for it: torch's own has nothing that waits."""


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for what waits for another stream."""
