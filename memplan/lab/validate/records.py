"""Records: measurements as JSON files, checked against what is predicted today."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import memplan
from memplan.budget.baseline import write_atomically
from memplan.catalog.catalog import Catalog
from memplan.errors import InvalidFileError
from memplan.lab.validate.completeness import missing_figures, other_instants
from memplan.lab.validate.measured import Measurement, measurement_of
from memplan.lab.validate.prediction import predict
from memplan.lab.validate.rows import Row, rows_of
from memplan.lab.validate.task import Task, task_data, task_of

SCHEMA = "memplan/record/1"
MAXIMUM_RECORD_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement that was written down; it is never edited.

    Attributes:
        name: The file.
        task: What was run, built anew from today's catalog.
    """

    name: str
    task: Task
    measurement: Measurement
    date: str
    command: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """A record and how today's predictions compare."""

    record: Record
    rows: tuple[Row, ...]

    @property
    def agrees(self) -> bool:
        """Whether every row does, and there is at least one."""
        return bool(self.rows) and all(row.agrees for row in self.rows)


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
    write_atomically(path, json.dumps(record_data(task, measurement, command), indent=1) + "\n")


def record_files(place: Path) -> list[Path]:
    """Return the records in a folder, or the one file that was named.

    Raises:
        InvalidFileError: There is none.
    """
    found = sorted(place.rglob("*.json")) if place.is_dir() else [place]
    if not found:
        raise InvalidFileError([f"{place}: no records (*.json) in this folder"])
    return found


def read_data(path: Path) -> Mapping[str, Any]:
    """Return the JSON of a record.

    Raises:
        InvalidFileError: It cannot be read, or is no record.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAXIMUM_RECORD_BYTES)
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0][:200]
        raise InvalidFileError([f"{path}: cannot be read: {reason}"]) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InvalidFileError([f"{path}: not a record of memplan validate (schema {SCHEMA})"])
    if not all(isinstance(data.get(key), dict) for key in ("task", "measurement")):
        raise InvalidFileError([f"{path}: a record has a task and a measurement"])
    return data


def read_record(path: Path, catalog: Catalog) -> Record:
    """Return a record, its model and setup built from today's catalog."""
    data = read_data(path)
    task = task_of(data["task"], catalog, str(path))
    measurement = measurement_of(data["measurement"], str(path))
    if missing := list(missing_figures(task, measurement)):
        raise InvalidFileError([f"{path}: measurement: a record of such a run has {', '.join(missing)}; this has not"])
    return Record(str(path), task, measurement, str(data.get("date", "")), str(data.get("command", "")))


def replay_records(
    files: Iterable[Path], catalog: Catalog, say: Callable[[str], None] = lambda _: None
) -> Iterator[Replayed]:
    """Yield each record with what formula, trace and simulated allocator say of it today."""
    for path in files:
        record = read_record(path, catalog)
        say(f"replaying {record.name}")
        yield replayed(record)


def replayed(record: Record) -> Replayed:
    """Return a record beside today's predictions.

    Raises:
        InvalidFileError: An instant of the step was not recorded, or one that the step does not have was.
    """
    prediction = predict(record.task, record.measurement)
    if names := list(other_instants(prediction, record.measurement)):
        raise InvalidFileError(
            [f"{record.name}: measurement.instants: {', '.join(names)}: not both in the record and in a step"]
        )
    return Replayed(record, tuple(rows_of(record.task, prediction, record.measurement)))
