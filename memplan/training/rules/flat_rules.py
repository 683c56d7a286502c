"""What DeepSpeed's ZeRO, torch's FullyShardedDataParallel (FSDP1), units that stay gathered and shards of codes are not modelled with."""

from collections.abc import Iterator, Mapping

from memplan.catalog.config_keys.parallel_keys import FlatShards, Parallel
from memplan.catalog.entries import Optimizer
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Offload, TrainingConfig
from memplan.catalog.update_classes import TORCH_ADAMW, is_known
from memplan.model.inventory import Role
from memplan.training.rules.stack_rules import FLOATS


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


Problems = Iterator[tuple[tuple[str, ...], str]]


def shared_refusals(config: TrainingConfig, stack: Stack) -> Problems:
    """Yield what is not modelled of experts and sequences that GPUs share, each with the path of the key at fault."""
    parallel = config.parallel
    yield from _experts(config, stack)
    if parallel.expert == parallel.context == 1:
        return
    shares = "experts (parallel.expert)" if parallel.expert > 1 else "sequences (parallel.context)"
    if parallel.zero_stage != 3 or parallel.engine != "torch":
        text = f"{parallel.zero_stage} is not how {stack.name} shares {shares}, whose layers are wrapped in fully_shard; use 3, as --gpus N does"
        yield ("parallel", "zero_stage"), text
    where = f"where GPUs share {shares}"
    if parallel.pipeline > 1 and parallel.context > 1:
        yield ("parallel", "pipeline"), "it is not modelled where GPUs share sequences (parallel.context); leave it out"
    said = {"reshard_after_forward": not parallel.reshard_after_forward}
    for name in (name for name, given in said.items() if given):
        yield ("parallel", name), f"it is not modelled {where}; leave it out"
    yield from unmodelled_keys(config, where)
    if parallel.context > 1 and (attention := config.kernels.attention or stack.kernels.attention) != "flex":
        text = f"{attention} over a sequence that GPUs share is torch's ring of keys and values, which is not modelled; use flex, torchtitan's own default"
        yield ("kernels", "attention"), text


def unmodelled_keys(config: TrainingConfig, where: str) -> Problems:
    """Yield what is not modelled beside anything that GPUs share but the data."""
    said = {
        "adapter": config.adapter is not None,
        "evaluation": config.evaluation,
        "weight_average": config.weight_average != "none",
        "compile": config.compile != "none",
        "dropout": bool(config.dropout),
    }
    for name in (name for name, given in said.items() if given):
        yield (name,), f"it is not modelled {where}; leave it out"


def _experts(config: TrainingConfig, stack: Stack) -> Problems:
    """Yield what does not go with shared experts alone."""
    # Source: ``_validate_cuda_graphs`` in torchtitan/trainer.py, ``AllToAllTokenDispatcher`` in
    # models/common/token_dispatcher.py (0.3.0).
    parallel = config.parallel
    if parallel.expert_tensor not in (None, 1):
        text = f"{parallel.expert_tensor} is not how {stack.name} 0.3.0 shares experts: each of their matrices is whole on a GPU; use 1"
        yield ("parallel", "expert_tensor"), text
    if parallel.expert == 1:
        if parallel.routing != "even":
            yield (
                ("parallel", "routing"),
                f"{parallel.routing} counts where parallel.expert is more than 1; leave it out",
            )
        return
    if config.zero_gradients == "fill":
        text = f"fill, which {stack.name}'s CUDA graphs come with, does not go with experts whose rows are counted on the host; use free (training.disable_cuda_graphs)"
        yield ("zero_gradients",), text
    if parallel.tensor > 1 and not parallel.sequence:
        text = "false is not modelled where GPUs share matrices and experts; use true, torchtitan's own default"
        yield ("parallel", "sequence"), text


def flat_refusal(config: TrainingConfig, formats: Mapping[Role, str], stack: Stack) -> str:
    """Return what FullyShardedDataParallel is not modelled with, or nothing."""
    parallel = config.parallel
    if stack.sharded_units == "lightning":
        return _under_lightning(config, stack)
    if stack.sharded_units not in ("accelerate", "axolotl"):
        return f"(FullyShardedDataParallel) is modelled as accelerate runs it, not under {stack.name}; use --stack trl"
    if config.adapter is not None and (refused := _when_adapters_are_units(config, formats, stack)):
        return refused
    if not parallel.reshard_after_forward and (config.adapter is not None or config.offload.weights != "none"):
        return "as SHARD_GRAD_OP is modelled without adapters and host memory; use FULL_SHARD, or engine: torch (FSDP2)"
    if parallel.zero_stage != 3:
        return "is modelled with zero_stage 3 (FULL_SHARD, HYBRID_SHARD, SHARD_GRAD_OP); use engine: torch (FSDP2)"
    return ""


