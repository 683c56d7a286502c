"""Rows that transformers gives attention a mask for, on a device without values that would tell of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from unittest.mock import patch

from memplan.trace.stacks.registry import StackInputs
from memplan.training.resolved import TrainingSetup


@contextmanager
def masked_rows(inputs: StackInputs) -> Iterator[None]:
    """Take joined rows for several, and padded ones for padded, where only values would tell.

    Source:
        ``find_packed_sequence_indices`` and ``_ignore_causal_mask_sdpa`` in transformers/masking_utils.py (5.24.0), which ask whether
        positions tell of one row alone, and whether a collator's mask leaves out a token; models with masks of their own ask
        ``AttentionMaskConverter`` in modeling_attn_mask_utils.py (4.57.6).
    """
    joined, padded = inputs.setup.config.joined_rows, pads_rows(inputs.setup)
    with ExitStack() as patches:
        if inputs.is_traced and (joined or padded):
            masks = import_module("transformers.masking_utils")
            name = "is_tracing" if joined else "_ignore_causal_mask_sdpa"
            patches.enter_context(patch.object(masks, name, lambda *_, **__: joined))
            if padded:
                patches.enter_context(patch.object(masks, "_ignore_bidirectional_mask_sdpa", lambda *_, **__: False))
            if padded and find_spec("transformers.modeling_attn_mask_utils") is not None:
                own = import_module("transformers.modeling_attn_mask_utils").AttentionMaskConverter
                patches.enter_context(patch.object(own, name, lambda *_, **__: False))
        yield


def pads_rows(setup: TrainingSetup) -> bool:
    """Tell whether a micro-batch has rows with padding."""
    return setup.config.pads(setup.config.micro_batch_size * setup.rows_per_sample)
