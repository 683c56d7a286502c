"""What a plan takes for granted and what it leaves out, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memplan.catalog.training_config import Rollout, TrainingConfig
from memplan.model.inventory import parameter_count
from memplan.step.divided.divided_model import divided
from memplan.step.divided.sent_bytes import divided_sent_bytes, sent_bytes
from memplan.step.kernels.family_code import dropouts
from memplan.step.states.optimizer_scratch import most_together
from memplan.step.states.parallel_shards import (
    is_accelerated,
    is_flat,
    is_partitioned,
    is_sharded,
    is_whole,
    runs_engine,
)
from memplan.step.tensors.update_kernels import unproven_updates
from memplan.training.resolved import FLOAT_BYTES
from memplan.training.rules.image_models import WITH_IMAGES
from memplan.training.stack_models import TEXT_ALONE
from memplan.units import format_bytes, format_fraction

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan
    from memplan.training.resolved import TrainingSetup

ADAPTER_TENSORS = ("lora_A.weight", "lora_B.weight")

REFERENCES = {
    "resident": "a frozen second copy in the same formats; its forward runs before backward, beside all that forward has saved",
    "adapter-off": "the model without its adapters; its forward runs before backward, beside all that forward has saved",
    "precomputed": "none on the device; its log-probabilities have been computed before",
}
"""Kind of reference model -> what there is of it."""


LINEAR_ATTENTION = {
    "torch": "linear attention torch: transformers' own code runs gated delta networks, in fp32, as it does where "
    "flash-linear-attention and causal-conv1d are not installed; kernels.linear_attention: fla is with both, and needs less",
    "fla": "linear attention fla: flash-linear-attention and causal-conv1d are installed; what their kernels save and allocate "
    "is that of flash-linear-attention 0.6.0 and causal-conv1d 1.7.0",
}
"""Kernels of linear attention -> what is assumed to be installed."""


LINEAR_ALONE = "transformers stacks them in one tensor, and bitsandbytes quantises linear layers alone"


IN_SHORT = {
    "torch": "Linear attention by transformers' own torch code; with flash-linear-attention and causal-conv1d installed: "
    "--set kernels.linear_attention=fla.",
    "fla": "Linear attention by flash-linear-attention and causal-conv1d (kernels.linear_attention: fla).",
}
"""Kernels of linear attention -> the same in a screen that has no list of assumptions."""


def runs_text_alone(plan: MemoryPlan) -> bool:
    """Tell whether the stack leaves out the vision tower that the model was released with."""
    return any(TEXT_ALONE in note for note in plan.model.notes)


def experts_format(plan: MemoryPlan) -> str:
    """Return the format of experts that stay as they are where other matrices are codes; else nothing."""
    names = plan.setup.format_names
    stacked = any(tensor.role == "expert_matrix" for tensor in plan.model.inventory)
    apart = (
        stacked and plan.setup.stack.model_code == "transformers" and names["expert_matrix"] != names["hidden_matrix"]
    )
    return names["expert_matrix"] if apart else ""


def rows_alone(plan: MemoryPlan) -> str:
    """Return that rows hold text alone, where the model could see images; else nothing."""
    images, tower = plan.setup.config.images, plan.model.spec.tower
    if images.per_row or not (tower is not None or runs_text_alone(plan)):
        return ""
    given = "" if images.pixels is None else f", here of up to {images.pixels:,} pixels each,"
    counted = tower is not None and tower.shape is not None and plan.setup.stack.name in WITH_IMAGES
    how = "; images.per_row and images.pixels count them" if counted else ""
    return f"Rows hold text alone: rows with images{given} need more{how}."


def in_short(plans: Sequence[MemoryPlan]) -> tuple[str, ...]:
    """Return what plans take for granted of their model, in a sentence or two; nothing for a text model of attention alone."""
    alone = dict.fromkeys(plan.setup.stack.label for plan in plans if runs_text_alone(plan))
    kernels = [plan.setup.profile.linear_attention for plan in plans if plan.model.spec.linear_attention]
    return (
        *dict.fromkeys(filter(None, map(rows_alone, plans))),
        *(f"{label} {TEXT_ALONE}." for label in alone),
        *(IN_SHORT[kernel] for kernel in dict.fromkeys(kernels)),
        *(f"Experts stay in {name}: {LINEAR_ALONE}." for name in dict.fromkeys(map(experts_format, plans)) if name),
    )


def assumptions(plan: MemoryPlan) -> tuple[str, ...]:
    """Return what the answer takes for granted."""
    return (*_step(plan), *_states(plan), *_parallel(plan), *_model(plan))


def not_modelled(plan: MemoryPlan) -> tuple[str, ...]:
    """Return what the answer leaves out."""
    return tuple(_left_out(plan))


def _step(plan: MemoryPlan) -> Iterator[str]:
    """Yield what is assumed of every step."""
    config, profile, allowances = plan.setup.config, plan.setup.profile, plan.allowances
    yield (
        f"kernels ({plan.setup.stack.name}): attention {profile.attention}, norm {profile.norm}, rotary {profile.rotary}, "
        f"activation {profile.activation}, optimizer {profile.optimizer}, newton_schulz {profile.newton_schulz}, loss {profile.loss}"
    )
    if profile.muon_batch_bytes:
        yield _batches(plan)
    yield from _method(plan)
    if words := config.freeze.words:
        trained = parameter_count(tensor for tensor in plan.model.inventory if not tensor.frozen)
        yield f"frozen but for {words}: {trained:,} of {parameter_count(plan.model.inventory):,} parameters train"
    if plan.model.spec.linear_attention:
        yield LINEAR_ATTENTION[profile.linear_attention]
    yield from plan.setup.card_notes
    if config.compile != "none":
        yield (
            f"compile {config.compile}: buffers are those of the programs that torch 2.13.0's compiler writes for a Hopper card with "
            "its defaults, read without a GPU and measured on none; the upper end has a padded copy of the logits where their width "
            "is no multiple of 8, which the compiler decides by a timing"
        )
    yield "a steady-state step: optimizer states exist, every sequence has the full length"
    if not plan.reserve_by_share:
        yield (
            f"allocator: {config.allocator}, simulated from the first weight through three steps; what remains in the interval "
            "is the device context, the addresses that the driver chooses, and how far the allocator releases its cache"
        )
        return
    expected, upper = (
        format_fraction(share * 100) for share in (allowances.reserve_fraction, allowances.upper_reserve_fraction)
    )
    yield (
        f"allocator: {config.allocator}; a reserve of {expected} % of the allocated bytes, the smallest with which a step "
        f"still runs; {upper} % at the upper end; not simulated: {plan.reserve_by_share}"
    )


def _batches(plan: MemoryPlan) -> str:
    """Return what ``kernels.muon_batch_bytes`` does."""
    budget = format_bytes(plan.setup.profile.muon_batch_bytes)
    most = most_together(plan.setup, plan.states.tensors)
    if most == 1:
        return f"kernels.muon_batch_bytes {budget}: Muon updates no two matrices of this job together, and it changes nothing"
    return f"Muon updates up to {most} matrices of one shape together, in up to {budget} of scratch"


def _method(plan: MemoryPlan) -> Iterator[str]:
    """Yield what a step on preferences has beside the model."""
    method, rows = plan.setup.config.method, plan.setup.rows_per_sample
    if method.stage == "sft":
        return
    pairs = f", {rows} rows for each pair: chosen and rejected" if rows > 1 else ""
    if method.rollout is None:
        tokens = "rows are full" if method.stage == "classification" else "every token of a row is one of the answer"
        yield f"method {method.stage}{pairs}; {tokens}"
    else:
        yield from _rollout(plan, method.rollout)
    if plan.setup.scores:
        count = plan.setup.score_count
        scores = "one number" if count == 1 else f"{count} scores"
        yield f"the head yields {scores} for each token in place of logits, and is trained"
    if method.reference_model != "none":
        yield f"reference model: {REFERENCES[str(method.reference_model)]}"


ENGINES = {
    "transformers": "the model itself generates, with a cache of keys and values",
    "vllm": "vLLM generates on the same GPU and takes a stated share of it",
    "server": "a server generates, on other GPUs",
}


def _rollout(plan: MemoryPlan, rollout: Rollout) -> Iterator[str]:
    """Yield what is generated, together, and by what."""
    setup, prompt = plan.setup, plan.sequence_length - rollout.completion_length
    rows = plan.micro_batch_size * setup.generated_micro_batches
    yield (
        f"method {setup.config.method.stage}: {rows} completions of {rollout.completion_length:,} tokens are generated "
        f"together, each behind a prompt of {prompt:,}; none ends earlier"
    )
    asleep = ", and sleeps while a step runs" if rollout.sleeps and rollout.engine == "vllm" else ""
    yield f"generation: {ENGINES[rollout.engine]}{asleep}; rewards are computed elsewhere"


def _states(plan: MemoryPlan) -> Iterator[str]:
    """Yield which weights stay as they are, where optimizer states in host memory lie, and who steps them."""
    if experts := experts_format(plan):
        yield f"experts stay in {experts}: {LINEAR_ALONE}"
    if plan.setup.offloads_states:
        yield (
            f"optimizer states: {plan.host_bytes:,} B of pinned host memory; the bundled optimizer steps, tensor by tensor, "
            "and two chunks of a tensor's states at a time are on the device; torch rounds each pinned tensor up to a "
            "power of two, so the host may need up to twice as much (https://github.com/pytorch/pytorch/issues/150517)"
        )
    if plan.host.tensors:
        yield (
            f"host memory: {plan.host.taken_bytes:,} B for each rank ({plan.host.words()}), pinned tensors rounded up to "
            f"powers of two as torch does, and {plan.node_host_bytes:,} B on a node of {plan.node_ranks}; what every process takes for "
            "itself, and a checkpoint that is loaded or saved, come on top"
        )


def _parallel(plan: MemoryPlan) -> Iterator[str]:
    """Yield what is assumed of several GPUs."""
    parallel = plan.setup.config.parallel
    ranks = parallel.gpus
    if ranks == 1:
        return
    yield from _sharing(plan)
    shared = "a model" if parallel.pipeline > 1 else "matrices"
    group = f"group that shares {shared}" if parallel.tensor > 1 or parallel.pipeline > 1 else "GPU"
    yield f"bytes are per GPU, on the fullest of {ranks}; micro_batch_size is per {group}"
    formed = sum(entry.formed_bytes * entry.tensor.count for entry in plan.states.tensors if entry.trainable)
    sent = format_bytes(sent_bytes(plan.setup, divided(plan.model, plan.setup).inventory, formed))
    when = "in the last micro-step alone" if _reduces_last(plan.setup) else "in every micro-batch"
    if parallel.data > 1 and parallel.pipeline == 1:
        yield f"each GPU sends {sent} in one forward and backward and receives as much; gradients are reduced {when}"
    if parallel.tensor > 1 and parallel.pipeline == 1:
        tokens = plan.micro_batch_size * plan.sequence_length
        sent = format_bytes(divided_sent_bytes(plan.setup, plan.model.spec, tokens))
        yield f"each GPU sends {sent} at least to those that it shares matrices with in one forward and backward"
    stream = plan.allowances.stream_bytes
    keeps = (
        f", and {format_bytes(stream)} of the all-gather stream's buffers may not be reusable by others"
        if stream
        else ""
    )
    yield f"NCCL may take {format_bytes(plan.allowances.upper_nccl_bytes)} at the upper end{keeps}"


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


def _flat_units(config: TrainingConfig, *, coded: bool) -> str:
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
        f"parallel.data {parallel.data}, zero_stage 3: torch's FullyShardedDataParallel ({kind}) as accelerate wraps layers, the rest "
        f"one unit; each a flat tensor, gathered in {config.compute_dtype}, "
        f"{f'in backward {ahead[parallel.flat.backward_prefetch]}' if again else 'not resharded after forward'}; "
        f"gradients are put together in one tensor and reduced in {config.compute_dtype}; those of micro-steps before the last stay "
        "whole (no_sync)"
    )


def _units(plan: MemoryPlan) -> Iterator[str]:
    """Yield what torch's ``fully_shard`` shards as one, and in which dtypes units are gathered and reduced."""
    config = plan.setup.config
    if config.parallel.engine == "fsdp1":
        yield _flat_units(config, coded=plan.setup.format_names["hidden_matrix"] not in FLOAT_BYTES)
        return
    units = plan.setup.stack.sharded_units
    apart = units in ("ends-apart", "accelerate") and not plan.model.spec.tie_word_embeddings
    again = ", gathered again for backward" if units in ("axolotl", "own-root") else " stays gathered"
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
    kept = "not resharded after forward" if stays else "resharded after forward"
    yield (
        f"parallel.data {parallel.data}{groups}, zero_stage 3: torch's fully_shard, one unit per layer, {kept}; {ends}; "
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
    if any(is_whole(entry.tensor, plan.setup) for entry in plan.states.tensors):
        yield "codes of quantised weights are whole on each GPU, which accelerate does not shard"
    if _reduces_last(plan.setup):
        yield "gradients of micro-steps before the last are kept whole (no_sync)"


def _model(plan: MemoryPlan) -> Iterator[str]:
    """Yield what is assumed of the model, and of the device that it is put on."""
    config, spec = plan.setup.config, plan.model.spec
    residual, attention = dropouts(spec, plan.setup)
    if (residual or attention) and config.dropout is None:
        within = "" if attention == residual else f", {attention} of attention's weights"
        kept = ", which the trainer cannot switch off" if plan.setup.disables_dropout else ""
        yield f"dropout {residual}{within}, the model's own{kept}"
    roles = _roles_without_blocks(plan)
    if roles:
        yield f"{', '.join(sorted(roles))}: tensors whose rows do not divide into blocks stay in {config.compute_dtype}"
    if plan.device.count > 1:
        yield "memory of several devices is pooled: everything sharded evenly, nothing replicated, no communication buffers"
    if 0 < spec.learned_positions == plan.sequence_length:
        yield f"sequence length {plan.sequence_length}: all of the model's learned positions"
    elif 0 < spec.max_position_embeddings < plan.sequence_length:
        yield f"sequence length {plan.sequence_length} is beyond the model's max_position_embeddings of {spec.max_position_embeddings}"
    if plan.device.gpu.unified_memory:
        yield "unified memory: the operating system and other programs take their share of it too"
    if plan.model.quantization:
        yield f"released in {plan.model.quantization}; planned in the config's own weight formats"
    yield from plan.model.notes


def _roles_without_blocks(plan: MemoryPlan) -> set[str]:
    """Return the roles of base tensors that are not stored in their role's format."""
    return {
        entry.tensor.role
        for entry in plan.states.tensors
        if entry.format_name != plan.setup.format_names[entry.tensor.role]
        and not entry.tensor.name.endswith(ADAPTER_TENSORS)
    }


def _left_out(plan: MemoryPlan) -> Iterator[str]:
    family = plan.model.spec.architecture
    if family in plan.setup.family_gaps:
        yield f"{family} in transformers: {plan.setup.family_gaps[family].text}"
    yield "memory of other processes and of the desktop (set reserve for it)"
    yield "scratch of the sort in the embedding's backward"
    yield from unproven_updates((e.optimizer_name, e.optimizer, e.stepper) for e in plan.states.tensors)
    parallel = plan.setup.config.parallel
    if parallel.gpus > 1:
        more = "more communicators than one for each group" if parallel.tensor > 1 else "more than one communicator"
        yield f"other kinds of parallelism, links between nodes, and NCCL with {more}"
    if parallel.pipeline > 1:
        yield "what is being sent to the next stage and is kept until it has arrived, where the schedule has let go of it"
    if parallel.engine == "fsdp1":
        yield "blocks that FullyShardedDataParallel's streams still use when they are let go of (record_stream), which come back later"
    stack = plan.setup.stack
    if runs_engine(plan.setup.config.parallel) and stack.name not in ("transformers", "trl"):
        yield f"what {stack.name}'s own loop does around DeepSpeed: its engine was held against transformers' Trainer and TRL's"
    if is_sharded(plan.setup.config.parallel) and not stack.own_models and stack.sharded_units == "root":
        yield f"how {stack.name} itself divides a model: these units of fully_shard were not held against its own code"
