"""Training of embeddings, and of encoders: what a config cannot say of its texts, and what of either is not modelled."""

from collections.abc import Iterator

from memplan.catalog.config_keys.method_keys import Embedding
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import ALL_TRAIN, Offload, TrainingConfig
from memplan.model.spec import ModelSpec
from memplan.training.rules.image_rules import out_of_range

Path = tuple[str, ...]
MOST_COLUMNS, MOST_ROWS = 2**10, 2**20
"""No example has more texts, and no mini-batch more rows; a larger number is a slip."""


def embedding_problems(config: TrainingConfig, texts: Embedding) -> Iterator[tuple[Path, str]]:
    """Yield what a config says of its texts that cannot be."""
    path = ("method", "embedding")
    if config.method.stage != "embedding":
        yield path, f"{config.method.stage} compares no embeddings; leave it out"
    yield from out_of_range(texts, path, ("columns",), MOST_COLUMNS, 2)
    yield from out_of_range(texts, path, ("mini_batch_size",), MOST_ROWS)
    if texts.mini_batch_size is not None and texts.loss == "pairs":
        yield (*path, "mini_batch_size"), "a cached loss compares anchors with all others; use loss: in-batch-negatives"


def embedding_refusals(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield how embeddings are trained that the formula does not follow.

    Source:
        ``_backward_hook`` in sentence_transformers/base/losses/gradcache.py (6.2.0), for what replicas and shards do besides.
    """
    if config.method.stage != "embedding":
        return
    if config.parallel != Parallel():
        yield ("parallel",), "training of embeddings on several GPUs is not modelled; use one"
    if stack.checkpointing.reentrant and config.activation_checkpointing != "none":
        told = (
            "reentrant checkpointing, whose layers add up gradients forward by forward, is not modelled for embeddings"
        )
        yield ("reentrant_checkpointing",), f"{told}; use false"
    if config.evaluation:
        yield ("evaluation",), "an evaluation of embeddings is not modelled; use evaluation: false"
    if config.joined_rows:
        yield ("joined_rows",), "rows joined without padding are not modelled for embeddings; leave it out"
    if config.compile != "none":
        yield ("compile",), "compiled forwards of several columns are not modelled; use none"
    if config.offload != Offload():
        yield ("offload",), "what waits in host memory is not modelled for embeddings; leave it out"
    if config.freeze != ALL_TRAIN:
        yield ("freeze",), "training of embeddings with parts of the model frozen is not modelled; use full or LoRA"
    if config.adapter is not None and config.adapter.modules_to_save:
        yield ("adapter", "modules_to_save"), "copies that train are not modelled for embeddings; leave it out"


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
            "it; planned are --method embedding --stack sentence-transformers and --method classification --stack transformers"
        )
    if config.parallel != Parallel():
        yield f"parallel: {name}, an encoder, on several GPUs is not modelled; use one"
    if unpads:
        yield f"kernels.attention: {name} with the package flash-attn, which takes padding out of rows, is not modelled; use flash"
    if spec.window and config.kernels.attention == "eager":
        yield f"kernels.attention: {name}'s attention step by step, with a mask of each kind of layers, is not modelled; leave it out"
    if not spec.encoder.drops and config.dropout:
        yield f"dropout: {name} is released without, and with it is not modelled; leave it out"
    if not spec.encoder.checkpoints and config.activation_checkpointing != "none":
        yield (
            f"activation_checkpointing: {name}'s code checkpoints no layer, and Trainer ends with an error (supports_gradient_checkpointing); "
            "use none"
        )
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


def cached_refusals(config: TrainingConfig, *, integers: bool) -> Iterator[str]:
    """Yield what a cached loss is not planned for: matrices that are multiplied as integers."""
    texts = config.method.embedding
    if integers and texts is not None and texts.mini_batch_size is not None:
        yield (
            "weights.hidden_matrix: codes that are multiplied as integers, under a cached loss, are not modelled: traced steps took up to 8 % "
            "more; use another format, or leave out method.embedding.mini_batch_size"
        )
