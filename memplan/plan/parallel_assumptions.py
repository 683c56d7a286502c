"""What a plan takes for granted of several GPUs: what is shared out, gathered and reduced, and in which dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.catalog.training_config import TrainingConfig
from memplan.plan.model_notes import decoded_weights_note
from memplan.step.collectives.gathered_units import divided_sent_bytes, exchanged_bytes, gathered_keys_bytes, sent_bytes
from memplan.step.divided.divided_model import divided
from memplan.step.states.parallel_shards import is_accelerated, is_coded, is_flat, is_partitioned, is_sharded, is_whole
from memplan.step.tapes.linear_forms import Part
from memplan.training.resolved import FLOAT_BYTES
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan
    from memplan.training.resolved import TrainingSetup


def parallel_assumptions(plan: MemoryPlan) -> Iterator[str]:
    """Yield what is assumed of several GPUs."""
    parallel = plan.setup.config.parallel
    ranks = parallel.gpus
    yield from _sharing(plan)
    shared = "a model" if parallel.pipeline > 1 else "matrices" if parallel.tensor > 1 else "a sequence"
    group = f"group that shares {shared}" if parallel.tensor * parallel.pipeline * parallel.context > 1 else "GPU"
    yield f"bytes are per GPU, on the fullest of {ranks}; micro_batch_size is per {group}"
    formed = sum(entry.formed_bytes * entry.tensor.count for entry in plan.states.tensors if entry.trainable)
    sent = format_bytes(sent_bytes(plan.setup, divided(plan.model, plan.setup).inventory, formed))
    when = "in the last micro-step alone" if _reduces_last(plan.setup) else "in every micro-batch"
    if parallel.data * parallel.context > 1 and parallel.pipeline == 1:
        yield f"each GPU sends {sent} in one forward and backward and receives as much; gradients are reduced {when}"
    tokens = plan.micro_batch_size * plan.sequence_length // parallel.context
    if parallel.tensor > 1 and parallel.pipeline == 1:
        sent = format_bytes(divided_sent_bytes(plan.setup, plan.model.spec, tokens))
        yield f"each GPU sends {sent} at least to those that it shares matrices with in one forward and backward"
    if parallel.context > 1:
        yield _sequences(plan)
    if parallel.expert > 1:
        yield from _experts(plan)
    stream, shards = plan.allowances.stream_bytes, _shards_apart(plan)
    apart = f"{format_bytes(stream)} of the all-gather stream's buffers may not be reusable by others"
    yield f"NCCL may take {format_bytes(plan.allowances.upper_nccl_bytes)} at the upper end{f', and {apart}' if stream else ''}"
    if is_sharded(parallel) and not (stream and plan.reserve_by_share):
        how = "counted beside the share" if plan.reserve_by_share else "simulated apart"
        yield (
            f"streams that gather and reduce have memory of their own, which is {how}; what is freed is taken to be "
            "free at once, though a block that another stream still reads is not, where GPUs fall behind"
        )
    elif shards:
        yield (
            "shards of gradients come from the memory of the reductions' stream, which serves nothing else while there is memory to "
            f"spare: nvidia-smi may then show up to {format_bytes(shards)} more, which the allocator gives back where it runs short"
        )


def _sequences(plan: MemoryPlan) -> str:
    """Return how sequences are shared."""
    parallel = plan.setup.config.parallel
    tokens = plan.micro_batch_size * plan.sequence_length
    sent = format_bytes(gathered_keys_bytes(plan.setup, plan.model.spec, tokens))
    return (
        f"parallel.context {parallel.context}: each GPU has that part of every sequence, from both of its ends "
        "(context_parallel_load_balancer headtail), and flex attention all keys and values, which each layer gathers; "
        "parallelism.spmd_backend: partial_dtensor, not torchtitan's default, spmd_types; weights and states are divided among "
        f"these GPUs too; each sends {sent} of keys, values and their gradients in one forward and backward"
    )


def _experts(plan: MemoryPlan) -> Iterator[str]:
    """Yield how experts are shared, and what a rank needs that is sent all rows that it can be sent."""
    parallel = plan.setup.config.parallel
    tokens = plan.micro_batch_size * plan.sequence_length // (parallel.tensor * parallel.context)
    sent = format_bytes(exchanged_bytes(plan.setup, plan.model.spec, tokens))
    yield (
        f"parallel.expert {parallel.expert}: torchtitan's all-to-all of rows (AllToAllTokenDispatcher), experts divided anew "
        f"among the {parallel.expert_shards} GPUs that have the same; parallelism.spmd_backend: partial_dtensor, not torchtitan's "
        f"default, spmd_types; each GPU sends {sent} of rows and their gradients in one forward and backward"
    )
    if parallel.routing == "worst":
        yield "every GPU sends all rows that it can to this one's experts"
        return
    worst = format_bytes(_flooded_bytes(plan))
    yield (
        f"rows are routed evenly, as the balancing of experts aims at; were all that can be sent to one GPU's experts, it would "
        f"need {worst} with the reserve as a share (parallel.routing: worst)"
    )


def _flooded_bytes(plan: MemoryPlan) -> int:
    """Return what the device needs where every GPU sends all rows that it can to this one's experts."""
    from memplan.plan.planner import CompiledPlan

    config = plan.setup.config
    setup = replace(plan.setup, config=replace(config, parallel=replace(config.parallel, routing="worst")))
    flooded = CompiledPlan(plan.model, setup)
    return flooded.evaluate(plan.device, plan.micro_batch_size, plan.sequence_length).device_bytes