def _under_lightning(config: TrainingConfig, stack: Stack) -> str:
    """Return what LitGPT does not tell Lightning's FSDPStrategy, or nothing (``setup`` in litgpt/finetune/full.py, 0.5.13)."""
    parallel = config.parallel
    if config.adapter is not None:
        return f"wraps every linear layer where {stack.name} trains adapters, which is not modelled; use one GPU"
    if parallel.zero_stage != 3 or not parallel.reshard_after_forward or parallel.replicate > 1:
        return f"is FULL_SHARD over all GPUs where {stack.name} finetunes; use zero_stage 3 alone"
    if parallel.flat != FlatShards(backward_prefetch="pre"):
        return f"gathers as a unit begins, and leaves parameters as they were, under {stack.name}; use parallel.flat: {{backward_prefetch: pre}}"
    if config.activation_checkpointing != "full":
        return f"comes with checkpointed layers where {stack.name} finetunes; use activation_checkpointing: full"
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
    if config.adapter.kind == "dora":
        return (
            "with adapters is modelled for lora under transformers' Trainer, TRL and axolotl; use engine: torch (FSDP2)"
        )
    kernels = config.kernels.over(stack.kernels)
    if kernels.fused_adapters:
        return f"is what {stack.name}'s functions for adapters do not run with (utils/schemas/validation.py); use kernels.adapters: composite"
    if kernels.loss == "fused-linear" and formats["embedding"] != compute:
        return f"gathers {formats['embedding']} weights in {compute}, which Liger's loss casts otherwise than is modelled; use weights.default: {compute}"
    if coded and formats["embedding"] != compute:
        return f"flattens no {formats['embedding']} weights beside codes that are stored in {compute}; use weights.default: {compute}"
    return ""


def deepspeed_problems(
    config: TrainingConfig, formats: Mapping[Role, str], optimizers: Mapping[str, Optimizer]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what DeepSpeed's ZeRO is not modelled with."""
    compute, trained = str(config.compute_dtype), set(formats.values())
    if config.adapter is not None:
        trained = {str(config.adapter.dtype)} | (trained & set(FLOATS))
    if trained != {compute}:
        text = f"{', '.join(sorted(trained))} is not what DeepSpeed trains, which casts all weights, those of adapters too, to {compute}; use {compute}"
        yield ("adapter", "dtype") if config.adapter is not None else ("weights",), text
    elif config.adapter is None and compute != "fp32" and config.master_weights != "fp32":
        yield ("master_weights",), f"{config.master_weights} is not how DeepSpeed trains in {compute}; use fp32"
    if config.gradients.lifetime == "layer" or config.gradients.dtype not in (None, compute):
        yield ("gradients",), f"DeepSpeed keeps gradients in {compute} until the step; leave gradients as they are"
    if config.weight_average != "none" or config.zero_gradients == "fill":
        key = "weight_average" if config.weight_average != "none" else "zero_gradients"
        yield (key,), "not modelled under DeepSpeed"
    if config.parallel.zero_stage == 3 and set(formats.values()) - set(FLOATS):
        yield ("weights",), "quantised weights under DeepSpeed's stage 3 are not modelled; stages 1 and 2 are"
    if config.parallel.replicate > 1:
        yield (
            ("parallel", "replicate"),
            "groups that each divide everything (MiCS) are not modelled under DeepSpeed; leave it out",
        )
    if len(optimizers) > 1:
        yield ("optimizer",), "DeepSpeed steps one optimizer for all parameters"
    for name, entry in optimizers.items():
        if not steps_elementwise(entry, 4):
            yield (
                ("optimizer",),
                f"{name} is not modelled under DeepSpeed, which steps flat fp32 weights; use adamw-fp32",
            )
        elif config.offload.optimizer_states == "cpu" and entry.implementation != TORCH_ADAMW:
            text = f"{name} is not what DeepSpeed steps in host memory, where its own Adam does; use adamw-fp32"
            yield ("optimizer",), text


def steps_shards(entry: Optimizer, config: TrainingConfig, stack: Stack, profile: KernelProfile) -> bool:
    """Tell whether another optimizer than torch's steps ``fully_shard``'s shards: torchao's, or the bundled one in whatever format.

    The latter steps parts that tensor parallelism has left too.

    Source:
        ``refuse_beside_shards`` in memplan/muon/parameter_state.py; ``_AdamBase._new_buffer`` in torchao/optim/adam.py (0.13.0).
    """
    if entry.steps_shards:
        return shards_codes_of_states(config, stack)
    runs = stack.name == "bundled" or stack.model_code == "torchtitan"
    return runs and entry.bundled is not None and profile.newton_schulz != "torch"


def shards_codes_of_states(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether a job is one whose shards an optimizer with coded states may step."""
    sharded = config.parallel.engine == "torch" and stack.sharded_units in ("accelerate", "axolotl")
    return sharded and config.offload == Offload()


def steps_elementwise(entry: Optimizer, width: int) -> bool:
    """Tell whether torch's own optimizer steps shards whose elements have so many bytes."""
    slots = [slot for slot in entry.slots if slot.layout == "elementwise"]
    same = all(slot.as_parameter or (slot.block_elements == 1 and slot.block_bytes == width) for slot in slots)
    return entry.step == "torch" and is_known(entry.implementation) and same and not entry.shared_bytes


def coded_shard_problems(config: TrainingConfig, instead: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what shards of codes that are stored in bf16 are not modelled with."""
    dtype = config.compute_dtype
    if dtype != "bf16":
        text = f"{dtype} beside codes that are stored in bf16 is not modelled; use bf16, or {instead}"
        yield ("compute_dtype",), text
    if config.offload != Offload():
        yield ("offload",), f"shards of codes in host memory are not modelled; leave it out, or {instead}"
