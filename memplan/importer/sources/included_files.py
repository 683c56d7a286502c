"""Files that inherit from others, as Hydra's ``defaults`` names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memplan.documents.opening import is_file, shown_path, whole_path
from memplan.errors import InvalidFileError, printable
from memplan.importer.sources.given_keys import GivenKeys

DEEPEST = 12
FILES = (".yaml", ".yml")

Read = Callable[[Path], GivenKeys]


def with_includes(keys: GivenKeys, path: Path, read: Read, above: tuple[Path, ...] = ()) -> GivenKeys:
    """Return keys with those of the files that ``defaults`` names put in below them; files that are not there are noted.

    Args:
        keys: Of the file at ``path``.
        path: Where relative names start.

    Raises:
        InvalidFileError: A file that includes itself.
    """
    here = whole_path(path)
    above = (*above, here)
    merged: Mapping[str, Any] = {}
    absent: list[str] = []
    for name in _names(keys):
        other = (here.parent / name).resolve()
        place = keys.where("defaults")
        if other in {one.resolve() for one in above} or len(above) > DEEPEST:
            raise InvalidFileError([f"{place}: {printable(name)} includes itself"])
        if not is_file(other):
            absent.append(f"the file {shown_path(other)}, which {place} includes")
            continue
        merged = _merged(merged, with_includes(read(other), other, read, above).data)
    return replace(keys, data=_merged(merged, keys.data), absent=tuple(absent))


def _names(keys: GivenKeys) -> list[str]:
    given = keys.data.get("defaults")
    names = given if isinstance(given, list) else [given]
    return [name for name in names if isinstance(name, str) and name.endswith(FILES) and "${" not in name]


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(inner, value) if both and isinstance(inner, Mapping) else value
    return merged
