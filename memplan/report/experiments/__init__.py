"""Records of experiments as tables and pictures: one module for each experiment, with ``blocks`` and ``figure``."""

import json
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from memplan.documents.escaping import escaped_json
from memplan.documents.opening import files_in, is_file, path_kind
from memplan.documents.strict_json import read_json
from memplan.errors import InvalidFileError, UnknownNameError, match_hint, printable
from memplan.report.document import Document, Table
from memplan.report.figures import Figure
from memplan.report.training_records import EXPERIMENT
from memplan.report.training_records import SCHEMA as TRAINING


class Reporter(Protocol):
    """What a module of this package has."""

    def blocks(self, record: dict[str, Any]) -> tuple[Table | str, ...]:
        """Return the tables of a record, without its findings."""

    def figure(self, record: dict[str, Any]) -> Figure:
        """Return the picture of a record."""


def reporter_of(record: dict[str, Any]) -> Reporter:
    """Return the module that reports such a record.

    Raises:
        InvalidFileError: There is no such experiment.
    """
    name = str(record.get("experiment", "")).replace("-", "_")
    module = f"{__name__}.{name}_record"
    if not name.isidentifier() or find_spec(module) is None:
        raise InvalidFileError([f"experiment: {printable(name)!r} is not one that memplan has"])
    return cast("Reporter", import_module(module))


def read_record(given: str, folder: Path) -> dict[str, Any]:
    """Return a record of an experiment or of training, by its path or by the name of one that is shipped.

    Args:
        given: A path, or a name such as ``orthogonality`` or ``train-tier1``.
        folder: Where the shipped records are.

    Raises:
        UnknownNameError: Neither a file nor a shipped record.
        InvalidFileError: The file holds something else.
    """
    shipped = {
        path.stem.removeprefix(kind): path for kind in ("train-", "lab-") for path in files_in(folder, f"{kind}*.json")
    }
    path = shipped.get(given.removeprefix("lab-").removeprefix("train-"), Path(given))
    if path_kind(path) == "nothing":
        name = printable(given)
        raise UnknownNameError(f"record {name!r}: no such file, and no shipped record{match_hint(name, shipped)}")
    record = read_json(path)
    if not isinstance(record, dict) or record.get("schema") not in (EXPERIMENT, TRAINING):
        raise InvalidFileError([f"{path}: not a record of an experiment ({EXPERIMENT}) or of training ({TRAINING})"])
    return record


def shipped_record(name: str, folder: Path) -> dict[str, Any] | None:
    """Return the shipped record of an experiment, or None where there is none."""
    path = folder / f"lab-{name}.json"
    return read_record(str(path), folder) if is_file(path) else None


def record_document(record: dict[str, Any]) -> Document:
    """Return tables and findings of a record."""
    seeds = len(record["seeds"])
    how = f"{seeds} {'seed' if seeds == 1 else 'seeds'}; {record['machine']}; torch {record['torch']}; {record['date']}"
    said = tuple(f"- {finding}" for finding in record["findings"])
    blocks = (*reporter_of(record).blocks(record), (how, f"Limits: {record['limits']}"), said)
    return Document(record, tuple(block for block in blocks if block))


def record_text(record: dict[str, Any]) -> str:
    """Return a record as a file holds it: a row on a line."""
    lists = [key for key in ("rows", "computed") if record.get(key)]
    text = json.dumps({**record, **{key: [] for key in lists}}, indent=1, allow_nan=False, ensure_ascii=False)
    for key in lists:
        lines = ",\n  ".join(json.dumps(row, allow_nan=False, ensure_ascii=False) for row in record[key])
        text = text.replace(f'"{key}": []', f'"{key}": [\n  {lines}\n ]', 1)
    return escaped_json(text) + "\n"


def interval_text(value: dict[str, Any] | None, form: str = ".3g") -> str:
    """Return a mean and its range, such as ``0.145 (0.139 to 0.150)``; the mean alone where all are equal."""
    if value is None:
        return "not finite"
    mean, low, high = (format(value[key], form) for key in ("mean", "low", "high"))
    return mean if low == high == mean else f"{mean} ({low} to {high})"


def row_of(rows: Iterable[dict[str, Any]], /, **keys: Any) -> dict[str, Any] | None:
    """Return the first row with these values, or None."""
    return next((row for row in rows if all(row.get(key) == value for key, value in keys.items())), None)
