"""``python -m tests.survey.stacks``: draw jobs for stacks, compare formula and traces, print agreement by stack and family."""

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memplan.catalog.catalog import Catalog, data_directory
from memplan.documents.writing import write_answer, write_remark
from memplan.dryrun.stack_trace import versions
from tests.survey.__main__ import lines, reserve_lines
from tests.survey.drawn_jobs import INSTANT_SHARE, PEAK_SHARE, RESERVE_SHARE, Verdict, on_several
from tests.survey.drawn_models import IMAGE_FAMILIES, LINEAR, STATE_SPACE
from tests.survey.stacks.drawn_ends import with_ends
from tests.survey.stacks.drawn_freezing import frozen_job
from tests.survey.stacks.drawn_grids import (
    adapted_job,
    along_job,
    divided_job,
    flat_job,
    layered_job,
    mixed_job,
    muon_job,
    offloaded_job,
    piped_job,
    ranked_job,
    replicated_job,
    sharded_job,
    spread_job,
    staged_job,
    staying_job,
    towered_job,
)
from tests.survey.stacks.drawn_own_models import OWN_MODELS
from tests.survey.stacks.drawn_stack_jobs import ALONE, LLAMA_LIKE, STACKS, StackJob, drawn_stack_job
from tests.survey.stacks.drawn_v1_engine import STACK as V1_ENGINE
from tests.survey.stacks.drawn_v1_engine import v1_job
from tests.survey.stacks.judged_stack_jobs import stack_verdict, with_fullest
from tests.survey.stacks.stack_records import traced_records, write_records
from tests.survey.stacks.varied_stack_jobs import (
    DEEPSPEED_STAGES,
    at_version,
    compiled_job,
    encoder_job,
    evaluated_job,
    hosted_job,
    modular_job,
    optimized_job,
    padded_job,
    under_deepspeed,
    with_images,
    with_kernels,
    with_stage,
    without_autocast,
)

Judged = list[tuple[StackJob, Verdict]]
Draw = Callable[[StackJob, int, int], StackJob]

