"""Rows that transformers gives attention a mask for, on a device without values that would tell of them."""

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch

from memplan.trace.stacks.registry import StackInputs
from memplan.training.resolved import TrainingSetup


def masked_rows(inputs: StackInputs) -> AbstractContextManager[Any]:
    """Return what takes joined rows for several, and padded ones for padded, where only values would tell.

    Source:
        ``find_packed_sequence_indices`` and ``_ignore_causal_mask_sdpa`` in transformers/masking_utils.py (5.24.0), which ask whether
        positions tell of one row alone, and whether a collator's mask leaves out a token.
    """
    joined, padded = inputs.setup.config.joined_rows, pads_rows(inputs.setup)
    if not inputs.is_traced or not (joined or padded):
        return nullcontext()
    masks = import_module("transformers.masking_utils")
    if joined:
        return patch.object(masks, "is_tracing", lambda *_: True)
    return patch.object(masks, "_ignore_causal_mask_sdpa", lambda *_, **__: False)


def pads_rows(setup: TrainingSetup) -> bool:
    """Tell whether a micro-batch has rows with padding."""
    return setup.config.pads(setup.config.micro_batch_size * setup.rows_per_sample)
