"""A search for settings, which plans with the allocator's share, as ``memplan.plan`` plans its answers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memplan.catalog.catalog import Catalog
from memplan.model.model import Model
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import Runs, simulated
from memplan.solver.search.best_first import smallest_gpu
from memplan.solver.search.suggested_settings import Request, Settings, Suggestions, suggestions

MOST_SEARCHES = 4
"""Searches with less memory than the device has, at most; in the last one nothing fits."""
LEAST_STEP = 64
"""Each has less than the one before by one part in so many of the device's memory, at least."""


def played_suggestions(
    model: Model, request: Request, device: Device, catalog: Catalog, note: Callable[[], None]
) -> Suggestions:
    """Return the best settings, or the nearest miss, as ``memplan.plan`` plans them: what fits by its share alone is no answer.

    Where that is all, the search is made again with as much less memory as shares left out, and with half as much less
    where nothing remains then. Where none of its answers fits either, the combination that needs the least is the answer
    if that fits, and the nearest miss if it does not.

    Args:
        note: Is called as :func:`suggestions` calls it, and for each answer that is simulated.
    """
    first = suggestions(model, request, device, catalog, note)
    less, low, high, missed = 0, -1, device.gpu.cuda_total_bytes, None
    for _ in range(MOST_SEARCHES):
        search = suggestions(model, request, _with_less(device, less), catalog) if less else first
        rows = [_on(device, row) for row in search.rows]
        played = [_simulated(row, note) for row in rows]
        if fitting := _fitting(played, request):
            return replace(first, rows=fitting)
        if rows:
            excess = min(own.plan.upper_bytes - row.plan.upper_bytes for own, row in zip(played, rows, strict=True))
            low, least = less, max(excess // device.count, less + high // LEAST_STEP)
        else:
            high, missed, least = less, search, 0
        less = (low + high) // 2 if missed else least
        if less <= low:
            break
    missed = missed or suggestions(model, request, _with_less(device, device.gpu.cuda_total_bytes - 1), catalog)
    return _missed(replace(missed, outcome=first.outcome, device=device), request, catalog)


def _with_less(device: Device, less_bytes: int) -> Device:
    """Return a device with so much less memory."""
    return replace(device, gpu=replace(device.gpu, cuda_total_bytes=device.gpu.cuda_total_bytes - less_bytes))


def _on(device: Device, row: Settings) -> Settings:
    """Return an answer, planned on a device with the allocator's share."""
    return replace(row, plan=CompiledPlan(row.plan.model, row.plan.setup).evaluate(device))


def _simulated(row: Settings, note: Callable[[], None]) -> Settings:
    """Return an answer as ``memplan.plan`` plans it."""
    result = replace(row, plan=simulated(row.plan))
    note()
    return result


def _fitting(rows: Sequence[Settings], request: Request) -> tuple[Settings, ...]:
    """Return those that fit, and behind them those that are TIGHT; ones that fitted by their share alone go."""
    right = ("fits",) if request.strict else ("fits", "tight")
    return tuple(row for verdict in right for row in rows if row.plan.verdict == verdict)


def _missed(search: Suggestions, request: Request, catalog: Catalog) -> Suggestions:
    """Return a search in which nothing fits by its share, with what needs the least as ``memplan.plan`` plans it: the answer, if that fits."""
    if search.least is None or search.miss is None:
        return search
    least = _on(search.device, search.least)
    compiled, runs = CompiledPlan(least.plan.model, least.plan.setup), Runs()
    least = replace(least, plan=simulated(least.plan, runs=runs))
    if fitting := _fitting((least,), request):
        return replace(search, rows=fitting)

    def fits(plan: MemoryPlan) -> bool:
        return not plan.exceeds_device and simulated(plan, least=False, runs=runs, tight=False).verdict == "fits"

    enough = smallest_gpu(compiled, least.plan, catalog, fits)
    return replace(search, miss=replace(search.miss, plan=least.plan, smallest_gpu=enough))
