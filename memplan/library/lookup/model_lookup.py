"""Models: from a catalog name, a published id, a file or shapes to a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import ModelEntry
from memplan.documents.opening import path_kind, shown_path, usable_path
from memplan.errors import InvalidFileError, normalised_name, unknown_name
from memplan.model.families import model_spec
from memplan.model.inventory import inventory_of
from memplan.model.model import Model
from memplan.model.readers import is_model_file, read_model


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
    given = shapes.given()
    if text is None and not given:
        raise InvalidFileError(
            [
                "no model given: name one (memplan list models), a file, or shapes such as --layers 32 --hidden 4096 --heads 32"
            ]
        )
    if text is None:
        from memplan.model.readers.shapes import model_from_shapes

        missing = [f"--{name}" for name in ("layers", "hidden", "heads") if name not in given]
        if missing:
            raise InvalidFileError([f"a model by its shapes needs {' and '.join(missing)} too"])
        return model_from_shapes(**given)
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidFileError([f"both a model ({text!r}) and shapes ({flags}) given: give one of them"])
    model = _catalog_model(text, catalog)
    return _model_file(text, catalog) if model is None else model


def catalog_model(name: str, catalog: Catalog) -> Model:
    """Return a model of the catalog by its exact name."""
    return _from_entry(name, catalog.models.entries[name])


def _from_entry(name: str, entry: ModelEntry) -> Model:
    spec = model_spec({**entry.config, "model_type": entry.architecture}, entry.title, f"catalog:{name}")
    return Model(spec, inventory_of(spec), f"catalog:{name}")


def _catalog_model(text: str, catalog: Catalog) -> Model | None:
    if text != "-" and not text.startswith((".", "/", "~")):
        if text in catalog.models:
            name = catalog.models.name_of(text)
            return _from_entry(name, catalog.models.entries[name])
        for name, entry in catalog.models.entries.items():
            if normalised_name(entry.hf_id) == normalised_name(text):
                return _from_entry(name, entry)
    return None


def _model_file(text: str, catalog: Catalog) -> Model:
    path = usable_path(text)
    there = path_kind(path) != "nothing"
    if path.suffix in (".yaml", ".yml"):
        expected = "expected a config.json, a GGUF or safetensors file; a training config is --config"
        raise InvalidFileError([f"{shown_path(path)}: a YAML file describes no model; {expected}"])
    if text == "-" or there or is_model_file(path.name):
        return read_model_file(path, catalog)
    if len(path.parts) > 2 or text.startswith((".", "/", "~")):
        raise InvalidFileError([f"{shown_path(path)}: no such file or directory"])
    known = [*catalog.models.entries, *(a for e in catalog.models.entries.values() for a in e.aliases)]
    raise unknown_name("model", text, known, "memplan list models")


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
