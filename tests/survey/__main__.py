"""``python -m tests.survey``: draw jobs, compare, print what differs, shrunk to what matters."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from memplan.catalog.catalog import Catalog, data_directory
from tests.survey.drawn_jobs import INSTANT_SHARE, RESERVE_SHARE, Job, Verdict, drawn_job, on_several, verdict
from tests.survey.shrinking import shrunk


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a survey; return 1 where a job differs or crashes."""
    options = _options(arguments)
    catalog = Catalog(data_directory())
    if options.job:
        jobs = [Job(**json.loads(options.job))]
    else:
        jobs = [drawn_job(options.seed, number, catalog) for number in range(options.jobs)]
    jobs = [on_several(job, options.gpus, options.zero) for job in jobs]
    verdicts = []
    for number, job in enumerate(jobs):
        verdicts.append(verdict(job, catalog))
        sys.stderr.write(f"\r{number + 1} of {len(jobs)}")
    sys.stderr.write("\n")
    for number, result in enumerate(verdicts):
        if misses(result) or options.job:
            small = shrunk(result, catalog) if options.shrink else result
            sys.stdout.write("\n".join([f"job {number}: {small.job.text}", *lines(small), ""]))
    for line in summary(verdicts):
        sys.stdout.write(line + "\n")
    return int(any(result.outcome in ("differs", "crashed") for result in verdicts))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.survey", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400, help="a new one each day by default")
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--shrink", action="store_true", help="shrink jobs that fail to what matters")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share each job")
    parser.add_argument("--zero", type=int, default=0, help="parallel.zero_stage of these")
    parser.add_argument("--job", help="one job as JSON, as a survey prints it")
    return parser.parse_args(arguments)


def misses(result: Verdict) -> bool:
    """Tell whether something of a job is farther apart than it may be: an instant, its states, its reserve or a component."""
    apart = abs(result.reserve_share) > RESERVE_SHARE or result.component_share > INSTANT_SHARE
    return apart or result.outcome in ("differs", "crashed")


def lines(result: Verdict) -> Iterator[str]:
    """Yield what is wrong with a job."""
    if result.outcome == "refused" or result.outcome == "crashed":
        yield f"  {result.outcome}: {result.reason[:400]}"
        return
    yield f"  peak {result.formula_bytes:,} by the formula, {result.traced_bytes:,} by the trace: {result.peak_share:.4%}"
    if result.components:
        yield f"  components at the peak: {dict(result.components)}"
    if result.reserve_share:
        own, traced = result.reserved_bytes, result.traced_reserved_bytes
        yield f"  reserved {own:,} by the formula's events, {traced:,} by the trace's: {result.reserve_share:+.2%}"
    for name, size in result.differences.items():
        yield f"  {name}: {size:+,} of {result.traced[name]:,} ({abs(size) / max(1, result.traced[name]):.3%})"


def summary(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the survey's figures."""
    counts = Counter(result.outcome for result in verdicts)
    answered = [result for result in verdicts if result.outcome in ("agrees", "differs")]
    total = max(1, len(answered))
    near = sum(result.peak_share <= 0.001 for result in answered)
    yield f"{len(verdicts)} jobs: {counts['refused']} refused, {counts['crashed']} crashed, {len(answered)} answered"
    yield f"peak equal to the byte {sum(not v.peak_share for v in answered) / total:.1%}, within 0.1 % {near / total:.1%}"
    yield f"worst at the peak {max((v.peak_share for v in answered), default=0):.3%}"
    yield f"every instant within 1 % {sum(v.instant_share <= 0.01 for v in answered) / total:.1%}"
    equal = [result for result in answered if not result.peak_share]
    same = sum(not result.components for result in equal) / max(1, len(equal))
    yield f"every component at the peak equal {same:.1%} of those, the rest to {max((v.component_share for v in equal), default=0):.2%}"
    yield from reserve_lines(answered)
    yield f"persistent and host bytes equal {sum(v.exact_states for v in answered) / total:.1%}"


def reserve_lines(answered: Sequence[Verdict]) -> Iterator[str]:
    """Yield how far the reserve of the formula's events is from that of the trace's."""
    shares = [v.reserve_share for v in answered if v.traced_reserved_bytes]
    if not shares:
        return
    middle, lowest, highest = median(abs(share) for share in shares), min(shares), max(shares)
    yield f"reserved, formula's events beside the trace's: median {middle:.3%}, from {lowest:+.2%} to {highest:+.2%}"
    near = [sum(abs(share) <= limit for share in shares) / len(shares) for limit in (0.01, RESERVE_SHARE)]
    yield f"reserved within 1 % {near[0]:.1%}, within 3 % {near[1]:.1%} of {len(shares)}"


if __name__ == "__main__":
    raise SystemExit(main())
