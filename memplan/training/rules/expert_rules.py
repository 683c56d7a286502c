"""What routed experts that GPUs share are not modelled with."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig


def expert_refusals(config: TrainingConfig, stack: Stack) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what is not modelled of experts that GPUs share, each with the path of the key at fault.

    Source:
        ``_validate_cuda_graphs`` in torchtitan/trainer.py, ``AllToAllTokenDispatcher`` in models/common/token_dispatcher.py (0.3.0).
    """
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
    if parallel.zero_stage != 3 or parallel.engine != "torch":
        text = f"{parallel.zero_stage} is not how {stack.name} shares experts, whose layers are wrapped in fully_shard; use 3, as --gpus N does"
        yield ("parallel", "zero_stage"), text
    if config.zero_gradients == "fill":
        text = f"fill, which {stack.name}'s CUDA graphs come with, does not go with experts whose rows are counted on the host; use free (training.disable_cuda_graphs)"
        yield ("zero_gradients",), text
    if parallel.tensor > 1 and not parallel.sequence:
        text = "false is not modelled where GPUs share matrices and experts; use true, torchtitan's own default"
        yield ("parallel", "sequence"), text
    said = {
        ("parallel", "pipeline"): parallel.pipeline > 1,
        ("parallel", "reshard_after_forward"): not parallel.reshard_after_forward,
        ("adapter",): config.adapter is not None,
        ("evaluation",): config.evaluation,
        ("weight_average",): config.weight_average != "none",
        ("compile",): config.compile != "none",
        ("dropout",): bool(config.dropout),
    }
    for path, given in said.items():
        if given:
            yield path, "it is not modelled where GPUs share experts (parallel.expert); leave it out"