def _shards_apart(plan: MemoryPlan) -> int:
    """Return the shards of gradients that are not there at the peak, and whose memory no other stream uses meanwhile."""
    # Source: ``foreach_reduce`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and ``_reduce_grad`` in
    # torch/distributed/fsdp/_runtime_utils.py (v2.13.0) allocate them within the stream of their reductions.
    return max(0, sum(plan.forms.unit_gradients) - plan.parts[Part.GRADIENTS])


def _reduces_last(setup: TrainingSetup) -> bool:
    """Tell whether micro-steps before the last reduce no gradients: under ZeRO 1, and as accelerate's ``no_sync`` has it."""
    parallel = setup.config.parallel
    waits = parallel.zero_stage == 1 if is_flat(parallel) else is_accelerated(setup)
    return waits and setup.config.gradient_accumulation_steps > 1


def _sharing(plan: MemoryPlan) -> Iterator[str]:
    """Yield how weights and gradients are shared out, and in which dtypes they pass between GPUs."""
    parallel = plan.setup.config.parallel
    if parallel.tensor > 1:
        between = "the sequence too between them" if parallel.sequence else "all else is whole on each"
        yield (
            f"parallel.tensor {parallel.tensor}: torch's DTensor divides heads, feed-forward parts and vocabulary, and "
            f"{between}; the loss is formed over the divided vocabulary; parallelism.spmd_backend: partial_dtensor, not "
            "torchtitan's default, spmd_types"
        )
    if parallel.pipeline > 1:
        yield (
            f"parallel.pipeline {parallel.pipeline}: torch's schedule {parallel.order}, {parallel.together} micro-batches a step, "
            f"{parallel.virtual} stage(s) a rank, layers as torchtitan divides them; for every micro-batch there is a buffer "
            "for what a stage receives and one for its gradient, from step to step; weights stay gathered and whole gradients "
            "are summed until a stage's last backward"
        )
    if is_flat(parallel) or is_partitioned(parallel):
        yield _engine(plan)
        if plan.host.tensors:
            yield (
                "DeepSpeedCPUAdam steps fp32 weights in host memory, without any of the device's; what ranks have there is of the "
                "rank that has most, and moments are not pinned"
            )
    elif is_sharded(parallel):
        yield from _units(plan)
    else:
        yield (
            f"parallel.data {parallel.data}, zero_stage 0: torch's DistributedDataParallel, everything replicated; buckets beside "
            "the gradients (gradient_as_bucket_view=False, the default)"
        )


def _engine(plan: MemoryPlan) -> str:
    """Return what each rank has under DeepSpeed."""
    config = plan.setup.config
    ranks, stage, zero = config.parallel.data, config.parallel.zero_stage, config.parallel.deepspeed
    if is_partitioned(config.parallel):
        return (
            f"parallel.data {ranks}, zero_stage {stage}: DeepSpeed 0.19.8 in its second and later steps, which gather ahead "
            f"(max_live_parameters {zero.max_live_parameters:,}, max_reuse_distance {zero.max_reuse_distance:,}); parameters of few "
            "elements stay gathered, and gradients of a rank's pieces stay throughout; memory_efficient_linear as by default"
        )
    size = zero.reduce_bucket_size
    elements = f"hidden size squared ({plan.model.spec.hidden_size**2:,})" if size == "auto" else f"{size:,}"
    return (
        f"parallel.data {ranks}, zero_stage {stage}: DeepSpeed 0.19.8, whole weights in "
        f"{config.compute_dtype}, equal pieces of fp32 weights and states; {2 if zero.overlap_comm else 1} bucket(s) of "
        f"{elements} elements; groups with and without weight decay; gradients of a rank's parameters, each of them whole"
    )