DRAWN: Mapping[str, tuple[str, Draw]] = {
    "some_layers": ("jobs that checkpoint some layers only, which is drawn", layered_job),
    "spread": ("jobs of mixtures whose experts GPUs share, on degrees that are drawn", spread_job),
    "along": ("jobs whose sequences GPUs share, on degrees that are drawn", along_job),
    "experts": ("jobs of mixtures of experts, which are drawn", mixed_job),
    "modules": ("jobs of mixtures whose experts are modules of their own, which are drawn", modular_job),
    "compiled": ("jobs whose layers torch compiles", compiled_job),
    "some_sharded": ("jobs of which every other one is over shards, GPUs and dtype of weights drawn", sharded_job),
    "hsdp": ("jobs of groups of GPUs that each divide everything, groups and GPUs drawn", replicated_job),
    "muon": ("jobs whose matrices the bundled Muon has, the format of its momentum drawn", muon_job),
    "optimizers": ("jobs that step by another optimizer than torch's AdamW, which is drawn", optimized_job),
    "hosted": ("jobs whose layers' inputs are in host memory between forward and backward", hosted_job),
    "padded": ("jobs whose rows differ in length, which attention is given a mask for", padded_job),
    "frozen": ("jobs of which parts of the model train, which are drawn", frozen_job),
}
"""Flag -> what it says of itself, and what it draws; in this order."""
SHARDED: Mapping[str, tuple[str, Draw]] = {
    "no_reshard": ("jobs whose layers stay gathered until their backward", staying_job),
    "towers": ("jobs over shards, and whether blocks of a vision tower are units, which is drawn", towered_job),
    "staged": ("jobs of axolotl with adapters over 4-bit weights that were staged on the CPU", staged_job),
    "offload": ("jobs whose engine keeps what it can in host memory", offloaded_job),
    "evaluated": ("jobs that evaluate, and with how many rows, which is drawn", evaluated_job),
    "ranks": ("jobs as another rank than the first, which is drawn", ranked_job),
}
"""The same, after the ranks are known."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a survey; return 1 where a job differs or crashes."""
    options = _options(arguments)
    catalog = Catalog(data_directory())
    stacks = tuple(options.stack or STACKS)
    if options.job:
        jobs = [StackJob.read(options.job)]
    else:
        linear = bool(options.family) and set(options.family) <= {*LINEAR, *STATE_SPACE}
        at = options.at or ""
        numbers = range(options.jobs)
        jobs = [drawn_stack_job(options.seed, n, catalog, stacks, linear=linear, version=at) for n in numbers]
        jobs = [_drawn(job, number, options, catalog) for number, job in enumerate(jobs)]
    if not options.deepspeed:
        jobs = [replace(job, job=on_several(job.job, options.gpus, options.zero)) for job in jobs]
    for name, (_, drawn) in SHARDED.items():
        if getattr(options, name) and not options.job:
            jobs = [drawn(job, options.seed, number) for number, job in enumerate(jobs)]
    chosen = dict(pair.split("=", 1) for pair in options.kernel or ())
    jobs = [with_kernels(job, chosen) for job in jobs] if chosen else jobs
    jobs = [at_version(job, options.at) for job in jobs] if options.at else jobs
    jobs = [job for job in jobs if not options.family or job.family in options.family]
    jobs = [job for job in jobs if not options.method or job.method in options.method]
    if options.record:
        write_records(options.record, versions(stacks[0]), traced_records(jobs, catalog))
        return 0
    judged: Judged = []
    for number, job in enumerate(jobs):
        verdict = stack_verdict(job, catalog)
        judged.append((job, verdict))
        write_remark(f"\r{number + 1} of {len(jobs)}")
        wrong = verdict.outcome in ("differs", "crashed") or abs(verdict.reserve_share) > RESERVE_SHARE
        if options.job or (options.verbose and wrong):
            write_answer("\n".join([f"job {number}: {job.text}", *lines(verdict), ""]))
    write_remark("\n")
    for line in summary(judged):
        write_answer(line + "\n")
    return int(any(verdict.outcome in ("differs", "crashed") for _, verdict in judged))


