"""A baseline: what every job needed when it was written, as JSON that is the same for the same figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memplan.documents.escaping import json_text
from memplan.documents.loading import Document, load_document
from memplan.documents.schemas import validate
from memplan.errors import InvalidFileError, printable

SCHEMA = "memplan/baseline/1"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one job needed on one GPU.

    Attributes:
        model: As the budget names it.
        config: As the budget names it.
        asked: Hash of what the user wrote: model, config and GPU.
        inputs: Hash of what that resolved to: shapes, every key of the training config, GPU.
        components: Bytes by component, at the peak.
    """

    name: str
    gpu: str
    model: str
    config: str
    asked: str
    inputs: str
    device_bytes: int
    upper_bytes: int
    components: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Entries by job and GPU, and what computed them."""

    memplan_version: str
    catalog_hash: str
    entries: Mapping[tuple[str, str], Entry]


@dataclass(frozen=True, slots=True)
class BaselineFile:
    """The file as it is written."""

    schema: str
    memplan_version: str
    catalog_hash: str
    rows: tuple[Entry, ...]


def baseline_text(baseline: Baseline) -> str:
    """Return the file's text: rows sorted by job and GPU, components in their usual order."""
    rows = [asdict(baseline.entries[key]) for key in sorted(baseline.entries)]
    data = {
        "schema": SCHEMA,
        "memplan_version": baseline.memplan_version,
        "catalog_hash": baseline.catalog_hash,
        "rows": rows,
    }
    return json_text(data)


def read_baseline(path: Path) -> Baseline:
    """Return a baseline, or what a ``memplan check --json`` said, which holds the same figures.

    Raises:
        InvalidFileError: Unreadable, or neither of them.
    """
    document = load_document(path)
    data = document.data
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema == "memplan/check/1":
        document = Document(document.name, _figures_only(data), document.lines, document.problems)
    elif schema != SCHEMA:
        raise InvalidFileError(
            [f"{document.name}:1: schema: expected {SCHEMA} or memplan/check/1, got {printable(repr(schema))}"]
        )
    file = validate(BaselineFile, document)
    return Baseline(file.memplan_version, file.catalog_hash, {(row.name, row.gpu): row for row in file.rows})


def _figures_only(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an answer that a baseline has too; jobs that could not be evaluated have none."""
    keys = Entry.__slots__
    rows = [row for row in data.get("rows", ()) if isinstance(row, dict) and "device_bytes" in row]
    figures = [{key: row[key] for key in keys if key in row} for row in rows]
    return {**{key: data[key] for key in ("schema", "memplan_version", "catalog_hash") if key in data}, "rows": figures}
