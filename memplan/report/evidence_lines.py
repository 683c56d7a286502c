"""What the evidence behind a status says, in a line: a record of real training, or what others have published."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from memplan.documents.opening import is_file
from memplan.documents.strict_json import read_json
from memplan.errors import InvalidFileError

SCHEMA = "memplan/evidence/1"
LITERATURE = "memplan/literature/1"
EXPERIMENT = "memplan/experiment/1"


def read_evidence(path: Path, schemas: Collection[str] = (SCHEMA,)) -> dict[str, Any]:
    """Return a record of training, or of another of ``schemas``.

    Raises:
        InvalidFileError: The file is missing, or holds something else.
    """
    data = read_json(path)
    if not isinstance(data, dict) or data.get("schema") not in schemas:
        raise InvalidFileError([f"{path}: not a record of training ({SCHEMA})"])
    return data


def evidence_path(name: str, root: Path) -> Path:
    """Return the file that a config means by ``evidence: name``, below the folder of the shipped data."""
    return root / "configs" / "evidence" / f"{name}.json"


def evidence_lines(name: str, root: Path) -> tuple[str, ...]:
    """Return where a config's evidence is and what it says; only the name where it is no record of ours."""
    path = evidence_path(name, root)
    if not is_file(path):
        return (f"Evidence: {name}",)
    record = read_evidence(path, tuple(LINES))
    return f"Evidence in {path}", f"  {LINES[record['schema']](record)}"


def literature_line(record: Mapping[str, Any]) -> str:
    """Return what others have published of a method, in a sentence for each claim."""
    said = "; ".join(f"{claim['claim']} ({claim['url']}, {claim['where']})" for claim in record["claims"])
    return f"{record['verdict']}: {said}. {record['limits']}"


def evidence_line(record: Mapping[str, Any]) -> str:
    """Return verdict and figures of a record, in a sentence."""
    loss, gap = record["validation_loss"], record["gap_percent"]
    figures = "no finite loss" if loss is None else f"validation loss {_range(loss, '.3f')}"
    against = "" if gap is None else f", {_range(gap, '+.1f')} % against {_name(record['baseline'])}"
    model, training = record["model"], record["training"]
    how = f"{training['rounding']} rounding" + (
        f", momentum {training['momentum_format']}" if training["momentum_format"] else ""
    )
    return (
        f"{record['verdict']}: {figures}{against}; {_count(len(record['runs']), 'seed')}, {training['steps']} steps, "
        f"{model['parameters']:,} parameters, {how}; {record['limits']}"
    )


def percent_range(gap: Mapping[str, float]) -> str:
    """Return a mean gap and its range over seeds, such as ``+4.4 % (+3.0, +6.1)``."""
    return f"{gap['mean']:+.1f} % ({gap['low']:+.1f}, {gap['high']:+.1f})"


def experiment_line(record: Mapping[str, Any]) -> str:
    """Return what an experiment found, and how far that goes."""
    return f"{' '.join(record['findings'])} Limits: {record['limits']}"


LINES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    SCHEMA: evidence_line,
    LITERATURE: literature_line,
    EXPERIMENT: experiment_line,
}
"""Schema of a record -> what says it in a line."""


def _range(values: Mapping[str, float], form: str) -> str:
    return f"{values['mean']:{form}} ({values['low']:{form}} to {values['high']:{form}})"


def _name(baseline: Mapping[str, Any]) -> str:
    return " ".join([baseline["config"], *(f"--set {setting}" for setting in baseline["settings"])])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
