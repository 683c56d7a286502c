"""The answers of ``memplan max``, ``where`` and ``compare`` at a glance: a bar or a gauge for every row that is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import log2
from typing import TYPE_CHECKING

from memplan.plan.model_notes import notes_on_models
from memplan.report.canvas import Canvas
from memplan.report.document import Block, Table
from memplan.report.largest.largest_value_answer import is_simulated
from memplan.report.plans.plan_answer import BY_SHARE, of_each
from memplan.report.plans.recommend_answer import Released, model_words
from memplan.training.resolved import TrainingSetup
from memplan.units import format_bytes, format_count

if TYPE_CHECKING:
    from memplan.plan.memory_plan import Device, MemoryPlan
    from memplan.plan.sizes.largest_model import LargestModel
    from memplan.plan.sizes.placements import Placement
    from memplan.plan.suggested.suggested_configs import SuggestedConfigs
    from memplan.report.largest.largest_model_answer import Prices
    from memplan.solver.largest_per_device import Largest

MOST_ROWS = 20
MOST_PLACES = 12
NARROWEST_BAR, WIDEST_BAR = 5, 32
Row = tuple[tuple[str, ...], str]
"""Cells of a row, and the bar or gauge behind them."""


def usual_devices(devices: Sequence[Device]) -> set[str]:
    """Return a card of every size of memory, in steps of half a doubling, where there are more than a screen holds.

    Of equal sizes the one that has bf16 and the most short names is shown, then the one with the highest bandwidth.
    """
    names = {device.name for device in devices}
    if len(names) <= MOST_ROWS:
        return names
    best: dict[int, Device] = {}
    for device in devices:
        if not device.gpu.unified_memory:
            size = round(2 * log2(device.gpu.memory_bytes))
            best[size] = max(best.get(size, device), device, key=_commonness)
    return {device.name for device in best.values()}


def _commonness(device: Device) -> tuple[bool, int, int, str]:
    gpu = device.gpu
    return "bf16" in gpu.dense_flops, len(gpu.aliases), gpu.bandwidth_bytes_per_second, gpu.compute_capability or ""


def max_screen(
    models: Sequence[LargestModel], canvas: Canvas, unit: str, head: str, sentence: str
) -> tuple[Block, ...]:
    """Return the largest model for the cards of every size: by config, or by name where there is one config or one card."""
    usual = usual_devices([row.device for row in models])
    shown = [row for row in models if row.device.name in usual]
    setups = {row.setup.name: row.setup for row in models}
    most = max((row.largest_fitting_parameters for row in shown), default=0)
    by_device: dict[str, list[LargestModel]] = {}
    for row in sorted(shown, key=lambda row: (-row.device.usable_bytes(0), row.device.name)):
        by_device.setdefault(row.device.counted_name, []).append(row)

    def bar(rows: Sequence[LargestModel], columns: int) -> str:
        return canvas.bar(max(row.largest_fitting_parameters for row in rows), most, columns)

    lines: list[tuple[tuple[str, ...], Sequence[LargestModel]]]
    if len(by_device) == 1:
        lines = [(("config", "largest model"), ())]
        lines += [((row.setup.label, _named(row)), [row]) for rows in by_device.values() for row in rows]
        head = f"{next(iter(by_device))}, {_usable(shown[0], unit)} usable; {head[0].lower()}{head[1:]}"
    elif len(setups) == 1:
        lines = [(("gpu", ">usable", "largest model"), ())]
        lines += [((name, _usable(rows[0], unit), _named(rows[0])), rows) for name, rows in by_device.items()]
        head = f"{models[0].setup.label}: {head}"
    else:
        lines = [(("gpu", *(f">{name}" for name in setups)), ())]
        lines += [((name, *map(_size, rows)), rows) for name, rows in by_device.items()]
    cells = [line for line, _ in lines]
    columns = _room(cells, canvas)
    table = _aligned([(line, bar(rows, columns) if rows else "") for line, rows in lines], canvas)
    left = len({row.device.name for row in models}) - len(usual)
    more = f"{left} more GPUs, and upper bounds: --all." if left else "Upper bounds: -v."
    by_share = [] if all(row.simulated or not row.largest_fitting for row in models) else [BY_SHARE]
    words = [*_meanings(list(setups.values())), more, *by_share, sentence]
    return (*_folded([head], canvas), table, *_folded(words, canvas))


def _usable(row: LargestModel, unit: str) -> str:
    return format_bytes(row.device.usable_bytes(row.setup.reserve_bytes), unit)


def _size(row: LargestModel) -> str:
    return format_count(row.largest_fitting_parameters) if row.largest_fitting else "-"


def _named(row: LargestModel) -> str:
    return f"{row.largest_fitting} ({_size(row)})" if row.largest_fitting else "none"


def _meanings(setups: Sequence[TrainingSetup]) -> list[str]:
    """Return what configs are that are no household names."""
    return [
        f"{setup.name} (learning: {setup.config.status}): {setup.config.description}."
        for setup in setups
        if setup.config.status not in ("proven", "works")
    ]


def values_screen(
    rows: Sequence[Largest], setup: TrainingSetup, canvas: Canvas, what: str, head: str, sentence: str
) -> tuple[Block, ...]:
    """Return the largest value for the cards of every size."""
    usual = usual_devices([row.device for row in rows])
    shown = sorted(
        (row for row in rows if row.device.name in usual), key=lambda row: (-row.fits.value, row.device.name)
    )
    most = max((row.fits.value for row in shown), default=0)
    cells = [("gpu", f">{what} that fits"), *((of_each(row.device, setup), f"{row.fits.value:,}") for row in shown)]
    columns = _room(cells, canvas)
    bars = ["", *(canvas.bar(row.fits.value, most, columns) for row in shown)]
    left = len({row.device.name for row in rows}) - len(usual)
    more = [f"{left} more GPUs: --all."] if left else []
    return (
        *_folded([head], canvas),
        _aligned(list(zip(cells, bars, strict=True)), canvas),
        *_folded([*more, *([] if all(map(is_simulated, rows)) else [BY_SHARE]), sentence], canvas),
    )


def where_screen(
    rows: Sequence[Placement], canvas: Canvas, unit: str, head: str, words: Sequence[str], prices: Prices | None = None
) -> tuple[Block, ...]:
    """Return the first of the places where a job fits, each with how full it makes them; with prices, those that have one."""
    hourly = prices.hourly if prices else {}
    shown = [row for row in rows if not hourly or row.device.name in hourly][:MOST_PLACES] or rows[:MOST_PLACES]
    cells = [(">count", ">bound", "gpu", ">needs", ">of"), *(_place(row, unit) for row in shown)]
    if all(row.bound is None for row in shown):
        cells = [(count, *rest) for count, _, *rest in cells]
    if prices is not None:
        costs = (row.count * hourly[row.device.name] if row.device.name in hourly else None for row in shown)
        words_of = ("" if cost is None else prices.text(cost) for cost in costs)
        cells = [(cost, *rest) for cost, rest in zip((">per hour", *words_of), cells, strict=True)]
    if sum(_widths(cells)) + 2 * len(cells[0]) > canvas.width:
        cells = [line[:-1] for line in cells]  # every row on one line, without what the card has
    columns = _room(cells, canvas)
    gauges = [
        "",
        *(
            canvas.gauge(row.plan.needed_bytes, row.plan.upper_bytes, row.plan.usable_bytes, columns - 2)
            for row in shown
        ),
    ]
    more = [f"{len(rows) - len(shown)} more kinds of GPU: --all."] if len(rows) > len(shown) else []
    more += notes_on_models([row.plan for row in rows[:1]])
    return (
        *_folded([head], canvas),
        *([_aligned(list(zip(cells, gauges, strict=True)), canvas)] if rows else []),
        *_folded([*more, *words], canvas),
    )


def _place(row: Placement, unit: str) -> tuple[str, ...]:
    sizes = (format_bytes(size, unit) for size in (row.plan.needed_bytes, row.plan.usable_bytes))
    bound = "" if row.bound is None else str(row.bound)
    return (f"{'>= ' if row.pooled else ''}{row.count}", bound, f"{row.device.name}{row.layout}", *sizes)


def compare_screen(
    plans: Sequence[MemoryPlan], canvas: Canvas, unit: str, blocks: Sequence[Block], *, several: bool
) -> tuple[Block, ...]:
    """Return a gauge for every plan, then the tables as far as they fit.

    Args:
        plans: In the order of the columns.
        blocks: The head, the tables, and the sentence of the whole answer.
        several: Whether the plans are on different GPUs.
    """
    cells = [
        (
            f"{plan.setup.name} on {plan.device.name}" if several else plan.setup.name,
            f"{format_bytes(plan.needed_bytes, unit)}",
            plan.verdict.upper(),
        )
        for plan in plans
    ]
    headed = [("", ">needs", ""), *cells]
    columns = _room(headed, canvas)
    gauges = [
        "",
        *(canvas.gauge(plan.needed_bytes, plan.upper_bytes, plan.usable_bytes, columns - 2) for plan in plans),
    ]
    head, *tables, sentence = blocks
    shown = [table for table in tables if isinstance(table, Table)]
    narrow = next((table for table in (shown[0], _without_changes(shown[0])) if table.width <= canvas.width), "")
    count = len(shown[1].rows) if len(shown) > 1 else 0
    differing = f"{count} setting{' differs' if count == 1 else 's differ'}; "
    rest = f"{differing if count else ''}{'all' if narrow else 'component by component'}: -v."
    words = _folded([rest, *notes_on_models(plans), str(sentence)], canvas)
    return (*_folded([str(head)], canvas), _aligned(list(zip(headed, gauges, strict=True)), canvas), narrow, *words)


def _without_changes(table: Table) -> Table:
    """Return a table of bytes without how much each differs from the first."""
    rows = tuple(tuple(re.sub(r" \([+-].*\)$", "", cell) for cell in row) for row in table.rows)
    return Table(table.headers, rows, table.title)


def recommend_screen(
    rows: Sequence[SuggestedConfigs], canvas: Canvas, unit: str, released: Released, words: Sequence[str]
) -> tuple[Block, ...]:
    """Return what to train with: by config for one GPU, by GPU for the cards of every size."""
    usual = usual_devices([row.device for row in rows])
    shown = sorted(
        (row for row in rows if row.device.name in usual),
        key=lambda row: (-row.device.usable_bytes(0), row.device.name),
    )
    choices = [_choices(row) for row in shown]
    most = max((choice.largest_fitting_parameters for result in choices for _, choice in result), default=0)
    cells: list[tuple[str, ...]]
    if len(shown) == 1:
        device = shown[0].device
        head = f"{device.counted_name}, {format_bytes(device.usable_bytes(0), unit)} usable: the largest recent model for each"
        cells = [("trained", "config", "largest recent model")]
        cells += [
            (_trained(way, choice), choice.setup.label, model_words(choice, released)) for way, choice in choices[0]
        ]
        sizes = [choice.largest_fitting_parameters for _, choice in choices[0]]
    else:
        head = (
            "What to train with, by GPU: the largest recent model for adapters, for all weights, and as an experiment"
        )
        ways = list(dict.fromkeys(way for result in choices for way, _ in result))
        cells = [("gpu", *(f">{way}" for way in ways))]
        cells += [
            (row.device.counted_name, *(_way(dict(result), way) for way in ways))
            for row, result in zip(shown, choices, strict=True)
        ]
        sizes = [max((choice.largest_fitting_parameters for _, choice in result), default=0) for result in choices]
    columns = _room(cells, canvas)
    bars = ["", *(canvas.bar(size, most, columns) for size in sizes)]
    table = _aligned(list(zip(cells, bars, strict=True)), canvas)
    left = len(rows) - len(shown)
    return (
        *_folded([head], canvas),
        table,
        *_folded([f"{left} more GPUs: --all." if left else "", BY_SHARE, *words], canvas),
    )


def _choices(row: SuggestedConfigs) -> list[tuple[str, LargestModel]]:
    """Return what may be trained on a GPU, each with the config and the model for it."""
    adapters = [(choice.setup.name, choice) for choice in row.adapters if choice.largest_fitting is not None]
    whole = [("all weights", row.established), ("experiment", row.experimental)]
    return [*adapters, *((what, choice) for what, choice in whole if choice is not None)]


def _trained(way: str, choice: LargestModel) -> str:
    return "adapters" if choice.setup.config.adapter is not None else way


def _way(result: Mapping[str, LargestModel], way: str) -> str:
    return _size(result[way]) if way in result else "-"


# ------------------------------------------------------------------ rows
def _room(cells: Sequence[tuple[str, ...]], canvas: Canvas) -> int:
    """Return the columns that are left for a bar behind rows of cells; none where that is too few."""
    room = min(WIDEST_BAR, canvas.width - sum(_widths(cells)) - 2 * len(cells[0]) - 2)
    return room if room >= NARROWEST_BAR else 0


def _widths(cells: Sequence[tuple[str, ...]]) -> list[int]:
    return [
        max(len(cell.lstrip(">") if row is cells[0] else cell) for row, cell in zip(cells, column, strict=True))
        for column in zip(*cells, strict=True)
    ]


def _aligned(rows: Sequence[Row], canvas: Canvas) -> tuple[str, ...]:
    """Return lines of cells, the first of which are headers; a leading ``>`` aligns a column to the right.

    Columns for which a terminal is too narrow are on a line below.
    """
    cells = [line for line, _ in rows]
    widths = _widths(cells)
    right = [header.startswith(">") for header in cells[0]]
    ends = list(accumulate(widths, lambda end, width: end + 2 + width, initial=0))[1:]
    first = sum(end <= canvas.width for end in ends) or 1
    lines = []
    for line, behind in rows:
        texts = [cell.removeprefix(">") if line is cells[0] else cell for cell in line]
        shown = [
            text.rjust(width) if end else text.ljust(width)
            for text, width, end in zip(texts, widths, right, strict=True)
        ]
        below = "  ".join(text.strip() for text in shown[first:])
        lines.append(f"  {'  '.join((*shown[:first], behind))}".rstrip())
        lines += [f"      {below}".rstrip()] if below.strip() else []
    return tuple(lines)


def _folded(texts: Sequence[str], canvas: Canvas) -> tuple[tuple[str, ...], ...]:
    """Return texts in one block, folded to the terminal; no block where there are none."""
    lines = tuple(line for text in texts if text for line in canvas.folded(text, 0, 2))
    return (lines,) if lines else ()
