"""Outside files to models: one reader for each kind of file, told apart by how its name ends.

A reader is a function and an entry of :data:`READERS`; its module is imported when such a file is read.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from memplan.documents.frozen_values import dataclass
from memplan.model.model import Model

Layouts = Callable[[], Mapping[int, tuple[str, int, int]]]
"""Returns the block formats by their id in GGUF files: name, elements and bytes of a block."""


@dataclass(frozen=True, slots=True)
class Reader:
    """What reads files whose names end in one of ``endings``."""

    endings: tuple[str, ...]
    read: Callable[[Path, Layouts], Model]


def _gguf(path: Path, layouts: Layouts) -> Model:
    from memplan.model.readers.gguf import BlockLayout, read_gguf

    return read_gguf(path, {number: BlockLayout(*layout) for number, layout in layouts().items()})


def _safetensors(path: Path, _: Layouts) -> Model:
    from memplan.model.readers.safetensors import read_safetensors

    return read_safetensors(path)


def _huggingface(path: Path, _: Layouts) -> Model:
    from memplan.model.readers.huggingface import read_huggingface

    return read_huggingface(path)


READERS: tuple[Reader, ...] = (
    Reader((".gguf",), _gguf),
    Reader((".safetensors", ".safetensors.index.json"), _safetensors),
    Reader((".json",), _huggingface),
)
"""Readers, the first that takes a name goes; directories, standard input and other files are Hugging Face's."""


def is_model_file(name: str) -> bool:
    """Tell whether a name is that of a model file, even where there is none."""
    return any(name.endswith(reader.endings) for reader in READERS)


def read_model(path: Path, layouts: Layouts) -> Model:
    """Return the model in a file or directory."""
    read = next((reader.read for reader in READERS if path.name.endswith(reader.endings)), _huggingface)
    return read(path, layouts)
