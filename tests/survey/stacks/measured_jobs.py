"""``python -m tests.survey.stacks.measured_jobs``: jobs that a library itself trains on this machine's GPU, beside the plan.

Each job of a survey runs in a process of its own, three steps of it, with random weights. On the CPU, whose kernels are
others, it shows that the loop runs, and no more.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from memplan.catalog.catalog import Catalog, data_directory
from memplan.documents.escaping import json_text
from memplan.documents.writing import write_answer, write_file, write_remark
from memplan.errors import MemplanError
from memplan.measure.measured import Measurement
from memplan.measure.process import cuda_is_usable, measure
from memplan.plan.memory_plan import MemoryPlan
from memplan.plan.reserve.simulation import simulated
from memplan.units import parse_bytes
from tests.survey.drawn_jobs import Job
from tests.survey.stacks.drawn_stack_jobs import LIGER, STACKS, StackJob, drawn_stack_job
from tests.survey.stacks.judged_stack_jobs import job_inputs, planned
from tests.survey.stacks.measured_stack import StackTask

DEVICES = ("cuda", "cpu")
FIGURES = ("requested", "allocated", "reserved")


@dataclass(frozen=True, slots=True)
class MeasuredJob:
    """A job that ran."""

    job: StackJob  # The job, as a survey prints it
    planned: dict[str, int]  # Peaks by the plan: ``requested``, ``allocated`` and ``reserved`` bytes
    measurement: Measurement  # What the device had

    def share(self, figure: str) -> float | None:
        """Return by how much of what was measured the plan is above it, where that was measured."""
        measured = self.measurement.totals.get(figure, 0)
        return (self.planned[figure] - measured) / measured if measured else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run jobs; return 1 where one ended badly, or none ran."""
    options = _options(arguments)
    catalog = Catalog(data_directory())
    stacks = tuple(options.stack or STACKS)
    jobs = [drawn_stack_job(options.seed, number, catalog, stacks) for number in range(options.jobs)]
    jobs = [StackJob.read(options.job)] if options.job else jobs
    jobs = [_without_liger(job) for job in jobs if not options.method or job.method in options.method]
    jobs = [replace(job, card=_card(options.device) or job.card) for job in jobs]
    ran: list[MeasuredJob] = []
    for job in jobs:
        try:
            plan = simulated(planned(job, catalog))
            if options.most and plan.requested_bytes > options.most:
                continue
            ran.append(_measured(job, plan, catalog, options))
        except MemplanError as error:
            write_remark(f"refused: {error}\n")
            continue
        write_answer(_line(ran[-1]) + "\n")
    for line in summary(ran):
        write_answer(line + "\n")
    if options.record:
        rows = [{**asdict(one), "job": one.job.text} for one in ran]
        write_file(options.record, json_text({"alloc_conf": options.alloc_conf, "jobs": rows}, indent=1))
    return int(not ran or any(one.measurement.status != "measured" for one in ran))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.survey.stacks.measured_jobs", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="a new one each day by default")
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--stack", action="append", choices=STACKS, help="only this stack; may be repeated")
    parser.add_argument("--method", action="append", help="only full, lora, nf4, nf4-dq or llm-int8")
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument(
        "--most", type=parse_bytes, metavar="SIZE", help="leave jobs out that ask for more, such as 1GiB"
    )
    parser.add_argument(
        "--capacity", type=parse_bytes, default=0, metavar="SIZE", help="memory that each process may take of the GPU"
    )
    parser.add_argument("--alloc-conf", default="", help="as PYTORCH_CUDA_ALLOC_CONF, of the processes that train")
    parser.add_argument(
        "--record", type=Path, help="write the jobs, what was planned, and what was measured, to this file"
    )
    parser.add_argument("--job", help="one job as JSON, as a survey prints it")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not cuda_is_usable():
        parser.error("argument --device: torch can use no CUDA device here; --device cpu shows that the loops run")
    return options


def _card(device: str) -> str:
    """Return the compute capability of the device; nothing for the CPU."""
    import torch

    return ".".join(map(str, torch.cuda.get_device_capability())) if device == "cuda" else ""


def _without_liger(job: StackJob) -> StackJob:
    """Return a job with its stack's own kernels for those of Liger, which a real run would have to install."""
    training = dict(job.job.training)
    kernels = {key: value for key, value in training.get("kernels", {}).items() if LIGER.get(key) != value}
    return replace(job, job=Job(job.job.model, {**training, "kernels": kernels}))


def _measured(job: StackJob, plan: MemoryPlan, catalog: Catalog, options: argparse.Namespace) -> MeasuredJob:
    """Run a job in a process of its own."""
    inputs = replace(job_inputs(job, catalog), device=options.device)
    task = StackTask(job.stack, inputs, options.alloc_conf, options.capacity)
    peaks = {name: int(getattr(plan, f"{name}_bytes")) for name in FIGURES}
    return MeasuredJob(job, peaks, measure(task, lambda text: write_remark(f"{text}\n")))


def _line(one: MeasuredJob) -> str:
    job, measurement = one.job, one.measurement
    name = f"{job.stack:14}{job.method:10}{job.family:14}"
    if measurement.status != "measured":
        return f"{name} {measurement.status}, planned {one.planned['reserved']:,}: {measurement.reason}"
    shares = ((figure, one.share(figure)) for figure in FIGURES)
    parts = [f"{figure} {share:+.3%}" for figure, share in shares if share is not None]
    return f"{name} {measurement.totals['requested']:>15,}  {'  '.join(parts)}"


def summary(ran: Sequence[MeasuredJob]) -> Iterator[str]:
    """Yield how far plans and measurements are apart."""
    yield f"{len(ran)} jobs, {sum(one.measurement.status == 'measured' for one in ran)} of them measured"
    for figure in FIGURES:
        shares = [share for one in ran if (share := one.share(figure)) is not None]
        if shares:
            sizes: list[Any] = [abs(share) for share in shares]
            yield (
                f"{figure:10} mean {mean(sizes):.2%}, median {median(sizes):.2%}, "
                f"from {min(shares):+.2%} to {max(shares):+.2%}"
            )


if __name__ == "__main__":
    raise SystemExit(main())
