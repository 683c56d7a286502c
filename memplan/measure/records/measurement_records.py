"""Records: measurements as JSON files, checked against what is predicted today."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import memplan
from memplan.catalog.catalog import Catalog
from memplan.documents.escaping import json_text
from memplan.documents.opening import files_in, is_folder, shown_path
from memplan.documents.strict_json import read_json
from memplan.documents.writing import write_file
from memplan.errors import InvalidFileError
from memplan.measure.measured import Measurement, measurement_of
from memplan.measure.records.completeness import missing_figures
from memplan.measure.task import Task, task_data, task_of

SCHEMA = "memplan/record/1"
TOTALS: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"requested"}),
    "cuda": frozenset({"requested", "allocated", "reserved", "device"}),
}
"""Device -> totals that its allocator's counters have."""
INSTEAD = "give a record of memplan validate --record, or a folder of them"


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement that was written down; it is never edited."""

    name: str
    task: Task  # What was run, built anew from today's catalog
    measurement: Measurement
    date: str
    command: str


def record_data(task: Task, measurement: Measurement, command: str) -> dict[str, Any]:
    """Return the JSON of a record."""
    return {
        "schema": SCHEMA,
        "memplan_version": memplan.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "task": task_data(task),
        "measurement": asdict(measurement),
    }


def write_record(path: Path, task: Task, measurement: Measurement, command: str) -> None:
    """Write a record, whole or not at all.

    Raises:
        InvalidFileError: It cannot be written.
    """
    write_file(path, json_text(record_data(task, measurement, command), indent=1))


def record_files(place: Path) -> list[Path]:
    """Return the records in a folder, or the one file that was named.

    Raises:
        InvalidFileError: There is none.
    """
    files = files_in(place, "*.json", deep=True) if is_folder(place) else [place]
    if not files:
        raise InvalidFileError([f"{shown_path(place)}: no records (*.json) in this folder"])
    return files


def read_data(path: Path) -> Mapping[str, Any]:
    """Return the JSON of a record.

    Raises:
        InvalidFileError: It cannot be read, or is no record.
    """
    data = read_json(path, instead=INSTEAD)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InvalidFileError([f"{shown_path(path)}: not a record of memplan validate (schema {SCHEMA})"])
    if not all(isinstance(data.get(key), dict) for key in ("task", "measurement")):
        raise InvalidFileError([f"{shown_path(path)}: a record has a task and a measurement"])
    measurement = measurement_of(data["measurement"], f"{shown_path(path)}: measurement")
    return {**data, "measurement": asdict(measurement)}


def read_record(path: Path, catalog: Catalog) -> Record:
    """Return a record, its model and setup built from today's catalog."""
    data = read_data(path)
    task = task_of(data["task"], catalog, f"{shown_path(path)}: task")
    measurement = measurement_of(data["measurement"], f"{shown_path(path)}: measurement")
    unknown = sorted(measurement.totals.keys() - TOTALS[task.device])
    if unknown:
        raise InvalidFileError(
            [f"{shown_path(path)}: measurement.totals: {unknown[0]!r} is not measured on a {task.device}"]
        )
    if missing := list(missing_figures(task, measurement)):
        names = ", ".join(missing)
        raise InvalidFileError([f"{shown_path(path)}: measurement: a record of such a run has {names}; this has not"])
    return Record(str(path), task, measurement, *(str(data.get(key, "")) for key in ("date", "command")))
