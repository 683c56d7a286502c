"""Shrinking: the smallest job that fails as a given one does, by dropping keys and reducing sizes one at a time."""

from collections.abc import Iterator, Mapping
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.errors import MemplanError
from tests.survey.drawn_jobs import Job, Verdict, verdict

SMALLER: Mapping[str, Any] = {"micro_batch_size": 1, "sequence_length": 64, "num_hidden_layers": 1, "n_layer": 1}


def shrunk(failing: Verdict, catalog: Catalog) -> Verdict:
    """Return the verdict on the smallest job that still has the same outcome."""
    changed = True
    while changed:
        changed = False
        for job in _smaller(failing.job):
            try:
                other = verdict(job, catalog)
            except MemplanError:
                continue
            if other.outcome == failing.outcome:
                failing, changed = other, True
                break
    return failing


def _smaller(job: Job) -> Iterator[Job]:
    """Yield jobs with one key less, or one smaller number."""
    for training in _less(job.training):
        yield Job(job.model, training)
    for key, value in SMALLER.items():
        if job.model.get(key, value) != value:
            yield Job({**job.model, key: value}, job.training)
        if job.training.get(key, value) != value:
            yield Job(job.model, {**job.training, key: value})


def _less(keys: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield ``keys`` without one of them, also inside nested ones."""
    for key, value in keys.items():
        if key == "description" or key in SMALLER:
            continue
        yield {name: other for name, other in keys.items() if name != key}
        if isinstance(value, Mapping) and len(value) > 1:
            yield from ({**keys, key: less} for less in _less(value))
