"""Records: measurements as JSON files, complete or refused, checked against what is predicted today."""

import gc
import os
import signal
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import memplan
from memplan.catalog.catalog import Catalog
from memplan.documents.escaping import json_text
from memplan.documents.opening import files_in, is_folder, shown_path
from memplan.documents.strict_json import read_json
from memplan.documents.writing import write_file
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.measure.measured import Measurement, measurement_of
from memplan.measure.records.comparison_rows import Row, rows_of
from memplan.measure.records.prediction import Prediction, predict
from memplan.measure.task import Task, task_data, task_of

SCHEMA = "memplan/record/1"
COMPONENTS = ("weights", "buffers", "master_weights", "optimizer_states", "gradients")
CUDA_COUNTERS = ("context_bytes", "total_bytes", "compute_capability")
"""Counters that predictions for a card are made with."""
TOTALS = {"cpu": ("requested",), "cuda": ("requested", "allocated", "reserved", "device")}
"""Kind of device -> totals that its allocator can be asked for: all that is compared has to be in a record."""
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
    unknown = sorted(measurement.totals.keys() - set(TOTALS[task.device]))
    if unknown:
        raise InvalidFileError(
            [f"{shown_path(path)}: measurement.totals: {unknown[0]!r} is not measured on a {task.device}"]
        )
    if missing := list(missing_figures(task, measurement)):
        names = ", ".join(missing)
        raise InvalidFileError([f"{shown_path(path)}: measurement: a record of such a run has {names}; this has not"])
    return Record(str(path), task, measurement, *(str(data.get(key, "")) for key in ("date", "command")))


def missing_figures(task: Task, measurement: Measurement) -> Iterator[str]:
    """Yield the key of each figure that a run of a task gives and a measurement lacks.

    A run that ended for want of memory has none: that it ended so is what is compared. The memory
    history is recorded on CUDA unless memory is limited or coded weights are trained, whose events are
    too many (``memplan.measure.records.measurement_plans``).
    """
    if measurement.status == "out of memory":
        return
    cuda = task.device == "cuda"
    host = ("host",) if task.setup.offloads_states else ()
    yield from _missing("components", (*COMPONENTS, *host), measurement.components)
    yield from _missing("totals", TOTALS[task.device], measurement.totals)
    history = ("history",) if not (task.capacity_bytes or task.setup.trains_codes) else ()
    yield from _missing("counters", (*CUDA_COUNTERS, *history) if cuda else (), measurement.counters)
    if not measurement.instants:
        yield "instants"


def other_instants(prediction: Prediction, measurement: Measurement) -> Iterator[str]:
    """Yield the instants that only the trace has, or only a measurement of a whole run."""
    if measurement.status != "out of memory":
        yield from sorted(prediction.traced_instants.keys() ^ measurement.instants.keys())


def _missing(section: str, names: tuple[str, ...], present: Container[str]) -> Iterator[str]:
    return (f"{section}.{name}" for name in names if name not in present)


RECORDS_PER_PROCESS = 8
"""Fewer are not worth another process, which takes seconds to load torch."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A record and how today's predictions compare."""

    record: Record
    rows: tuple[Row, ...]

    @property
    def agrees(self) -> bool:
        """Whether every row does, and there is at least one."""
        return bool(self.rows) and all(row.agrees for row in self.rows)


def replay_records(
    files: Iterable[Path], catalog: Catalog, say: Callable[[str], None] = lambda _: None
) -> Iterator[Replayed]:
    """Yield each record with what formula, trace and simulated allocator say of it today.

    Raises:
        InvalidFileError: A file is no record, or its instants are not those of a step.
        CannotAnswerError: A record cannot be traced, or the system ended a process that replays.
    """
    records = [read_record(path, catalog) for path in files]
    predictions = _predictions(records)
    for record in records:
        say(f"replaying {record.name}")
        yield _compared(record, next(predictions))


def replayed(record: Record) -> Replayed:
    """Return a record beside today's predictions.

    Raises:
        InvalidFileError: An instant of the step was not recorded, or one that the step does not have was.
    """
    return _compared(record, predict(record.task, record.measurement))


def _compared(record: Record, prediction: Prediction) -> Replayed:
    if names := list(other_instants(prediction, record.measurement)):
        raise InvalidFileError(
            [f"{record.name}: measurement.instants: {', '.join(names)}: not both in the record and in a step"]
        )
    return Replayed(record, tuple(rows_of(record.task, prediction, record.measurement)))


def _predictions(records: Sequence[Record]) -> Iterator[Prediction]:
    """Yield what is predicted for each record, in their order, by as many processes as are worth it."""
    tasks = [record.task for record in records]
    measurements = [record.measurement for record in records]
    processes = min(_cores(), len(records) // RECORDS_PER_PROCESS)
    if processes < 2:
        yield from map(predict, tasks, measurements)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _settle) as pool:
        try:
            yield from pool.map(predict, tasks, measurements)
        except BrokenProcessPool as error:
            raise CannotAnswerError(
                "a process that replays records was ended: a system that runs out of memory ends processes so; "
                "replay fewer records at once"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _cores() -> int:
    """Return the cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _settle() -> None:
    """Leave interrupts to the parent, and end when it has ended, however it did; what is imported is no garbage."""
    import torch

    gc.freeze()
    gc.set_threshold(
        100_000, 50, 1000
    )  # traces make many objects that stay: looking them through took a quarter of a replay
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