def _drawn(job: StackJob, number: int, options: argparse.Namespace, catalog: Catalog) -> StackJob:
    """Return a job of a survey with what the options ask to be drawn besides."""
    seed = options.seed
    job = v1_job(job, shards=options.zero > 0) if job.stack == V1_ENGINE else job
    job = encoder_job(job, seed, number, catalog) if options.encoders else job
    job = with_stage(job, seed, number, tuple(options.stage)) if options.stage else job
    families = tuple(options.family or IMAGE_FAMILIES)
    job = with_images(job, seed, number, catalog, families) if options.images else job
    if options.deepspeed:
        stages = (options.zero,) if options.zero else (1, 2, 3, 3) if options.offload else DEEPSPEED_STAGES
        job = under_deepspeed(job, seed, number, stages)
    job = divided_job(job, seed, number) if options.divided else job
    job = with_fullest(piped_job(job, seed, number), number, catalog) if options.piped else job
    for name, (_, drawn) in DRAWN.items():
        job = drawn(job, seed, number) if getattr(options, name) else job
    job = with_ends(job, seed, number, catalog) if options.ends else job
    if options.fsdp1:
        job = flat_job(job, seed, number, adapted=options.adapters)
    elif options.adapters:
        job = adapted_job(job, seed, number)
    return without_autocast(job) if options.no_autocast else job


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.survey.stacks", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="a new one each day by default")
    parser.add_argument("--jobs", type=int, default=250)
    parser.add_argument(
        "--stack",
        action="append",
        choices=(*STACKS, *ALONE, *LLAMA_LIKE, *OWN_MODELS),
        help="only this stack; may be repeated",
    )
    parser.add_argument("--family", action="append", help="only models of this family; may be repeated")
    parser.add_argument("--method", action="append", help="only full, lora, nf4, nf4-dq or llm-int8")
    parser.add_argument("--stage", action="append", help="jobs of this preference method instead; may be repeated")
    parser.add_argument(
        "--kernel", action="append", metavar="KEY=VALUE", help="a kernel of every job instead; may be repeated"
    )
    parser.add_argument("--verbose", action="store_true", help="print every job that differs, or whose reserve does")
    parser.add_argument(
        "--at", metavar="VERSION", help="an older version of the stack, which has to be the one installed"
    )
    parser.add_argument("--record", type=Path, help="write what the jobs' own code did to this file, of one stack")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share each job")
    parser.add_argument("--zero", type=int, default=0, help="parallel.zero_stage of these, or of DeepSpeed's")
    parser.add_argument("--deepspeed", action="store_true", help="jobs as DeepSpeed runs them, on ranks that are drawn")
    parser.add_argument(
        "--divided", action="store_true", help="jobs whose matrices GPUs share, on degrees that are drawn"
    )
    parser.add_argument(
        "--piped", action="store_true", help="jobs over pipelines, on degrees and schedules that are drawn"
    )
    parser.add_argument(
        "--fsdp1", action="store_true", help="jobs that FullyShardedDataParallel shards, on ranks drawn"
    )
    parser.add_argument("--adapters", action="store_true", help="jobs with adapters over shards, all of them")
    parser.add_argument(
        "--no-autocast", action="store_true", help="jobs over 16-bit weights without mixed precision, all of them"
    )
    parser.add_argument("--encoders", action="store_true", help="jobs of encoders, drawn with their models")
    parser.add_argument("--images", action="store_true", help="jobs whose rows hold images, drawn with their models")
    parser.add_argument("--ends", action="store_true", help="jobs whose ends or norms train beside adapters, drawn too")
    for name, (told, _) in {**DRAWN, **SHARDED}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=told)
    parser.add_argument("--job", help="one job as JSON, as a survey prints it")
    return parser.parse_args(arguments)


def summary(judged: Judged) -> Iterator[str]:
    """Yield agreement by stack, method and family, and what was refused, with its reason."""
    yield f"{'':24}{'jobs':>6}{'within 0.1 %':>14}{'worst':>9}{'instants':>10}{'persistent':>12}"
    yield _row("all", judged)
    for title, of in (("stack", "stack"), ("stage", "stage"), ("method", "method"), ("family", "family")):
        groups: dict[str, Judged] = defaultdict(list)
        for job, verdict in judged:
            groups[getattr(job, of)].append((job, verdict))
        for name, group in sorted(groups.items()):
            yield _row(f"{title} {name}", group)
    yield from reserve_lines([verdict for _, verdict in judged if verdict.outcome in ("agrees", "differs")])
    reasons = Counter(_reason(verdict) for _, verdict in judged if verdict.outcome in ("refused", "crashed"))
    for reason, count in reasons.most_common():
        yield f"{count:5} {reason}"


def _row(name: str, judged: Judged) -> str:
    answered = [verdict for _, verdict in judged if verdict.outcome in ("agrees", "differs")]
    if not answered:
        return f"{name:24}{0:>6}"
    near = _share(verdict.peak_share <= PEAK_SHARE for verdict in answered)
    worst = max(verdict.peak_share for verdict in answered)
    instants = _share(verdict.instant_share <= INSTANT_SHARE for verdict in answered)
    exact = _share(not verdict.differences.get("persistent") for verdict in answered)
    return f"{name:24}{len(answered):>6}{near:>14.1%}{worst:>9.2%}{instants:>10.1%}{exact:>12.1%}"


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _reason(verdict: Verdict) -> str:
    return f"{verdict.outcome}: {verdict.reason[:160]}"


if __name__ == "__main__":
    raise SystemExit(main())
