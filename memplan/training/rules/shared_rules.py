"""What engines keep in host memory, and what routed experts and sequences that GPUs share are not modelled with."""

from collections.abc import Iterator

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
    said = {"pipeline": parallel.pipeline > 1, "reshard_after_forward": not parallel.reshard_after_forward}
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
