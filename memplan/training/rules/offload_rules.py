"""What engines of several GPUs keep in host memory, and what of that is not modelled."""

from __future__ import annotations

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig


def steps_beside(parallel: Parallel) -> bool:
    """Tell whether an engine of several GPUs steps: one that keeps states in host memory steps there."""
    return parallel.zero_stage > 0 and (parallel.gpus > 1 or parallel.engine == "deepspeed")


def offload_refusal(config: TrainingConfig, stack: Stack) -> tuple[str, str]:
    """Return the key that cannot be, and why, where an engine of several GPUs is to keep tensors in host memory; else nothing."""
    offload, parallel = config.offload, config.parallel
    if parallel.engine == "deepspeed":
        return _engine_refusal(config)
    if offload.weights != offload.optimizer_states:
        other = "weights" if offload.weights == "none" else "optimizer_states"
        return (
            other,
            f"{getattr(offload, other)} is not how shards are offloaded: weights, gradients and states go together; set both to cpu",
        )
    if stack.sharded_units not in ("accelerate", "axolotl"):
        return (
            "weights",
            f"shards in host memory are modelled as accelerate keeps them there, not under {stack.name}; use --stack trl",
        )
    if parallel.tensor > 1 or parallel.pipeline > 1:
        return "weights", "shards of a divided model in host memory are not modelled; leave it out"
    if config.method.reference_model == "resident":
        return (
            "weights",
            "a reference model beside shards in host memory is not modelled; use method.reference_model: adapter-off or precomputed",
        )
    return "", ""


def _engine_refusal(config: TrainingConfig) -> tuple[str, str]:
    """Return the key that cannot be, and why, where DeepSpeed is to keep tensors in host memory; else nothing."""
    offload = config.offload
    if offload.optimizer_states != "cpu":
        return (
            "optimizer_states",
            f"{offload.optimizer_states} beside weights in host memory is not modelled under DeepSpeed; use cpu",
        )
    if offload.weights != "none" and config.parallel.zero_stage != 3:
        return "weights", f"{offload.weights} counts with DeepSpeed's stage 3 alone; leave it out"
    return "", ""
