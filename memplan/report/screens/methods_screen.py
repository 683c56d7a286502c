"""The answer of ``memplan fit`` without a config at a glance: the methods that people choose from."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import join
from typing import TYPE_CHECKING

from memplan.catalog.stacks import Stack
from memplan.plan.model_notes import notes_on_models
from memplan.report.canvas import Canvas
from memplan.report.document import Block
from memplan.report.plans.plan_answer import device_name, sized
from memplan.report.screens.plan_screen import card_notes
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan

GAUGE, LEAST_GAUGE = 24, 8
"""Columns of the gauge of a method, at most and at least."""
LEAST_NEEDS = 11
"""Characters that the column of what is needed has at least."""
HEADERS = ("method", "checkpointing", "needs", "", "max batch")


def methods_screen(
    rows: Sequence[tuple[MemoryPlan, int]], missing: Sequence[str], canvas: Canvas, unit: str
) -> tuple[Block, ...]:
    """Return a line for every method, with checkpointing and without.

    Args:
        rows: Plans, each with the largest micro-batch that fits.
        missing: Methods that cannot be planned.
    """
    if not rows:
        return (
            "None of the usual methods can be planned for this job; --all shows other configs, and says why not these.",
        )
    unit = unit or "GiB"
    plans = [plan for plan, _ in rows]
    more = f"Not planned: {', '.join(missing)} (--config NAME says why). " if missing else ""
    notes = dict.fromkeys(note for plan in plans for note in card_notes(plan))
    shared = any(plan.reserve_by_share and not plan.exceeds_device for plan in plans)
    estimates = "~ and max batch are estimates" if shared else "max batch is an estimate"
    least = "> counts tensors alone; " if any(plan.reserve_by_share and plan.exceeds_device for plan in plans) else ""
    words = [
        *_words(plans),
        *notes_on_models(plans),
        *notes,
        f"{least}{estimates}: check one with -b N.",
        f"{more}Every config: --all. One in full: {_command(plans[0])}",
    ]
    lines = tuple(part for line in words for part in canvas.folded(line, 0, 2))
    return (tuple(_head(plans, canvas, unit)), _lines(rows, canvas, unit), lines)


def _head(plans: Sequence[MemoryPlan], canvas: Canvas, unit: str) -> list[str]:
    first, fitting = plans[0], [plan for plan in plans if plan.verdict == "fits"]
    verdict = "FITS" if fitting else "TIGHT" if any(plan.verdict == "tight" for plan in plans) else "NO"
    ways = (
        f"{len(fitting)} of {len(plans)} ways to train it fit" if fitting else "no usual way to train it is sure to fit"
    )
    usable = format_bytes(first.usable_bytes, unit)
    name = sized(first.model, "")
    dtypes = " or ".join(dict.fromkeys(f"{plan.setup.config.compute_dtype} compute" for plan in plans))
    return [
        *canvas.between(f"{verdict:<5}  {ways}, {usable} usable", device_name(first), 7),
        *canvas.joined(
            (name, f"micro-batch {first.micro_batch_size}", f"sequence {first.sequence_length}", dtypes), indent=7
        ),
    ]


def _lines(rows: Sequence[tuple[MemoryPlan, int]], canvas: Canvas, unit: str) -> tuple[str, ...]:
    names = [plan.setup.name for plan, _ in rows]
    needs = [_needs(plan, unit) for plan, _ in rows]
    widest, wide = (max(map(len, column)) for column in ((*names, HEADERS[0]), (*needs, " " * LEAST_NEEDS)))
    rest = widest + wide + 41
    columns = min(GAUGE, canvas.width - rest)
    if columns < LEAST_GAUGE:
        return _below_names(rows, needs, wide)
    title = f"  {HEADERS[0]:<{widest}}  {HEADERS[1]}  {HEADERS[2]:>{wide}}  {'':<5}  {'':<{columns + 2}}  {HEADERS[4]}"
    lines = []
    for place, (plan, batch) in enumerate(rows):
        name = "" if place and names[place - 1] == names[place] else names[place]
        gauge = canvas.gauge(plan.needed_bytes, plan.upper_bytes, plan.usable_bytes, columns)
        verdict, kind = plan.verdict.upper(), plan.setup.checkpointing
        lines.append(
            f"  {name:<{widest}}  {kind:<13}  {needs[place]:>{wide}}  {verdict:<5}  {gauge}  {batch or '-':>9}"
        )
    return (title.rstrip(), *lines)


def _below_names(rows: Sequence[tuple[MemoryPlan, int]], needs: Sequence[str], wide: int) -> tuple[str, ...]:
    """Return the same without gauges, each method's name above its lines, for a narrow terminal."""
    lines = [f"  {'checkpoint':<10}  {HEADERS[2]:>{wide}}  {'':<5}  batch"]
    for place, (plan, batch) in enumerate(rows):
        name, verdict = plan.setup.name, plan.verdict.upper()
        lines += [name] if not place or rows[place - 1][0].setup.name != name else []
        lines.append(f"  {plan.setup.checkpointing:<10}  {needs[place]:>{wide}}  {verdict:<5}  {batch or '-':>5}")
    return tuple(lines)


def _needs(plan: MemoryPlan, unit: str) -> str:
    if plan.reserve_by_share and plan.exceeds_device:
        return ">" + format_bytes(plan.allocated_bytes + plan.allowances.context_bytes, unit)
    return ("~" if plan.reserve_by_share else "") + format_bytes(plan.needed_bytes, unit)


def _words(plans: Sequence[MemoryPlan]) -> list[str]:
    """Return what the names mean, and what is known of how each learns."""
    setups = {plan.setup.name: plan.setup for plan in plans}
    by_status: dict[str, list[str]] = {}
    for name, setup in setups.items():
        by_status.setdefault(setup.config.status, []).append(name)
    adapters = [name for name, setup in setups.items() if setup.config.adapter is not None]
    stacks = dict.fromkeys(_loop(setup.stack) for setup in setups.values())
    learnt = "; ".join(f"{', '.join(names)}: {status}" for status, names in by_status.items())
    others = "" if len(adapters) == len(setups) else "; the others: all weights"
    trained = f"{' and '.join(adapters)}: adapters alone are trained{others}" if adapters else "All weights are trained"
    layers = dict.fromkeys(setup.config.checkpointed_layers.words.strip(" ()") for setup in setups.values())
    return [
        *(f"Checkpointing full is of {some}." for some in layers if some),
        f"{trained}. Stacks: {'; '.join(stacks)}.",
        f"How they learn: {learnt}.",
        *(f"{name}: {setups[name].config.description}." for name in by_status.get("experimental", ())),
    ]


def _loop(stack: Stack) -> str:
    return f"{stack.label}, memplan's own loop" if stack.name == "bundled" else stack.label


def _command(plan: MemoryPlan) -> str:
    """Return the command that shows one method in full."""
    config, parallel = plan.setup.config, plan.setup.config.parallel
    several = ["--gpus", str(parallel.gpus), "--stack", config.stack] if parallel.gpus > 1 else []
    degrees = {"--tp": parallel.tensor, "--pp": parallel.pipeline, "--cp": parallel.context, "--ep": parallel.expert}
    divided = [part for option, degree in degrees.items() if degree > 1 for part in (option, str(degree))]
    job = [
        plan.model.source.removeprefix("catalog:"),
        *plan.device.options,
        *several,
        *divided,
        "--config",
        plan.setup.name,
    ]
    return f"memplan fit {join(job)}"
