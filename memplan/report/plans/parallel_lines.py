"""What a plan says of several GPUs: what passes between them, and what is taken for granted."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.plan.allowances import NCCL_SOURCE, NCCL_UPPER_BYTES
from memplan.plan.planner import Component, MemoryPlan
from memplan.step.states.parallel_shards import is_sharded, sent_bytes
from memplan.units import format_bytes

FULLY_SHARD_SOURCE = "torch/distributed/fsdp/_fully_shard (v2.13.0), traced on one rank"
REPLICATED_SOURCE = "torch/csrc/distributed/c10d/reducer.cpp (v2.13.0), traced on one rank"


def gpu_count(plan: MemoryPlan) -> int:
    """Return the GPUs that a plan is about: those of its parallel setup, or those whose memory is pooled."""
    return max(plan.device.count, plan.setup.config.parallel.data)


def communication_rows(plan: MemoryPlan) -> Iterator[Component]:
    """Yield the line of what is gathered and reduced, where there are several GPUs."""
    parallel = plan.setup.config.parallel
    if parallel.data == 1:
        return
    if is_sharded(parallel):
        formula = "weights gathered for the root and for the layer that runs or comes next, gradients being reduced"
        source = FULLY_SHARD_SOURCE
    else:
        formula, source = "buckets that gradients are reduced in: as many bytes as gradients", REPLICATED_SOURCE
    yield Component("communication", plan.communication_bytes, formula, {"N": parallel.data}, source, "exact")


def nccl_rows(plan: MemoryPlan) -> Iterator[Component]:
    """Yield the line of NCCL's own buffers, where there are several GPUs."""
    if plan.allowances.nccl_bytes:
        values = {"N": plan.setup.config.parallel.data}
        yield Component(
            "nccl_buffers", plan.allowances.nccl_bytes, "one NCCL communicator", values, NCCL_SOURCE, "stated"
        )


def parallel_assumptions(plan: MemoryPlan) -> Iterator[str]:
    """Yield what is taken for granted of several GPUs, one sentence each."""
    config = plan.setup.config
    parallel, ranks = config.parallel, config.parallel.data
    if ranks == 1:
        return
    sent = format_bytes(sent_bytes(plan.setup, plan.model.inventory, plan.states.gradient_bytes))
    if is_sharded(parallel):
        yield (
            f"parallel.data {ranks}, zero_stage 3: torch's fully_shard, one unit per layer, resharded after forward; the root "
            "(embedding, final norm, head) stays gathered; shards on dimension 0, padded to be equal"
        )
        own = plan.setup.format_names["hidden_matrix"]
        if own != config.compute_dtype:
            yield (
                f"gathered in {config.compute_dtype}, reduced in {own}: MixedPrecisionPolicy(param_dtype, reduce_dtype), as torchtitan has it"
            )
        else:
            yield f"gathered and reduced in {own}, the weights' dtype"
    else:
        yield (
            f"parallel.data {ranks}, zero_stage 0: torch's DistributedDataParallel, everything replicated; buckets beside the "
            "gradients (gradient_as_bucket_view=False, the default)"
        )
    yield f"bytes are those of one GPU of {ranks}, the fullest; each micro-batch is its own"
    yield f"each GPU sends {sent} for one forward and backward, gradients reduced every time, and receives as much"
    upper = f"NCCL may take {format_bytes(NCCL_UPPER_BYTES)} at the upper end"
    stream = plan.allowances.stream_bytes
    yield (
        f"{upper}, and the stream that gathers may keep {format_bytes(stream)} from the rest of the step"
        if stream
        else upper
    )


def parallel_not_modelled(plan: MemoryPlan) -> Iterator[str]:
    """Yield what is left out of several GPUs, one sentence each."""
    if plan.setup.config.parallel.data > 1:
        yield "other kinds of parallelism, links between nodes, and NCCL with more than one communicator"
