"""Rows that transformers gives attention a mask for, on a device without values that would tell of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
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
    with ExitStack() as patches:
        if not inputs.is_traced:
            pass
        elif inputs.setup.config.joined_rows:
            masks = import_module("transformers.masking_utils")
            patches.enter_context(patch.object(masks, "is_tracing", lambda *_, **__: True))
        elif inputs.setup.config.padded_rows:
            for owner, name in _asking():
                patches.enter_context(patch.object(owner, name, _unless_padded(getattr(owner, name), inputs.setup)))
        yield


def _asking() -> Iterator[tuple[Any, str]]:
    """Yield what asks whether a mask leaves out a token, each with its owner."""
    masks, causal = import_module("transformers.masking_utils"), "_ignore_causal_mask_sdpa"
    yield from ((masks, name) for name in (causal, "_ignore_bidirectional_mask_sdpa") if hasattr(masks, name))
    if find_spec("transformers.modeling_attn_mask_utils") is not None:
        yield import_module("transformers.modeling_attn_mask_utils").AttentionMaskConverter, causal


def _unless_padded(ignores: Callable[..., bool], setup: TrainingSetup) -> Callable[..., bool]:
    """Return a function that lets no mask of rows with padding be ignored, be they trained or evaluated."""

    def answer(*masks: Any, **others: Any) -> bool:
        mask = next(iter((*masks, *others.values())), None)
        return False if mask is None or setup.config.pads(len(mask)) else ignores(*masks, **others)

    return answer


def pads_rows(setup: TrainingSetup, rows: int) -> bool:
    """Tell whether a batch of so many samples has rows with padding."""
    return setup.config.pads(rows * setup.rows_per_sample)
