"""What a job needs, compared with what it may need."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Literal

import memplan
from memplan.budget.baseline import Baseline, Entry
from memplan.budget.budget_jobs import Basis, Job
from memplan.documents.frozen_values import dataclass
from memplan.plan.memory_plan import Verdict
from memplan.units import format_bytes

Rule = Literal["limit", "component", "increase", "cannot-evaluate"]
Status = Literal["over", "cannot", "warn", "within"]

WORST_FIRST: tuple[Status, ...] = ("over", "cannot", "warn", "within")


@dataclass(frozen=True, slots=True)
class Figures:
    """What a plan says, as far as budgets need it."""

    device: str  # Catalog name of the GPU
    verdict: Verdict  # Whether it fits there
    device_bytes: int  # With memory to spare; likewise the next
    upper_bytes: int
    needed_bytes: int  # Less, where the job runs in what little there is
    usable_bytes: int
    by_share: bool  # Whether the allocator's reserve is a share and not simulated
    components: Mapping[str, int]
    asked: str  # Hash of what the user wrote: model, config and GPU
    inputs: str  # Hash of what that resolved to

    def on(self, basis: Basis) -> int:
        """Return the device total that a baseline is compared with."""
        return self.device_bytes if basis == "expected" else self.upper_bytes

    def needed(self, basis: Basis) -> int:
        """Return the device total that limits are compared with: of a job that fits, no more than the device has."""
        if basis == "expected":
            return self.needed_bytes
        return min(self.upper_bytes, self.usable_bytes) if self.verdict == "fits" else self.upper_bytes


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as the budget wants it."""

    rule: Rule
    component: str  # The component that is over, or else the largest one
    bytes: int  # What is needed
    limit_bytes: int  # What is allowed
    message: str  # A sentence that can stand by itself


@dataclass(frozen=True, slots=True)
class Result:
    """One job on one GPU."""

    job: Job
    gpu: str
    status: Status
    figures: Figures | None  # None where the job could not be evaluated at all
    # Most that its device total may be, which is never more than the GPU has; 0 where it could not be evaluated.
    limit_bytes: int
    before: Entry | None  # Its entry in the baseline, if any
    findings: tuple[Finding, ...]  # Worst first

    @property
    def label(self) -> str:
        """The job and its GPU."""
        return f"{self.job.name} on {self.gpu}"

    @property
    def used(self) -> Fraction:
        """Largest share of a limit that is used: above 1 where one is exceeded."""
        if self.figures is None:
            return Fraction(0)
        pairs = [(f.bytes, f.limit_bytes) for f in self.findings]
        pairs.append((self.figures.needed(self.job.basis), self.limit_bytes))
        return max(Fraction(size, max(1, limit)) for size, limit in pairs)


def evaluated(job: Job, figures: Figures, baseline: Baseline | None) -> Result:
    """Return what there is to say about a job on a GPU.

    A limit beyond what the GPU has is that of the GPU: a job that does not fit there is within no budget.

    Args:
        baseline: What jobs needed before; None where there is no baseline.
    """
    before = None if baseline is None else baseline.entries.get((job.name, figures.device))
    usable = figures.usable_bytes
    limit = usable if job.limit_bytes is None else min(job.limit_bytes, usable)
    findings = [*_over_limit(job, figures, limit), *_over_components(job, figures), *_increased(job, figures, before)]
    if any(f.rule != "cannot-evaluate" for f in findings):
        status: Status = "over" if job.level == "error" else "warn"
        if status == "warn" and any(f.rule == "cannot-evaluate" for f in findings):
            status = "cannot"
    else:
        status = "cannot" if findings else "within"
    return Result(job, figures.device, status, figures, limit, before, tuple(findings))


def not_evaluated(job: Job, gpu: str, reason: str) -> Result:
    """Return the result of a job that memplan does not model."""
    return Result(job, gpu, "cannot", None, 0, None, (Finding("cannot-evaluate", "", 0, 0, reason),))


def _over_limit(job: Job, figures: Figures, limit: int) -> Iterator[Finding]:
    needed = figures.needed(job.basis)
    if needed <= limit:
        return
    largest = max(figures.components, key=lambda name: figures.components[name])
    kind = "" if job.basis == "expected" else " at the upper end"
    allowed = _limit(limit) if limit == job.limit_bytes else f"the {format_bytes(limit)} usable on {figures.device}"
    message = (
        f"needs {format_bytes(needed)}{kind}, {format_bytes(needed - limit)} over {allowed}; "
        f"largest component: {largest} with {format_bytes(figures.components[largest])}"
    )
    yield Finding("limit", largest, needed, limit, message)


def _limit(limit: int) -> str:
    return f"its limit of {format_bytes(limit)}"


def _over_components(job: Job, figures: Figures) -> Iterator[Finding]:
    over = []
    for name, limit in job.component_limits.items():
        needed = figures.components.get(name, 0)
        if needed > limit:
            message = f"{name}: {format_bytes(needed)}, {format_bytes(needed - limit)} over {_limit(limit)}"
            over.append(Finding("component", name, needed, limit, message))
    yield from sorted(over, key=lambda f: (f.limit_bytes - f.bytes, f.component))


def _increased(job: Job, figures: Figures, before: Entry | None) -> Iterator[Finding]:
    if job.increase is None:
        return
    if before is None:
        message = (
            f"max_increase of {job.increase.text} cannot be checked: the baseline has no {job.name!r} on "
            f"{figures.device} (memplan check --update-baseline writes it)"
        )
        yield Finding("cannot-evaluate", "", 0, 0, message)
        return
    old = before.device_bytes if job.basis == "expected" else before.upper_bytes
    needed, most = figures.on(job.basis), job.increase.most(old)
    if needed <= most:
        return
    grown = {name: figures.components.get(name, 0) - before.components.get(name, 0) for name in figures.components}
    most_grown = max(grown, key=lambda name: grown[name])
    message = (
        f"needs {format_bytes(needed)}, {format_bytes(needed - old)} more than the {format_bytes(old)} of the "
        f"baseline, where {job.increase.text} are allowed; grown most: {most_grown} by "
        f"{format_bytes(grown[most_grown])}"
    )
    yield Finding("increase", most_grown, needed, most, message)


def worst_first(results: Iterable[Result]) -> list[Result]:
    """Return results with those that fail first, the fullest of them before others."""
    return sorted(results, key=lambda r: (WORST_FIRST.index(r.status), -r.used, r.job.name, r.gpu, r.job.place.file))


def baseline_of(results: Iterable[Result], catalog_hash: str) -> Baseline:
    """Return the baseline that results make; those that could not be evaluated are not part of it."""
    pairs = [(result.job, result.figures) for result in results if result.figures is not None]
    entries = {(job.name, figures.device): _entry(job, figures) for job, figures in pairs}
    return Baseline(memplan.__version__, catalog_hash, entries)


def _entry(job: Job, figures: Figures) -> Entry:
    return Entry(
        name=job.name,
        gpu=figures.device,
        model=job.model,
        config=job.config,
        asked=figures.asked,
        inputs=figures.inputs,
        device_bytes=figures.device_bytes,
        upper_bytes=figures.upper_bytes,
        components=figures.components,
    )


def exit_code(results: Sequence[Result]) -> int:
    """Return 1 where a job is over budget, else 3 where one could not be evaluated, else 0.

    A job over budget is a fact whatever the others say, so that leave to ignore 3 never hides one.
    """
    statuses = {result.status for result in results}
    unknown = any(f.rule == "cannot-evaluate" for result in results for f in result.findings)
    return 1 if "over" in statuses else 3 if unknown or not results else 0