def _flat_units(config: TrainingConfig, *, coded: bool, wraps: str) -> str:
    """Return what torch's ``FullyShardedDataParallel`` shards as one, be its matrices codes or not."""
    parallel = config.parallel
    ahead = {"none": "as it is needed", "pre": "as the one before it begins", "post": "as the one before it is done"}
    several, again = parallel.replicate > 1, parallel.reshard_after_forward
    kind = "HYBRID_SHARD" if several else "FULL_SHARD"
    if not again:
        kind = "HYBRID_SHARD_ZERO2" if several else "SHARD_GRAD_OP"
    if config.adapter is not None:
        codes = f"4-bit codes are stored in {config.compute_dtype} (bnb_4bit_quant_storage), and their scales are whole on each GPU; "
        return (
            f"parallel.data {parallel.data}, zero_stage 3: torch's FullyShardedDataParallel ({kind}) as PEFT and accelerate wrap layers "
            f"and each matrix of an adapter, the rest one unit, which stays gathered; adapters are trained in fp32; {codes * coded}"
            f"in backward a unit is gathered {ahead[parallel.flat.backward_prefetch]}"
        )
    return (
        f"parallel.data {parallel.data}, zero_stage 3: torch's FullyShardedDataParallel ({kind}) as {wraps} wraps layers, the rest "
        f"one unit; each a flat tensor, gathered in {config.compute_dtype}, "
        f"{f'in backward {ahead[parallel.flat.backward_prefetch]}' if again else 'not resharded after forward'}; "
        f"gradients are put together in one tensor and reduced in {config.compute_dtype}; those of micro-steps before the last stay "
        "whole (no_sync)"
    )


def has_whole_codes(plan: MemoryPlan) -> bool:
    """Tell whether all else is sharded, and quantised weights are not."""
    parallel = plan.setup.config.parallel
    sharded = is_sharded(parallel) and parallel.engine == "torch"
    return sharded and any(is_whole(one.tensor, plan.setup) for one in plan.states.tensors)


def _units(plan: MemoryPlan) -> Iterator[str]:
    """Yield what torch's ``fully_shard`` shards as one, and in which dtypes units are gathered and reduced."""
    config = plan.setup.config
    if config.parallel.engine == "fsdp1":
        wraps = "LitGPT" if plan.setup.stack.sharded_units == "lightning" else "accelerate"
        yield _flat_units(config, coded=plan.setup.format_names["hidden_matrix"] not in FLOAT_BYTES, wraps=wraps)
        return
    units = plan.setup.stack.sharded_units
    apart = units in ("ends-apart", "accelerate") and not plan.model.spec.tie_word_embeddings
    again = ", gathered again for backward" if units in ("axolotl", "own-root", "root-again") else " stays gathered"
    bare = units == "accelerate" and config.adapter is not None  # no final norm is found in what PEFT has wrapped
    ends = (
        f"the embedding is one, {'the head' if bare else 'final norm and head'} another, which stays gathered"
        + (", as does the final norm, the root's" if bare else "")
        if apart
        else f"the root (embedding, final norm, head){again}"
    )
    parallel = config.parallel
    groups = f" in {parallel.replicate} groups that each divide everything (HSDP)" if parallel.replicate > 1 else ""
    stays = parallel.pipeline > 1 or not parallel.reshard_after_forward
    but = " but for the last" if units == "root-and-last" else ""
    retained = "not resharded after forward" if stays else f"resharded after forward{but}"
    yield (
        f"parallel.data {parallel.data}{groups}, zero_stage 3: torch's fully_shard, one unit per layer, {retained}; {ends}; "
        "shards on dimension 0, padded to be equal"
    )
    own, compute = plan.setup.format_names["hidden_matrix"], config.compute_dtype
    if own == compute and config.adapter is None:
        yield f"gathered and reduced in {own}, the weights' dtype"
    elif is_accelerated(plan.setup):
        yield f"gathered and reduced in {compute}: MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype), as accelerate has it"
    else:
        yield (
            f"gathered in {compute}, reduced in {own}: MixedPrecisionPolicy(param_dtype, reduce_dtype), as in torchtitan"
        )
    if has_whole_codes(plan):
        yield "codes of quantised weights are whole on each GPU, which accelerate does not shard; FSDP1 does (parallel.engine: fsdp1)"
    elif config.parallel.staged_codes:
        yield "codes of weights that were staged on the CPU are sharded in bytes; scales, whole on each GPU, are buffers of axolotl's parametrisation, which decodes a weight as it is asked for"
        if words := decoded_weights_note(plan):
            yield words
    elif any(is_coded(entry.tensor, plan.setup) for entry in plan.states.tensors):
        yield "codes of quantised weights are stored in bf16 and sharded; their scales are whole on each GPU"
    if _reduces_last(plan.setup):
        yield "gradients of micro-steps before the last are kept whole (no_sync)"
