"""Records beside what is predicted today; many are predicted side by side."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

from memplan.catalog.catalog import Catalog
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.measure.records.comparison_rows import Row, rows_of
from memplan.measure.records.completeness import other_instants
from memplan.measure.records.measurement_records import Record, read_record
from memplan.measure.records.prediction import Prediction, predict

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
    """Leave interrupts to the parent, and end when it has ended, however it did."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
