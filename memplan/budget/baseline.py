"""A baseline: what every job needed when it was written, as JSON that is the same for the same figures."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from memplan.documents.escaping import json_text
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import Document, load_document
from memplan.documents.schemas import validate
from memplan.errors import InvalidFileError, shown_value
from memplan.plan.components import COMPONENTS

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
            [f"{document.name}:1: schema: expected {SCHEMA} or memplan/check/1, got {shown_value(schema)}"]
        )
    file = validate(BaselineFile, document)
    return Baseline(file.memplan_version, file.catalog_hash, {(row.name, row.gpu): row for row in file.rows})


def _figures_only(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an answer that a baseline has too; jobs that could not be evaluated have none."""
    keys = Entry.__slots__
    rows = [row for row in data.get("rows", ()) if isinstance(row, dict) and "device_bytes" in row]
    figures = [{key: row[key] for key in keys if key in row} for row in rows]
    return {**{key: data[key] for key in ("schema", "memplan_version", "catalog_hash") if key in data}, "rows": figures}


Cause = Literal["added", "removed", "config", "memplan", "config and memplan", "none"]

CAUSES: dict[Cause, str] = {
    "added": "new job",
    "removed": "job removed",
    "config": "your config changed",
    "memplan": "memplan's own figures changed",
    "config and memplan": "your config changed, and memplan's own figures may have too",
    "none": "nothing moved",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One job on one GPU, before and after."""

    name: str
    gpu: str
    before: Entry | None
    after: Entry | None
    cause: Cause  # Why it moved
    components: Mapping[str, int]  # Bytes that components gained or lost, without those that stayed

    @property
    def moved_bytes(self) -> int:
        """Bytes that the device total gained."""
        return (self.after.device_bytes if self.after else 0) - (self.before.device_bytes if self.before else 0)

    @property
    def moved(self) -> bool:
        """Whether there is anything to tell."""
        return self.cause != "none"


def differences(base: Baseline, head: Baseline) -> list[Change]:
    """Return every job of either baseline: the largest growth first, then new, removed and unmoved ones."""
    same_memplan = (base.memplan_version, base.catalog_hash) == (head.memplan_version, head.catalog_hash)
    changes = []
    for key in sorted({*base.entries, *head.entries}):
        before, after = base.entries.get(key), head.entries.get(key)
        changes.append(Change(*key, before, after, _cause(before, after, same_memplan), _components(before, after)))
    return sorted(changes, key=lambda c: (not c.moved, -c.moved_bytes, c.name, c.gpu))


def _cause(before: Entry | None, after: Entry | None, same_memplan: bool) -> Cause:
    """Return why a job moved.

    What the user wrote has a hash of its own, and so has what it resolved to: where one of them is the
    same and the figures are not, it was memplan. Where both differ, memplan can have had a part in it
    only if its version or catalog differ too.
    """
    if before is None:
        return "added"
    if after is None:
        return "removed"
    figures = [(e.device_bytes, e.upper_bytes, e.components) for e in (before, after)]
    if before.asked == after.asked or before.inputs == after.inputs:
        return "none" if figures[0] == figures[1] else "memplan"
    return "config" if same_memplan else "config and memplan"


def _components(before: Entry | None, after: Entry | None) -> dict[str, int]:
    old = before.components if before else {}
    new = after.components if after else {}
    names = [*COMPONENTS, *sorted({*old, *new} - set(COMPONENTS))]
    moved = {name: new.get(name, 0) - old.get(name, 0) for name in names}
    return {name: size for name, size in moved.items() if size}
