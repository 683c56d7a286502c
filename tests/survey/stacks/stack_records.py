"""Stack records: what a library's own code did to memory, kept so that the formula is held against it without the library.

A record is one job of a survey with the requested bytes of its trace: at each instant, by component at the peak,
what persists, and a digest of the births and deaths of the reported step, in order.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

from memplan.catalog.catalog import Catalog, data_directory
from memplan.documents.escaping import json_text
from memplan.documents.opening import read_text
from memplan.documents.writing import write_file
from memplan.errors import MemplanError
from memplan.model.spec import MixtureOfExperts
from memplan.trace.recording.trace_result import Trace
from tests.survey.drawn_jobs import model_of
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned, traced


@dataclass(frozen=True, slots=True)
class StackRecord:
    """One job and what it did."""

    job: str  # The job, as a survey prints it
    instants: Mapping[str, int]  # Requested bytes by instant
    components: Mapping[str, int]  # Requested bytes by component at the peak
    persistent_bytes: int  # What a step leaves for the next
    events: str  # Digest of the sizes of all births and deaths of the reported step, in order

    @property
    def peak_bytes(self) -> int:
        """Requested bytes at the peak."""
        return max(self.instants.values())


def recorded(job: StackJob, trace: Trace) -> StackRecord:
    """Return the record of a traced job."""
    lines = "\n".join(f"{'+' if event.allocates else '-'}{event.bytes}" for event in trace.events[trace.steady_from :])
    components = {str(name): size for name, size in sorted(trace.peak.components.items())}
    digest = sha256(lines.encode()).hexdigest()
    return StackRecord(job.text, trace.instant_bytes, components, trace.persistent_bytes, digest)


def write_records(path: Path, versions: Mapping[str, str], records: Iterable[StackRecord]) -> None:
    """Write records of one stack, with the versions of the packages that ran, to a file.

    Raises:
        InvalidFileError: It cannot be written.
    """
    data = {"versions": dict(versions), "records": [asdict(record) for record in records]}
    write_file(path, json_text(data, indent=1))


def read_records(path: Path) -> tuple[dict[str, str], tuple[StackRecord, ...]]:
    """Return the versions and the records of a file.

    Raises:
        InvalidFileError: It cannot be read.
    """
    data = json.loads(read_text(path))
    return data["versions"], tuple(StackRecord(**record) for record in data["records"])


BY_FAMILY, BY_PART = ("hands_unread", "own_positions"), ("returns_features", "wide_routers")
"""What an older 5.x of transformers does otherwise: with some families, and with towers and mixtures of experts."""


@cache
def catalog_at(transformers: str) -> Catalog:
    """Return the shipped catalog with models as an older 5.x of transformers runs them under all stacks.

    A job names no version of its own where its stack is the newest, of which newer packages may run since.
    """
    if not transformers:
        return Catalog(data_directory())
    catalog = catalog_at("")
    newest = catalog.stack("plain-loop").versions["transformers"]
    if transformers == newest or not transformers.startswith("5."):
        return catalog
    older, entries = catalog.stack(f"plain-loop@{transformers}"), dict(catalog.stacks.entries)
    for name, stack in entries.items():
        if stack.versions.get("transformers") == newest:
            models = replace(stack.models, **{key: getattr(older.models, key) for key in (*BY_FAMILY, *BY_PART)})
            cache = older.loop.cache if stack.loop.cache != "none" else "none"
            entries[name] = replace(stack, models=models, loop=replace(stack.loop, cache=cache))
    aged = Catalog(data_directory())
    aged.__dict__["stacks"] = replace(catalog.stacks, entries=entries)
    return aged


def runs_as_now(job: StackJob, transformers: str) -> bool:
    """Whether the catalog at a version surely says of a job what that of the newest one does: its models have no part in what changed."""
    stacks = [catalog_at(version).stack(job.stack) for version in (transformers, "")]
    if stacks[0] == stacks[1]:
        return True
    specs = [model_of(values).spec for values in (job.job.model, *job.job.seconds.values())]
    families = {family for stack in stacks for key in BY_FAMILY for family in getattr(stack.models, key)}
    return stacks[0].loop == stacks[1].loop and not any(
        spec.architecture in families
        or spec.tower is not None
        or any(isinstance(run.layer.feed_forward, MixtureOfExperts) for run in spec.runs)
        for spec in specs
    )


def traced_records(jobs: Iterable[StackJob], catalog: Catalog) -> Iterator[StackRecord]:
    """Yield the records of the jobs that both formula and library answer."""
    for job in jobs:
        try:
            planned(job, catalog)
            yield recorded(job, traced(job, catalog))
        except MemplanError:
            continue
