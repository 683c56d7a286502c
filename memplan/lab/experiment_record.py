"""The record of an experiment: rows of measurements over several seeds, and the settings behind them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

import torch

from memplan.lab.training.training_record import machine_class
from memplan.report.training_records import EXPERIMENT

DIGITS = 6
"""Significant digits of a measurement in a record."""

Row = dict[str, Any]
Progress = Callable[[int, str], None]
"""Called with the parts done and a description of the last."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an experiment."""

    experiment: str  # Its name, that of its command
    settings: Mapping[str, Any]  # Everything but the seeds that decides the figures
    seeds: Sequence[int]  # Of the runs that each interval is over
    rows: Sequence[Row]  # One for each setting that was compared: its keys, and an interval for each measurement
    findings: Sequence[str]  # What follows, a sentence each, made from the rows
    limits: str  # How far that can be trusted
    computed: Sequence[Row] = ()  # Figures beside them that were not measured, if any


def record(outcome: Outcome, command: str, date: str, device: str) -> dict[str, Any]:
    """Return the record of an experiment, as a file holds it.

    Args:
        date: Of the run, ISO 8601.
    """
    return {
        "schema": EXPERIMENT,
        "experiment": outcome.experiment,
        "settings": dict(outcome.settings),
        "seeds": list(outcome.seeds),
        "rows": list(outcome.rows),
        **({"computed": list(outcome.computed)} if outcome.computed else {}),
        "findings": list(outcome.findings),
        "date": date,
        "machine": machine_class(device),
        "torch": torch.__version__,
        "command": command,
        "limits": outcome.limits,
    }


def interval(values: Sequence[float]) -> dict[str, Any] | None:
    """Return mean, lowest and highest of one value for each seed, and the values; None if one is not finite."""
    if not values or not all(map(isfinite, values)):
        return None
    rounded = [_rounded(value) for value in values]
    return {"mean": _rounded(fmean(values)), "low": min(rounded), "high": max(rounded), "values": rounded}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
