"""Sentence Transformers in Python: the model that a program gives its trainer, and the loss, in keys that a file of arguments could have."""

from collections.abc import Iterator, Mapping
from typing import Any

from memplan.importer.sources.given_keys import GivenKeys

TRAINER, ARGUMENTS = "SentenceTransformerTrainer", "SentenceTransformerTrainingArguments"
PACKAGES: Mapping[str, str] = {
    "Trainer": "transformers",
    "Seq2SeqTrainer": "transformers",
    TRAINER: "sentence-transformers",
}
"""Trainer -> the package that it is of."""
MODEL = "SentenceTransformer"
LOADED: Mapping[str, str] = {
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "attn_implementation": "attn_implementation",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
}
"""Keywords of ``model_kwargs`` -> keys of TRL's ``ModelConfig``."""
WRAPPERS: Mapping[str, str] = {
    "MatryoshkaLoss": "matryoshka",
    "Matryoshka2dLoss": "matryoshka_2d",
    "AdaptiveLayerLoss": "adaptive_layers",
}
"""Losses around another."""
OF_LOSSES = ("mini_batch_size", "mini_batch_num_tokens", "gather_across_devices", "directions", "hardness_mode")
"""Keywords of losses that move memory."""

Taken = Iterator[tuple[str, Any, int]]
"""A key, its value, and the line that says it."""


def model_and_loss(keys: GivenKeys) -> Taken:
    """Yield the model of a program that calls Sentence Transformers' trainer, and the loss that it names first."""
    given = keys.data.get(MODEL)
    own: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    for name in ("0", "model_name_or_path"):
        if name in own:
            yield "model_name_or_path", own[name], keys.lines.get((MODEL, name), 1)
    inner = own.get("model_kwargs")
    line = keys.lines.get((MODEL, "model_kwargs"), 1)
    for name, value in (inner if isinstance(inner, Mapping) else {}).items():
        if name in LOADED:
            yield LOADED[name], value, line
    if isinstance(inner, Mapping) and inner.get("quantization_config") is not None:
        yield "quantized", True, line
    yield from _losses(keys)


def _losses(keys: GivenKeys) -> Taken:
    """Yield the losses that a program makes: the first one that is not around another, and those that are."""
    named = [word.rpartition("_")[2] for word in keys.words if word.endswith("Loss")]
    for name in dict.fromkeys(named):
        if name in WRAPPERS:
            yield WRAPPERS[name], True, 1
    inner = [name for name in dict.fromkeys(named) if name not in WRAPPERS]
    if not inner:
        return
    if len(inner) > 1:
        yield "loss", " and ".join(inner), 1
        return
    loss = inner[0]
    called = next(word for word in keys.words if word.endswith(loss))
    given = keys.data.get(called)
    yield "loss", loss, 1
    for name in OF_LOSSES:
        if isinstance(given, Mapping) and name in given:
            yield name, given[name], keys.lines.get((called, name), 1)
