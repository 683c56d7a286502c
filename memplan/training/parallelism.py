"""What several GPUs can be planned for, and why the rest is refused."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from memplan.catalog.config_keys.parallel_keys import MAXIMUM_GPUS, DeepSpeed, FlatShards, Parallel, Schedule
from memplan.catalog.entries import Optimizer
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Adapter, Offload, TrainingConfig
from memplan.model.inventory import Role
from memplan.training.resolved import FLOAT_BYTES
from memplan.training.rules.flat_rules import (
    coded_shard_problems,
    deepspeed_problems,
    flat_refusal,
    offload_refusal,
    shards_codes_of_states,
    shared_refusals,
    staying_refusal,
    steps_beside,
    steps_elementwise,
    steps_shards,
    unmodelled_keys,
)
from memplan.training.rules.image_rules import out_of_range

POSSIBLE = "planned is data parallelism with zero_stage 3 (torch's fully_shard), 1 to 3 (parallel.engine: deepspeed) or 0 (DistributedDataParallel), tensor, context and expert parallelism and pipelines with --stack torchtitan, and a divided model with --stack megatron"
INSTEAD = "use parallel.zero_stage: 0, with data parallelism alone"
MAXIMUM_ELEMENTS = 2**50

OTHER_KEYS = (
    "data",
    "zero_stage",
    "engine",
    "unused_parameters",
    "deepspeed",
    "flat",
    "reshard_after_forward",
    "staged_codes",
    "tower_blocks",
    "shared_muon",
)
"""Keys of ``parallel`` that are no degree by which a model is divided."""

Path = tuple[str, ...]
Problems = Iterator[tuple[Path, str]]

_BY_ACCELERATE = ("bf16", "fp32", "fused-linear", "fused-head")
_LOSSES = {
    "accelerate": _BY_ACCELERATE,
    "axolotl": (*_BY_ACCELERATE, "cut-cross-entropy"),
    "own-root": ("weighted-tokens",),
    "root-again": ("fp32", "chunked-logits"),
    "lightning": ("fp32-pieces",),
    "ends-apart": ("bf16", "fp32", "chunked-backward"),
}
"""Units of a stack -> losses that were followed over them; bf16 and fp32 over others."""
_DEGREES = ("data", "tensor", "pipeline", "context", "expert", "replicate", "virtual", "expert_tensor")
_AUTO = ("reduce_bucket_size", "persistence_threshold", "prefetch_bucket_size")
_ELEMENTS = (
    ("reduce_bucket_size", 1), ("persistence_threshold", 0), ("sub_group_size", 0), ("prefetch_bucket_size", 0),
    ("max_live_parameters", 0), ("max_reuse_distance", 0),
)  # fmt: skip
"""Sizes that DeepSpeed is told in elements, and the least of each."""
PROVEN: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved")
"""Schedules of pipelines that are planned."""
_STAGES = ("first_stage_layers", "last_stage_layers", "vocabulary_multiple")


def divides_model(parallel: Parallel) -> bool:
    """Tell whether the model itself is divided, and not only what data parallel GPUs share."""
    rest = replace(
        parallel,
        data=1,
        zero_stage=0,
        replicate=1,
        engine="torch",
        deepspeed=DeepSpeed(),
        flat=FlatShards(),
        reshard_after_forward=True,
        staged_codes=False,
        tower_blocks=None,
    )
    return rest != Parallel()


def parallel_problems(parallel: Parallel) -> Problems:
    """Yield impossible degrees, each with its path of keys."""
    from_none = ("stage", "first_stage_less_layers", "last_stage_less_layers")
    yield from out_of_range(parallel, ("parallel",), from_none, MAXIMUM_GPUS, 0)
    yield from out_of_range(parallel, ("parallel",), ("micro_batches", *_DEGREES, *_STAGES), MAXIMUM_GPUS)
    told, path = parallel.megatron, ("parallel", "megatron")
    yield from out_of_range(told, path, ("predicted_tokens",), MAXIMUM_GPUS, 0)
    yield from out_of_range(told, path, ("micro_batch_group", "bucket_elements", "buckets"), MAXIMUM_ELEMENTS)
    for name, least in _ELEMENTS:
        size = getattr(parallel.deepspeed, name)
        if size != "auto" and not least <= size <= MAXIMUM_ELEMENTS:
            auto = "auto or " if name in _AUTO else ""
            sign = "a positive number of" if least else "0 or more"
            yield ("parallel", "deepspeed", name), f"expected {auto}{sign} elements, got {size}"
    if parallel.engine != "fsdp1" and parallel.flat != FlatShards():
        yield ("parallel", "flat"), f"counts with parallel.engine: fsdp1 alone, not with {parallel.engine}"
    if parallel.engine == "deepspeed" and not parallel.reshard_after_forward:
        yield ("parallel", "reshard_after_forward"), "false counts with torch's shards alone, not with deepspeed"
    if parallel.engine != "deepspeed" and parallel.deepspeed != DeepSpeed():
        yield ("parallel", "deepspeed"), f"counts with parallel.engine: deepspeed alone, not with {parallel.engine}"
    if parallel.gpus == 1 < parallel.replicate:
        text = f"{parallel.replicate} groups do not share one GPU; --gpus N, or parallel.data, says how many form the groups"
        yield ("parallel", "replicate"), text
    elif parallel.data > 1 and parallel.replicate > 0 and parallel.data % parallel.replicate:
        near = min(
            (n for n in range(1, parallel.data + 1) if not parallel.data % n), key=lambda n: abs(n - parallel.replicate)
        )
        text = f"{parallel.data} data parallel GPUs do not form {parallel.replicate} groups of equal size; the nearest that they form: {near}"
        yield ("parallel", "replicate"), text
    if parallel.pipeline > 1 and parallel.stage is not None and parallel.stage >= parallel.pipeline:
        yield ("parallel", "stage"), f"expected a rank from 0 to {parallel.pipeline - 1}, got {parallel.stage}"
    if not 0 <= parallel.zero_stage <= 3:
        yield ("parallel", "zero_stage"), f"expected 0, 1, 2 or 3, got {parallel.zero_stage}"


def parallel_refusals(
    config: TrainingConfig,
    profile: KernelProfile,
    formats: Mapping[Role, str],
    optimizers: Mapping[str, Optimizer],
    stack: Stack,
    whole: Collection[str] = (),
) -> Problems:
    """Yield what is not modelled of a config on several GPUs, each with the path of the key at fault.

    Args:
        formats: Weight format of each role, by name.
        optimizers: Catalog entries of the optimizers in use, by name.
        whole: Weight formats that accelerate leaves whole on every rank.
    """
    parallel = config.parallel
    yield from _undivided(config, stack)
    yield from _misplaced(parallel, stack)
    yield from _pipeline_problems(parallel, stack)
    if config.offload != Offload() and parallel.gpus > 1 and not steps_beside(parallel):
        yield ("offload",), "replicas that keep anything in host memory are not modelled; use parallel.zero_stage: 3"
    elif config.offload != Offload() and (unmodelled := offload_refusal(config, stack))[0]:
        yield ("offload", unmodelled[0]), unmodelled[1]
    if parallel.engine == "deepspeed" and not parallel.zero_stage:
        text = (
            "0 is not supported under DeepSpeed, whose own optimizer then keeps fp32 copies of all bf16 weights "
            "(FP16_UnfusedOptimizer in 0.19.8); use stage 1 or 2, or parallel.engine: torch for DistributedDataParallel"
        )
        yield ("parallel", "zero_stage"), text
    elif parallel.engine == "deepspeed" and stack.model_code != "transformers":
        text = f"deepspeed is modelled as transformers' Trainer and what is built on it run it, not under {stack.name}; use --stack trl"
        yield ("parallel", "engine"), text
    elif parallel.engine == "deepspeed":
        yield from deepspeed_problems(config, formats, optimizers)
    elif parallel.engine == "fsdp1" and parallel.gpus > 1 and (refused := flat_refusal(config, formats, stack)):
        yield ("parallel", "engine"), f"fsdp1 {refused}"
    elif parallel.zero_stage == 2 or (parallel.zero_stage == 1 and not stack.shares_states):
        yield ("parallel", "zero_stage"), f"{parallel.zero_stage} is not supported; {POSSIBLE}"
    elif parallel.zero_stage == 3 and parallel.gpus == 1:
        text = "3 is not supported with one GPU, which has nothing to share; --gpus N, or parallel.data, says of how many it is one"
        yield ("parallel", "zero_stage"), text
    elif parallel.gpus > 1:
        yield from _when_divided(config, profile, stack)
        yield from _when_parallel(config, formats)
        yield from _when_grouped(parallel)
        yield from _when_replicas(parallel, stack)
        if parallel.zero_stage == 3:
            yield from _when_sharded(config, profile, formats, optimizers, stack, whole)
            if not parallel.reshard_after_forward and (refused := staying_refusal(config, stack)):
                yield ("parallel", "reshard_after_forward"), f"false {refused}"


def _undivided(config: TrainingConfig, stack: Stack) -> Problems:
    """Yield degrees by which a stack does not divide a model as it is modelled, and what does not go with those of experts."""
    parallel = config.parallel
    yield from shared_refusals(config, stack) if "routing" in stack.divides else ()
    alone = f"memplan fit alone plans it under {stack.name}" if stack.own_models and stack.not_modelled else POSSIBLE
    for name in Parallel.__dataclass_fields__:
        given, own = getattr(parallel, name), getattr(Parallel(), name)
        usual = (own, parallel.tensor) if name == "expert_tensor" else (own,)
        if name not in (*OTHER_KEYS, *stack.divides) and given not in usual:
            other = f"{str(given).lower():.60} is not supported: {name} parallelism"
            what = "what Megatron-LM alone is told" if name == "megatron" else other
            yield ("parallel", name), f"{what} is not modelled here; {alone}"


def _misplaced(parallel: Parallel, stack: Stack) -> Problems:
    """Yield keys that count with other stacks, or with another sharding, alone."""
    sharded = parallel.zero_stage == 3 and parallel.engine == "torch"
    if parallel.staged_codes and not (sharded and stack.stages_codes):
        text = "counts where axolotl's own code, newer than 0.19, shards weights (stack: axolotl, parallel.zero_stage: 3) alone; leave it out"
        yield ("parallel", "staged_codes"), text
    if parallel.unused_parameters is not None and parallel.gpus > 1 and stack.unused_parameters == "never":
        text = f"{stack.name}'s replicas are not told what to look for, transformers' Trainer's are; leave it out"
        yield ("parallel", "unused_parameters"), text
    if parallel.shared_muon and (parallel.zero_stage or not 1 < parallel.data == parallel.gpus):
        yield ("parallel", "shared_muon"), "true is for GPUs that all have the weights (zero_stage: 0); leave it out"


def _pipeline_problems(parallel: Parallel, stack: Stack) -> Problems:
    """Yield keys of pipelines, and of shared sequences, that say nothing without one, or that contradict each other."""
    if parallel.sequence and parallel.tensor == 1 and "sequence" in stack.divides:
        yield ("parallel", "sequence"), "true counts where parallel.tensor is more than 1"
    several = parallel.pipeline > 1
    for name in ("virtual", "schedule", "micro_batches", "stage", "first_stage_less_layers", "last_stage_less_layers"):
        if not several and getattr(parallel, name) != getattr(Parallel(), name):
            yield ("parallel", name), "it counts where parallel.pipeline is more than 1"
    if several and parallel.replicate > 1:
        yield ("parallel", "replicate"), f"{parallel.replicate} with a pipeline is not modelled; use 1"
    if several and parallel.order not in PROVEN:
        text = f"{parallel.order} is not modelled yet: what its backward in two parts holds between them; {', '.join(PROVEN)} are"
        yield ("parallel", "schedule"), text


def _when_grouped(parallel: Parallel) -> Problems:
    """Yield groups that have nothing to divide."""
    path, groups = ("parallel", "replicate"), parallel.replicate
    if groups > 1 and parallel.zero_stage != 3:
        yield path, f"{groups} groups that each divide everything take zero_stage 3; leave it out"
    elif groups > 1 and parallel.shards == 1:
        text = "which has nothing to divide; use fewer, or parallel.zero_stage: 0"
        yield path, f"{groups} groups leave one GPU for each, {text}"


def _when_divided(config: TrainingConfig, profile: KernelProfile, stack: Stack) -> Problems:
    """Yield what GPUs that share each layer's matrices are not modelled with."""
    parallel = config.parallel
    if parallel.tensor == parallel.pipeline == 1:
        return
    if parallel.pipeline > 1 and config.gradient_accumulation_steps > 1:
        text = f"{config.gradient_accumulation_steps} is not modelled with a pipeline, whose micro-batches parallel.micro_batches counts; use 1"
        yield ("gradient_accumulation_steps",), text
    if parallel.zero_stage != 3:
        text = f"{parallel.zero_stage} is not how {stack.name} divides a model, whose parts it wraps in fully_shard on every rank; use 3, as --gpus N does"
        yield ("parallel", "zero_stage"), text
    if profile.loss not in ("fp32", "chunked-backward"):
        yield (
            ("kernels", "loss"),
            f"{profile.loss} over a divided vocabulary is not modelled; use fp32 or chunked-backward",
        )
    yield from unmodelled_keys(config, "where the model is divided")


