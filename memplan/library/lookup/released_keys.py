"""The keys of a model's ``config.json``, which other libraries build it from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.documents.opening import is_file, is_folder, read_text
from memplan.errors import CannotAnswerError
from memplan.model.families import with_towers
from memplan.model.model import Model
from memplan.model.readers.given_shapes import SOURCE as SHAPES
from memplan.model.spec import Attention, Mlp, ModelSpec

CATALOG = "catalog:"


def released_keys(model: Model, catalog: Catalog) -> Mapping[str, Any]:
    """Return the keys of the ``config.json`` of a model, ``model_type`` among them.

    Raises:
        CannotAnswerError: It was read from a file that has none.
    """
    if model.source.startswith(CATALOG):
        entry = catalog.models.entries[model.source.removeprefix(CATALOG)]
        return {**entry.config, "model_type": entry.architecture}
    if model.source == SHAPES:
        return _llama_keys(model.spec)
    path = Path(model.source)
    file = path / "config.json" if is_folder(path) else path
    if file.name.endswith(".json") and is_file(file):
        keys: dict[str, Any] = json.loads(read_text(file))
        inner = keys if keys.get("model_type") in with_towers() else keys.get("text_config")
        return inner if isinstance(inner, dict) else keys
    raise CannotAnswerError(f"{model.source}: a library builds its model from a config.json, which this is not")


def _llama_keys(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of a model that was given by its shapes, which are Llama's."""
    layer = spec.runs[0].layer
    part, feed_forward = layer.attention, layer.feed_forward
    assert isinstance(part, Attention)
    assert isinstance(feed_forward, Mlp)
    return {
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": feed_forward.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": part.num_heads,
        "num_key_value_heads": part.num_key_value_heads,
        "head_dim": part.head_dim,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }
