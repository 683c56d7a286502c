"""Measured device totals against the plan's interval: ``python -m tests.survey.intervals [RECORDS]``.

A record of a run says how much its card held, or, on a card of limited memory, that it ended for want of it. The
interval of a plan with a simulated reserve has to contain the first, and its verdict has to be true of the second.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import median

from memplan.catalog.catalog import Catalog, data_directory
from memplan.documents.writing import write_answer
from memplan.measure.records.measurement_records import Record, read_record, record_files
from memplan.measure.records.prediction import DEFAULT_CAPABILITY, measured_device
from memplan.plan.memory_plan import MemoryPlan, Verdict
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulated_run import Simulation
from memplan.plan.reserve.simulation import Runs, events_of, simulated

FOLDERS = ("tests/records/cuda", "tests/records/boundary")


@dataclass(frozen=True, slots=True)
class Judged:
    """A record beside the plan of its job."""

    name: str  # The record's file
    lower_bytes: int  # Lower end of the plan's interval; likewise ``upper_bytes``
    upper_bytes: int
    measured_bytes: int | None  # What the card held; None where the run ended for want of memory
    verdict: Verdict  # The plan's, on a card with as much memory as the run could get
    context_range_bytes: int  # Width of the range of device contexts, which the interval includes

    @property
    def contained(self) -> bool:
        """Whether the interval has what was measured, where anything was."""
        return self.measured_bytes is None or self.lower_bytes <= self.measured_bytes <= self.upper_bytes

    @property
    def width(self) -> Fraction:
        """The interval's width as a share of its middle."""
        return self._share(self.upper_bytes - self.lower_bytes)

    @property
    def allocator_width(self) -> Fraction:
        """The same without the range of device contexts, which a calibrated card does not have."""
        return self._share(self.upper_bytes - self.lower_bytes - self.context_range_bytes)

    def _share(self, size: int) -> Fraction:
        return Fraction(2 * size, self.upper_bytes + self.lower_bytes)

    @property
    def true_verdict(self) -> bool:
        """Whether the verdict is no false promise: no FITS for a run that ended, no NO for one that ran."""
        return self.verdict != ("fits" if self.measured_bytes is None else "no")


def plan_of(record: Record) -> MemoryPlan:
    """Return the plan of a record's job, its reserve simulated, on the card that the run could use."""
    task, counters = record.task, record.measurement.counters
    allocator = "expandable" if "expandable_segments:True" in task.alloc_conf else "native"
    setup = replace(task.setup, config=replace(task.setup.config, allocator=allocator))  # type: ignore[arg-type]
    total = task.capacity_bytes or int(counters.get("total_bytes", 0))
    device = measured_device(str(counters.get("compute_capability", DEFAULT_CAPABILITY)), total)
    # A run on limited memory has loaded its kernels first (measure_cuda), and holds workspaces from then on.
    return simulated(CompiledPlan(task.model, setup).evaluate(device), runs=WarmRuns() if task.capacity_bytes else None)


class WarmRuns(Runs):
    """Runs in a process that was warmed up: libraries have made their workspaces before anything else."""

    def __getitem__(self, plan: MemoryPlan) -> Simulation:
        """Return the simulated run of a plan."""
        events = events_of(plan)
        early = {2 * storage for storage in events.libraries}
        codes = [*sorted(early), *[code for code in events.codes if code not in early]]
        return Simulation(replace(events, codes=codes), expandable=plan.setup.config.allocator == "expandable")


def judged(files: Iterable[Path], catalog: Catalog) -> Iterator[Judged]:
    """Yield each record of a CUDA card beside its plan."""
    for path in files:
        record = read_record(path, catalog)
        plan, measurement = plan_of(record), record.measurement
        ran = measurement.status == "measured"
        measured = measurement.totals["device"] if ran else None
        contexts = plan.allowances.upper_context_bytes - plan.allowances.least_context_bytes
        yield Judged(path.name, plan.lower_bytes, plan.upper_bytes, measured, plan.verdict, contexts)


def summary(rows: Sequence[Judged]) -> Iterator[str]:
    """Yield how many records their intervals contain, how wide these are, and what verdicts were."""
    ran = [row for row in rows if row.measured_bytes is not None]
    inside = sum(row.contained for row in ran)
    widths, alone = (_middle([row.width for row in ran]), _middle([row.allocator_width for row in ran]))
    yield f"{len(ran)} runs measured: {inside} inside the plan's interval, whose median width is {widths}"
    yield f"median width without the range of device contexts {alone}"
    ended = Counter(row.verdict for row in rows if row.measured_bytes is None)
    told = Counter(row.verdict for row in ran)
    yield f"verdicts on runs that ran: {dict(told)}; on runs that ended for want of memory: {dict(ended)}"
    for row in rows:
        if not row.contained or not row.true_verdict:
            yield f"  {row.name}: {row.lower_bytes:,} to {row.upper_bytes:,}, measured {row.measured_bytes}, {row.verdict}"


def _middle(widths: Sequence[Fraction]) -> str:
    return f"{float(median(widths)):.2%}" if widths else "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary; return 1 where a record contradicts its plan."""
    folders = list(sys.argv[1:] if arguments is None else arguments) or list(FOLDERS)
    catalog, code = Catalog(data_directory()), 0
    for folder in folders:
        rows = list(judged(record_files(Path(folder)), catalog))
        write_answer("\n".join([f"{folder}:", *summary(rows), ""]))
        code = max(code, int(not all(row.contained and row.true_verdict for row in rows)))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
