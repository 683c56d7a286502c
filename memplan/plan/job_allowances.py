"""Allowances of a job: those of its device, and what its collectives and an engine beside it take."""

from collections.abc import Sequence

from memplan.errors import CannotAnswerError
from memplan.plan.allowances import (
    Allowances,
    allowances_for,
    beside_engine,
    communicating,
    communicators_of,
    measured_allowances,
)
from memplan.plan.memory_plan import Device
from memplan.training.resolved import TrainingSetup


def devices_for(setup: TrainingSetup, devices: Sequence[Device]) -> list[Device]:
    """Return the devices that a setup is for: where states are offloaded, those with memory of their own.

    Raises:
        CannotAnswerError: None is left, or memory is pooled for a setup that says how it shares out.
    """
    ranks = setup.config.parallel.gpus
    if ranks > 1 and any(device.count > 1 for device in devices):
        raise CannotAnswerError(
            f"parallel.data: {ranks} plans one GPU of {ranks}; leave it out where memory of several GPUs is pooled"
        )
    suited = [device for device in devices if not (setup.offloads_states and device.gpu.unified_memory)]
    for device in devices if not suited else ():
        raise CannotAnswerError(
            f"offload.optimizer_states: {device.name} shares its memory with the CPU, so that moving states there frees none"
        )
    return suited


def allowances_of(setup: TrainingSetup, device: Device, stream_bytes: int) -> Allowances:
    """Return the allowances for a setup on a device, or on one of the several that it is for.

    Args:
        device: What the job, or one rank of it, has to fit on.
        stream_bytes: Buffers of collectives that no other stream can use.

    Raises:
        CannotAnswerError: States are to lie in host memory, which the device shares.
    """
    devices_for(setup, [device])
    alone = allowances_for(device.gpu, device.count, setup.reserve_share, setup.hardware)
    alone = alone if device.profile is None else measured_allowances(alone, device.profile, device.count)
    communicators = communicators_of(device.gpu, setup.config.parallel, setup.hardware)
    return communicating(alone, stream_bytes, communicators) if communicators else alone


def searched_allowances(
    setup: TrainingSetup, device: Device, stream_bytes: int = 0, *, least: bool = False
) -> Allowances:
    """Return the allowances of a device whatever a step takes; see :func:`with_engine`."""
    return with_engine(allowances_of(setup, device, stream_bytes), setup, device, least=least)


def with_engine(allowances: Allowances, setup: TrainingSetup, device: Device, *, least: bool = False) -> Allowances:
    """Return allowances with an engine that generates on the device.

    Args:
        allowances: Those without it.
        device: What the job has to fit on.
        least: Leave out an engine that sleeps, for who looks at its plan besides.

    Raises:
        CannotAnswerError: The engine sleeps, so that what it takes depends on the step.
    """
    engine = engine_bytes(setup, device, 0)
    if not engine or not setup.rollout.sleeps:
        return beside_engine(allowances, engine)
    if least:
        return allowances
    raise CannotAnswerError(
        "method.rollout.sleeps: what an engine that sleeps takes depends on the step, and is not searched; memplan fit plans it"
    )


def engine_bytes(setup: TrainingSetup, device: Device, step_bytes: int) -> int:
    """Return what an engine that generates on the same device takes at the peak.

    Args:
        device: What the job has to fit on.
        step_bytes: What a step takes at its peak beside what is always there.

    Formula:
        ``engine_fraction * memory``; less ``step_bytes`` where the engine sleeps, and a step has let go of these while it wakes

    Source:
        ``gpu_memory_utilization`` in vllm/config/cache.py (commit 002f10e): a share of the GPU, for each engine;
        ``VLLMGeneration`` in trl/generation/vllm_generation.py (1.16.0), lines 489 to 492 and 750: it sleeps at level 2,
        keeping nothing, and PyTorch's cache is emptied before it wakes.
    """
    if setup.config.method.rollout is None or setup.rollout.engine != "vllm":
        return 0
    share = int(device.gpu.cuda_total_bytes * setup.rollout.engine_fraction) * device.count
    return max(0, share - step_bytes) if setup.rollout.sleeps else share
