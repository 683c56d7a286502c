"""Models: from a catalog name, a published id, a file or shapes to a model."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.method_keys import Method
from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import is_file, is_folder, read_text
from memplan.errors import CannotAnswerError, GuessedNameWarning, InvalidFileError
from memplan.library.lookup.model_names import ResolvedName, resolve_model_name, without_address
from memplan.library.lookup.trainer_files import file_model, is_trainer_file, refuse_no_model
from memplan.model.families import model_spec, with_towers
from memplan.model.model import Model
from memplan.model.readers import read_model
from memplan.model.spec import Attention, Mlp, ModelSpec
from memplan.training.second_models import REWARD, TEACHER, VALUES

KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
}
"""Shape -> the key of a config that holds it."""

CATALOG = "catalog:"
"""What the source of a model of the catalog begins with."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model given by its shapes on the command line."""

    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    tied: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the shapes that were given."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


def find_model(text: str | None, shapes: Shapes, catalog: Catalog) -> Model:
    """Return the model that MODEL or explicit shapes name.

    Raises:
        MemplanError: An unknown name, an unreadable file, or both a name and shapes.
    """
    given, text = shapes.given(), text and without_address(text)
    if text is None and not given:
        raise InvalidFileError(
            [
                "no model given: name one (memplan list models), a file, or shapes such as --layers 32 --hidden 4096 --heads 32"
            ]
        )
    if text is None:
        from memplan.model.readers.given_shapes import model_from_shapes

        missing = [f"--{name}" for name in ("layers", "hidden", "heads") if name not in given]
        if missing:
            raise InvalidFileError([f"a model by its shapes needs {' and '.join(missing)} too"])
        return model_from_shapes(**given)
    if is_trainer_file(text):
        known = file_model(text, {KEYS[name]: value for name, value in given.items()})
        if isinstance(known, Model):
            return known
        name, positions = known
        return built_for(named_model(resolve_model_name(name, catalog, elsewhere=True), catalog), positions)
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidFileError([f"both a model ({text!r}) and shapes ({flags}) given: give one of them"])
    refuse_no_model(text)
    return named_model(resolve_model_name(text, catalog), catalog)


def models_beside(method: Method, catalog: Catalog) -> Mapping[str, Model]:
    """Return the models of their own that a method names beside the one that is trained, by what they are.

    Raises:
        MemplanError: No model has the name, or its file cannot be read.
    """
    values = method.value_model or method.reward_model  # which values begin as where nothing says another
    named = {TEACHER: method.teacher, VALUES: values, REWARD: method.reward_model}
    return {
        role: find_model(given.model, Shapes(), catalog)
        for role, given in named.items()
        if given is not None and given.model
    }


def built_for(model: Model, positions: int) -> Model:
    """Return a model as a trainer builds it, for so many positions; 0 leaves those of its release."""
    return replace(model, spec=replace(model.spec, max_position_embeddings=positions)) if positions else model


def named_model(resolved: ResolvedName, catalog: Catalog) -> Model:
    """Return the model that a resolved name means; a guess is said in a warning too."""
    if resolved.how == "guess":
        warnings.warn(GuessedNameWarning(resolved.notes[0]), stacklevel=2)
    target = resolved.target
    model = read_model_file(target, catalog) if isinstance(target, Path) else catalog_model(target, catalog)
    weights = model.quantization or resolved.weights
    return replace(model, notes=(*resolved.notes, *model.notes), quantization=weights)


@lru_cache(maxsize=1024)
def catalog_model(name: str, catalog: Catalog) -> Model:
    """Return a model of the catalog by its exact name; those of the shipped one are all read once."""
    entry = catalog.models.entries[name]
    spec = model_spec({**entry.config, "model_type": entry.architecture}, entry.title, f"{CATALOG}{name}")
    return Model.from_spec(spec, f"{CATALOG}{name}")


def read_model_file(path: Path, catalog: Catalog) -> Model:
    """Return the model in a file or directory, told apart by name and content."""

    def layouts() -> dict[int, tuple[str, int, int]]:
        formats = catalog.formats.entries.items()
        return {
            entry.ggml_type: (name, entry.block_elements, entry.block_bytes)
            for name, entry in formats
            if entry.ggml_type is not None
        }

    return read_model(path, layouts)


# ------------------------------------------------------------------ what other libraries build a model from
def released_keys(model: Model, catalog: Catalog) -> Mapping[str, Any]:
    """Return the keys of the ``config.json`` of a model, ``model_type`` among them.

    Raises:
        CannotAnswerError: It was read from a file that has none.
    """
    from memplan.model.readers.given_shapes import SOURCE

    if model.source.startswith(CATALOG):
        entry = catalog.models.entries[model.source.removeprefix(CATALOG)]
        return {**entry.config, "model_type": entry.architecture}
    if model.source == SOURCE:
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
