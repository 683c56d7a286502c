"""Transformers' implementations, built without weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers.masking_utils
from transformers import AutoConfig, AutoModelForCausalLM

from memplan.trace.pretended_cuda.fake_devices import replaced
from memplan.training.resolved import TrainingSetup


def causal_model(directory: Path, setup: TrainingSetup) -> Any:
    """Return the model that the ``config.json`` in ``directory`` describes, set up for training.

    Attention goes through torch's scaled-dot-product attention where the implementation has
    it, else step by step.
    """
    path = directory.parent if directory.is_file() else directory
    config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    config = config.get_text_config()
    dropout = setup.config.dropout
    if dropout is not None:
        for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "resid_dropout"):
            if hasattr(config, name):
                setattr(config, name, dropout)
    model = _built(config)
    if setup.config.activation_checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _built(config: Any) -> Any:
    eager = bool(getattr(config, "attn_logit_softcapping", None))
    auto: Any = AutoModelForCausalLM
    try:
        return auto.from_config(config, attn_implementation="eager" if eager else "sdpa")
    except ValueError:
        return auto.from_config(config, attn_implementation="eager")


@contextmanager
def without_packing() -> Iterator[None]:
    """Take every row for one sequence, which transformers would look up in the position ids' values."""
    with replaced(transformers.masking_utils, {"find_packed_sequence_indices": lambda position_ids: None}):  # noqa: ARG005
        yield
