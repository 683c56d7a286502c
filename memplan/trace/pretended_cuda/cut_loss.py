"""Cut cross-entropy on a model of transformers: its own autograd function, whose Triton kernels write into what that allocates."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch.fx.experimental import _config as fake_shapes
from transformers.modeling_outputs import CausalLMOutputWithPast

from memplan.errors import CannotAnswerError
from memplan.trace.pretended_cuda.idle_kernels import idle_kernels
from memplan.training.resolved import TrainingSetup


def with_cut_cross_entropy(model: Any, setup: TrainingSetup) -> None:
    """Put the forward into a model that ``cce_patch`` puts there, every label one that counts.

    Raises:
        CannotAnswerError: The package is not installed.

    Source:
        ``cce_forward`` in cut_cross_entropy/transformers/llama.py and ``apply_lce`` in transformers/utils.py
        (axolotl-ai-cloud/ml-cross-entropy 134aeca).
    """
    if setup.profile.loss != "cut-cross-entropy":
        return
    loss_of, head = _linear_cross_entropy(), model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(
        own: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        labels: Any = None,
        num_items_in_batch: Any = None,
        **given: Any,
    ) -> CausalLMOutputWithPast:
        states = own.model(input_ids=input_ids, attention_mask=attention_mask, **given).last_hidden_state
        rows = states[:, slice(0, None), :]
        if head.weight.dtype == torch.bfloat16 and rows.dtype == torch.float32:
            rows = rows.to(head.weight.dtype)
        reduction = "mean" if num_items_in_batch is None else "sum"
        with fake_shapes.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
            loss = loss_of(rows, head.weight, labels, softcap=softcap, reduction=reduction, shift=True)
        return CausalLMOutputWithPast(loss=loss if num_items_in_batch is None else loss / num_items_in_batch)

    model.forward = MethodType(forward, model)


@cache
def _linear_cross_entropy() -> Callable[..., Any]:
    """Return the package's function, none of whose parts is compiled; Triton's own kernels do nothing beside Liger's."""
    plain = lambda function=None, **_: function or (lambda inner: inner)  # noqa: E731
    try:
        with nullcontext() if find_spec("triton") else idle_kernels(), patch.object(torch, "compile", plain):
            return import_module("cut_cross_entropy").linear_cross_entropy  # type: ignore[no-any-return]
    except ImportError as error:
        raise CannotAnswerError(
            f"tracing kernels.loss: cut-cross-entropy needs {error.name}: pip install --no-deps cut-cross-entropy"
        ) from None
