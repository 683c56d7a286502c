"""What one rank of DeepSpeed keeps in host memory: its pieces of what the optimizer steps there, and buffers beside them.

Source:
    deepspeed/runtime/zero/stage_1_and_2.py (0.19.8), ``DeepSpeedZeroOptimizer.__init__``, ``initialize_optimizer_states`` and
    ``async_accumulate_grad_in_cpu_via_gpu``; stage3.py, ``_create_fp32_partitions``, ``_create_param_groups_fp16_flat_cpu_memory``
    and ``_setup_for_real_optimizer``; deepspeed/ops/adam/cpu_adam.py, ``DeepSpeedCPUAdam.step``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from memplan.step.units.host_memory import HostMemory, HostTensors, host_memory

MOMENTS = 2
"""What Adam keeps of each element."""
FP32_BYTES = 4


def flat_host_memory(
    partitions: Sequence[int], summed: Iterable[int], largest: int, width: int, *, pinned: bool
) -> HostMemory:
    """Return what a rank has there under ZeRO 1 and 2.

    Args:
        partitions: Elements of its piece of each group.
        summed: Elements of the parameters whose gradients micro-steps sum up there, each of them whole; none without accumulation.
        largest: Elements of the largest parameter, whose gradient has a buffer there.
        width: Bytes of an element of weights.
        pinned: Whether what DeepSpeed can pin is pinned; moments never are.
    """
    return host_memory(
        (
            *(part for elements in partitions for part in _stepped(elements, pinned=pinned, pinned_master=pinned)),
            *(HostTensors("weights", width * elements, 1, pinned) for elements in partitions),
            *(HostTensors("gradients", width * elements, 1, pinned) for elements in summed),
            HostTensors("buffers", width * largest, 1, pinned),
        )
    )


def pieces_host_memory(
    subgroups: Sequence[int],
    weights: Sequence[int],
    frozen: Iterable[int],
    width: int,
    *,
    pinned: bool,
    pinned_frozen: bool,
) -> HostMemory:
    """Return what a rank has there under ZeRO 3.

    Args:
        subgroups: Elements of its pieces of the parameters that are stepped together.
        weights: Elements of its pieces of each group's weights; none where these stay on the device.
        frozen: Elements of its piece of each frozen parameter, likewise.
        width: Bytes of an element of weights.
        pinned: Whether gradients are pinned; weights that are trained always are, moments and fp32 weights never.
        pinned_frozen: Whether frozen weights are.
    """
    return host_memory(
        (
            *(part for elements in subgroups for part in _stepped(elements, pinned=pinned, pinned_master=False)),
            HostTensors("gradients", width * sum(subgroups), 1, pinned),
            *(HostTensors("weights", width * elements, 1, pinned=True) for elements in weights),
            *(HostTensors("weights", width * elements, 1, pinned_frozen) for elements in frozen),
        )
    )


def _stepped(elements: int, *, pinned: bool, pinned_master: bool) -> Iterator[HostTensors]:
    """Yield a piece's fp32 weights, their gradients and moments."""
    size = FP32_BYTES * elements
    yield HostTensors("master_weights", size, 1, pinned_master)
    yield HostTensors("gradients", size, 1, pinned)
    yield HostTensors("optimizer_states", size, MOMENTS, pinned=False)
