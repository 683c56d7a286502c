"""Training of encoders: which stages a stack's own code was followed in, and what of them is not modelled."""

from collections.abc import Iterator

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Offload, TrainingConfig
from memplan.model.spec import ModelSpec


def encoder_refusals(
    spec: ModelSpec, config: TrainingConfig, stack: Stack, *, autocast: bool, unpads: bool
) -> Iterator[str]:
    """Yield what an encoder is not planned for, each with its key; nothing for a decoder.

    Args:
        unpads: Whether the package flash-attn runs attention.
    """
    if spec.encoder is None:
        return
    stage, name = config.method.stage, spec.name
    if stage not in stack.encoders:
        yield (
            f"model: {name} is an encoder, whose tokens see those behind them too: {stage} under {stack.label} is not modelled for "
            "it; method.stage: embedding with --stack sentence-transformers is, and classification with --stack transformers"
        )
    if config.parallel != Parallel():
        yield f"parallel: {name}, an encoder, on several GPUs is not modelled; use one"
    if unpads:
        yield f"kernels.attention: {name} with the package flash-attn, which takes padding out of rows, is not modelled; use flash"
    if autocast and stack.checkpointing.reentrant and config.activation_checkpointing != "none":
        yield (
            f"reentrant_checkpointing: {name}, an encoder, under autocast is not modelled so: layers that are called again share one narrow "
            "copy of what they are given; use false"
        )
    if config.compile != "none" or config.offload != Offload():
        key = "compile" if config.compile != "none" else "offload"
        yield f"{key}: not modelled for {name}, an encoder; leave it out"
    if config.adapter is not None and stage == "classification":
        yield f"adapter: adapters on {name}, an encoder that learns classes, are not modelled; leave it out"
