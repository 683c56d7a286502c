"""Records of training, and what others have published: as tables, and as the line that a status rests on."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from memplan.documents.escaping import escaped_json
from memplan.documents.opening import files_in, is_file
from memplan.documents.strict_json import read_json
from memplan.errors import InvalidFileError
from memplan.report.document import Document, Table
from memplan.units import format_bytes, format_count

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


PARAMETERS, STEPS, BATCH = 869_504, 300, 16
"""Of most runs that are shipped."""


def list_document(folder: Path) -> Document:
    """Return all records that are shipped: runs of configs, and experiments."""
    records = {path.stem: read_json(path) for path in files_in(folder, "*.json")}
    runs = [(name, record) for name, record in records.items() if record.get("schema") == SCHEMA]
    others = [(name, record) for name, record in records.items() if name.startswith("lab-")]
    runs.sort(key=lambda item: (_size(item[1]), _mean(item[1])))
    trained = Table(
        ("record", ">loss", ">against baseline", ">bytes", "verdict", "settings"),
        tuple(_listed(name, record) for name, record in runs),
        f"Configs in training: {PARAMETERS:,} parameters, {STEPS} steps of {BATCH} x 128 bytes, unless said",
    )
    tried = Table(
        ("record", "seeds", "date", "first finding"),
        tuple(
            (name.removeprefix("lab-"), str(len(record["seeds"])), record["date"], record["findings"][0])
            for name, record in others
        ),
        "Experiments",
    )
    data = [{"name": name, **_summary(record)} for name, record in [*runs, *others]]
    against = "Baselines: muon-fp32-weights under Muon, fp32-adamw under AdamW, and those of the same size, batch and steps; seed by seed."
    last = f"{len(runs)} records of training, {len(others)} of experiments; one in full: memplan lab show RECORD"
    return Document({"schema": "memplan/list/1", "rows": data}, (trained, against, tried, last))


def _size(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return what runs that can be compared have in common; the usual ones come first."""
    training = record["training"]
    own = (record["model"]["parameters"], -training["micro_batch_size"], -training["steps"])
    return (0, 0, 0) if own == (PARAMETERS, -BATCH, -STEPS) else own


def _mean(record: Mapping[str, Any]) -> float:
    loss = record["validation_loss"]
    return float("inf") if loss is None else float(loss["mean"])


def _listed(name: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    loss, gap = record["validation_loss"], record["gap_percent"]
    return (
        name.removeprefix("train-"),
        "not finite" if loss is None else f"{loss['mean']:.3f}",
        "" if gap is None else percent_range(gap),
        format_bytes(sum(size["measured_bytes"] for size in record["bytes"].values()), "MiB"),
        record["verdict"],
        ", ".join(_unusual(record)),
    )


def _unusual(record: Mapping[str, Any]) -> list[str]:
    """Return in what a run differs from most: its rounding, Muon's options, its size, its batch, its steps."""
    training, parameters = record["training"], record["model"]["parameters"]
    return [
        *([f"{training['rounding']} rounding"] if training["rounding"] != "stochastic" else []),
        *(f"{key} {value}" for key, value in training["matrix_options"].items()),
        *([f"{format_count(parameters)}"] if parameters != PARAMETERS else []),
        *([f"batch {training['micro_batch_size']}"] if training["micro_batch_size"] != BATCH else []),
        *([f"{training['steps']} steps"] if training["steps"] != STEPS else []),
    ]


def _summary(record: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("schema", "config", "settings", "verdict", "validation_loss", "gap_percent", "experiment", "seeds", "date")
    return {key: record[key] for key in keys if key in record}


def record_text(record: dict[str, Any]) -> str:
    """Return a record as a file holds it: short lists on one line."""
    text = json.dumps(record, indent=1, allow_nan=False, ensure_ascii=False)
    points = [point for run in record["runs"] for point in run["curve"]]
    for point in points:
        text = text.replace(json.dumps(point, indent=1).replace("\n", "\n    "), json.dumps(point))
    return escaped_json(text) + "\n"


def training_record_document(record: dict[str, Any], unit: str) -> Document:
    """Return runs, bytes and verdict of a record."""
    runs = Table(
        (">seed", ">loss before", ">training loss", ">validation loss", ">tokens/s"),
        tuple(
            (
                str(run["seed"]),
                _number(run["first_validation_loss"]),
                _number(run["curve"][-1][1]),
                _number(run["validation_loss"]),
                f"{run['tokens_per_second']:,}",
            )
            for run in record["runs"]
        ),
        "Runs",
    )
    sizes = record["bytes"].items()
    rows = [(name, item["predicted_bytes"], item["measured_bytes"]) for name, item in sizes]
    component_bytes = Table(
        ("component", ">planned", ">measured", ">difference"),
        tuple(
            (name, format_bytes(p, unit), format_bytes(m, unit), f"{m - p:+,} B" if m - p else "0 B")
            for name, p, m in rows
        ),
        "Bytes",
    )
    seed = record["runs"][0]
    curve = Table(
        (">step", ">training loss"),
        tuple((str(step), _number(loss)) for step, loss in seed["curve"][:: max(1, len(seed["curve"]) // 10)]),
        f"Loss, seed {seed['seed']}",
    )
    return Document(record, (curve, runs, component_bytes, evidence_line(record)))


def largest_run_document(record: dict[str, Any], unit: str) -> Document:
    """Return a run that was held to so much memory: its loss, its bytes, and whether it did what was planned.

    Exit code 1 where the loss did not fall or bytes of a component were not the planned ones.
    """
    document, memory = training_record_document(record, unit), record["memory"]
    resident, capacity = memory["reserved"]["measured_bytes"] is not None, format_bytes(memory["capacity_bytes"], unit)
    names = {"capacity": "held to" if resident else "capacity", "expected": "expected", "upper": "worst case"}
    rows = [(name, memory[f"{key}_bytes"], None) for key, name in names.items()]
    rows += [(name, *memory[name].values()) for name in ("requested", "reserved")]
    table = Table(
        ("of the GPU", ">planned", ">measured"),
        tuple((name, format_bytes(p, unit), "" if m is None else format_bytes(m, unit)) for name, p, m in rows),
        "Memory, without the first step",
    )
    run, sizes = record["runs"][0], record["bytes"].values()
    fell = run["validation_loss"] is not None and run["validation_loss"] < run["first_validation_loss"]
    equal = all(size["predicted_bytes"] == size["measured_bytes"] for size in sizes)
    model, parameters = record["model"]["architecture"], record["model"]["parameters"]
    where = (
        f"within {capacity}" if resident else f"on a CPU, not held to {capacity} (planned: {memory['verdict'].upper()})"
    )
    said = (
        f"{'Trained' if fell and equal else 'Not as planned'}: {format_count(parameters)} parameters of {model}, "
        f"{record['training']['steps']} steps {where}; the loss "
        f"{'fell' if fell else 'did not fall'}, bytes are {'the planned ones' if equal else 'not the planned ones'}."
    )
    blocks = (*document.blocks[:-1], table, said)
    return Document(record, blocks, exit_code=0 if fell and equal else 1)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