def _when_parallel(config: TrainingConfig, formats: Mapping[Role, str]) -> Problems:
    """Yield what neither kind of data parallelism is modelled with."""
    trained = formats["hidden_matrix"] if config.adapter is None else config.adapter.dtype
    coded = sorted(set(formats.values()) - FLOAT_BYTES.keys())
    if coded and config.adapter is None:
        text = f"{', '.join(coded)} cannot be trained on several GPUs: gradients of codes are not reduced; use bf16 or fp32, or an adapter"
        yield ("weights",), text
    if config.gradients.lifetime == "layer":
        text = "layer is not supported on several GPUs, whose gradients wait to be reduced; use step"
        yield ("gradients", "lifetime"), text
    if config.gradients.dtype not in (None, trained):
        text = f"{config.gradients.dtype} is not supported on several GPUs, which reduce gradients in {trained}, the weights' dtype"
        yield ("gradients", "dtype"), text


def _when_replicas(parallel: Parallel, stack: Stack) -> Problems:
    """Yield that a stack has no replicas, where they are asked for."""
    if stack.shards_alone and parallel.zero_stage == 0 and parallel.tensor * parallel.pipeline == 1:
        text = (
            f"0 is not modelled for {stack.label}, which wraps replicas in fully_shard too, over groups of one, and not in "
            "DistributedDataParallel; use 3, as --gpus N does"
        )
        yield ("parallel", "zero_stage"), text


