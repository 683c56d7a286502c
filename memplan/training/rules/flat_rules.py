"""What torch's FullyShardedDataParallel (FSDP1), and units that stay gathered, are not modelled with."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig
from memplan.model.inventory import Role
from memplan.training.rules.stack_rules import FLOATS


def flat_refusal(config: TrainingConfig, formats: Mapping[Role, str], stack: Stack) -> str:
    """Return what FullyShardedDataParallel is not modelled with, or nothing."""
    parallel = config.parallel
    if stack.sharded_units not in ("accelerate", "axolotl"):
        return f"(FullyShardedDataParallel) is modelled as accelerate runs it, not under {stack.name}; use --stack trl"
    if config.adapter is not None and (refused := _when_adapters_are_units(config, formats, stack)):
        return refused
    if not parallel.reshard_after_forward and (config.adapter is not None or config.offload.weights != "none"):
        return "as SHARD_GRAD_OP is modelled without adapters and host memory; use FULL_SHARD, or engine: torch (FSDP2)"
    if parallel.zero_stage != 3 or config.evaluation:
        return "is modelled with zero_stage 3 (FULL_SHARD, HYBRID_SHARD, SHARD_GRAD_OP) and without evaluation; use engine: torch (FSDP2)"
    return ""


def staying_refusal(config: TrainingConfig, stack: Stack) -> str:
    """Return what layers that stay gathered until their backward are not modelled with, or nothing."""
    if stack.sharded_units not in ("accelerate", "ends-apart"):
        return f"is modelled as accelerate's Trainer and torchtitan have it, not under {stack.name}; leave it out"
    if config.parallel.pipeline > 1:
        return "says nothing with a pipeline, whose units are not resharded; leave it out"
    if config.parallel.tensor > 1 or config.compile != "none":
        return "is not modelled with tensor parallelism or compiled layers; leave it out"
    if config.evaluation:
        return "is not modelled with evaluation, which leaves all layers gathered until the next step; use evaluation: false"
    return ""


def _when_adapters_are_units(config: TrainingConfig, formats: Mapping[Role, str], stack: Stack) -> str:
    """Return what FullyShardedDataParallel is not modelled with where PEFT has each matrix of an adapter wrapped, or nothing."""
    assert config.adapter is not None
    coded, compute = formats["hidden_matrix"] not in FLOATS, config.compute_dtype
    if config.adapter.kind == "dora" or stack.sharded_units != "accelerate":
        return "with adapters is modelled for lora under transformers' Trainer and TRL; use engine: torch (FSDP2)"
    if coded and formats["embedding"] != compute:
        return f"flattens no {formats['embedding']} weights beside codes that are stored in {compute}; use weights.default: {compute}"
    return ""
