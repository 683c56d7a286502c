"""Training of embeddings: what a config cannot say of its texts, and what of their losses is not modelled."""

from collections.abc import Iterator

from memplan.catalog.config_keys.method_keys import Embedding
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import ALL_TRAIN, Offload, TrainingConfig
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