def _when_sharded(
    config: TrainingConfig,
    profile: KernelProfile,
    formats: Mapping[Role, str],
    optimizers: Mapping[str, Optimizer],
    stack: Stack,
    whole: Collection[str],
) -> Problems:
    """Yield what sharding is not modelled with."""
    weights = formats["hidden_matrix"]
    alone = stack.shards_alone or stack.model_code == "litgpt"  # neither of which runs replicas
    instead = "use one GPU" if alone else INSTEAD
    if stack.sharded_units == "lightning" and config.parallel.engine == "torch":
        text = f"torch is not what {stack.name} shards by; use fsdp1, with parallel.flat: {{backward_prefetch: pre}}"
        yield ("parallel", "engine"), text
    coded = sorted(set(formats.values()) - FLOAT_BYTES.keys())
    if coded and not (stack.sharded_units in ("accelerate", "axolotl") and set(coded).issubset(whole)):
        yield ("weights",), f"{', '.join(coded)} cannot be sharded: shards of codes are not modelled; {instead}"
    elif coded and stack.sharded_units == "axolotl" and config.parallel.engine == "torch":
        yield from coded_shard_problems(config, INSTEAD)
    if config.parallel.staged_codes:
        yield from _when_staged(config, coded)
    if len(set(formats.values())) > 1 and config.adapter is None:
        yield ("weights",), "zero_stage 3 needs one format for all weights: the tensors of a unit are reduced together"
    if config.master_weights != "none":
        text = "a second copy is not needed with zero_stage 3: shards in fp32 are gathered in the compute dtype; use weights: fp32 and compute_dtype: bf16"
        yield ("master_weights",), text
    if config.adapter is not None:
        yield from _when_adapters_are_sharded(config.adapter, profile, stack, instead)
    if not config.parallel.reshard_after_forward and stack.sharded_units in ("own-root", "root-again"):
        text = f"false is not modelled for {stack.name}; leave it out, or {instead}"
        yield ("parallel", "reshard_after_forward"), text
    if config.weight_average != "none":
        yield ("weight_average",), f"an average of shards is not modelled; {instead}"
    if config.loss_scaling or (config.compute_dtype == "fp16" and config.autocast is not False):
        yield ("compute_dtype",), f"fp16 is not supported with zero_stage 3; use bf16, or {instead}"
    if profile.loss not in _LOSSES.get(stack.sharded_units, ("bf16", "fp32")):
        text = f"{profile.loss} is not supported with zero_stage 3 by stack {stack.name}, where the head would be a unit of its own; {'' if alone else 'use bf16 or fp32, or '}{instead}"
        yield ("kernels", "loss"), text
    trained, what = (weights, "weights") if config.adapter is None else (config.adapter.dtype or "", "adapters")
    torchao = ", adamw-8bit-torchao" if shards_codes_of_states(config, stack) else ""
    for name, entry in optimizers.items():
        if not (steps_elementwise(entry, FLOAT_BYTES.get(trained, 0)) or steps_shards(entry, config, stack, profile)):
            text = f"{name} is not supported with zero_stage 3 for {trained} {what}: torch's own AdamW and SGD are, with states in their dtype; use adamw-{trained}{torchao}, or {instead}"
            yield ("optimizer",), text
        elif entry.orthogonalises and config.parallel.pipeline * config.parallel.expert > 1:
            text = (
                f"{name} is not modelled with a pipeline, or where GPUs share experts; use adamw-{weights}, or neither"
            )
            yield ("optimizer",), text


def _when_adapters_are_sharded(adapter: Adapter, profile: KernelProfile, stack: Stack, instead: str) -> Problems:
    """Yield what adapters beside shards are not modelled with."""
    if stack.sharded_units == "accelerate" and profile.loss == "fused-linear":
        text = f"fused-linear with adapters and zero_stage 3 is not modelled: nobody gathers the head alone; use bf16 or fp32, or {instead}"
        yield ("kernels", "loss"), text
    if stack.sharded_units == "own-root":
        text = f"adapters with zero_stage 3 are not modelled for {stack.name}, whose FSDP2 engine makes each of their matrices a unit; {instead}"
        yield ("adapter",), text
    if stack.own_models:
        yield ("adapter",), f"adapters are not supported with zero_stage 3 by stack {stack.name}; {instead}"
    if adapter.modules_to_save:
        yield ("adapter", "modules_to_save"), f"copies of modules are not supported with zero_stage 3; {instead}"


def _when_staged(config: TrainingConfig, coded: Collection[str]) -> Problems:
    """Yield what codes that were staged on the CPU do not run with, or are not modelled with."""
    # Source: ``STAGED_NF4_CONSTRAINTS`` in axolotl/utils/schemas/validation.py (0.21.0).
    adapter, at = config.adapter, ("parallel", "staged_codes")
    if not coded or adapter is None:
        yield at, "counts with weights in nf4 and adapters alone; leave it out"
    elif adapter.kind == "dora":
        yield at, "axolotl refuses dora over weights that were staged on the CPU; use adapter.kind: lora"
    if config.parallel.replicate > 1:
        yield at, "axolotl refuses groups of GPUs that each divide everything with it; use parallel.replicate: 1"
    if config.activation_checkpointing == "selective":
        yield at, "selective checkpointing around a checkpoint of each projection is not modelled; use full or none"
