"""The answer for a model over a grid: what each rank keeps between steps and takes in one, by stage."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import memplan
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import model_data, sized
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.grids.grid_plan import GridPlan
    from memplan.step.grids.megatron_peaks import StepInterval
    from memplan.step.grids.megatron_states import RankStates, StageStates

DEGREES = ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "data", "replicate")
UNEVEN = "experts that are given more tokens than others: the rank that has them may take more than the worst case"
NOT_MODELLED = (
    "kernels that allocate more inside themselves than the upper end allows for",
    "collectives' buffers inside the allocator",
)
CODES = {"fits": 0, "tight": 0, "no": 1, "unknown": 3}


def grid_document(
    plan: GridPlan, rank: str, notes: tuple[str, ...], catalog_hash: str, unit: str, *, strict: bool = False
) -> Document:
    """Return the verdict, a table by stage and what one rank holds in a step.

    Args:
        rank: ``worst``, ``all`` or a rank's number.
    """
    number = plan.fullest_rank if rank in ("worst", "all") else int(rank)
    blocks = (
        _head(plan, unit),
        _by_stage(plan, unit, every=rank == "all"),
        _components(plan, number, unit),
        tuple(f"Assumed: {note}" for note in notes),
        tuple(f"Not modelled: {what}" for what in _left_out(plan)),
        grid_sentence(plan, unit),
    )
    code = 1 if strict and plan.verdict == "tight" else CODES[plan.verdict]
    return Document(_data(plan, number, notes, catalog_hash), blocks, code)


def grid_sentence(plan: GridPlan, unit: str = "") -> str:
    """Return the verdict in one sentence."""
    usable, least = format_bytes(plan.usable_bytes, unit), format_bytes(plan.least_bytes, unit)
    expected, most = format_bytes(plan.expected_bytes, unit), format_bytes(plan.upper_bytes, unit)
    of, rank = f"{usable} usable on {plan.device.name}", plan.fullest_rank
    if plan.unplanned:
        what = f"what a step takes is not modelled: {', '.join(plan.unplanned)}"
        retained = format_bytes(plan.persistent_bytes, unit)
        return f"{plan.verdict.upper()}: rank {rank}, the fullest, keeps {retained} between steps, of {of}; {what}."
    even = " where every expert is given as many tokens" * (plan.grid.expert > 1)
    if plan.verdict == "fits":
        return f"FITS: rank {rank}, the fullest, takes {expected} in a step and {most} at most{even}, of {of}."
    if plan.verdict == "tight":
        return f"TIGHT: rank {rank}, the fullest, takes {expected} in a step as expected, but may take {most}{even}, of {of}."
    if plan.verdict == "no":
        return (
            f"NO: rank {plan.fullest_at_least} takes {least} at least with what its layers keep for backward, of {of}."
        )
    return (
        f"UNKNOWN: rank {rank} is expected to take {expected} in a step, more than {of}, but only {least} are certain."
    )


def _left_out(plan: GridPlan) -> tuple[str, ...]:
    """Return what the upper end does not cover; who has all experts is given all tokens."""
    if plan.unplanned:
        return plan.unplanned
    return (UNEVEN, *NOT_MODELLED) if plan.grid.expert > 1 else NOT_MODELLED


def degrees(plan: GridPlan) -> dict[str, Any]:
    """Return the degrees of a grid, by the keys of ``parallel``."""
    grid = plan.grid
    return {name: getattr(grid, name) for name in DEGREES} | {"zero_stage": grid.zero_stage, "sequence": grid.sequence}


def _head(plan: GridPlan, unit: str) -> tuple[str, ...]:
    grid = plan.grid
    said = [f"{name.replace('_', ' ')} {size}" for name, size in degrees(plan).items() if name in DEGREES and size > 1]
    if grid.expert == 1:
        said = [word for word in said if not word.startswith("expert tensor")]
    optimizer = "distributed optimizer" if grid.zero_stage else "optimizer states on every data rank"
    return (
        *_verdict(plan, unit),
        f"{sized(plan.model, '')}, {grid.world:,} x {plan.device.name}, stack megatron",
        f"        {', '.join(said) or 'one GPU'}; {optimizer}",
    )


def _verdict(plan: GridPlan, unit: str) -> tuple[str, ...]:
    usable, retained = format_bytes(plan.usable_bytes, unit), format_bytes(plan.persistent_bytes, unit)
    sizes = (plan.least_bytes, plan.expected_bytes, plan.upper_bytes)
    least, expected, most = (format_bytes(size, unit) for size in sizes)
    if plan.unplanned:
        return (f"{plan.verdict.upper():<7} {retained} kept between steps, {usable} usable; a step is not modelled",)
    said = f"{least} at least" if plan.verdict == "no" else f"{expected} expected"
    return (
        f"{plan.verdict.upper():<7} {said}, {most} worst case, {usable} usable",
        f"        {retained} kept between steps",
    )


def _by_stage(plan: GridPlan, unit: str, *, every: bool) -> Table:
    """Return a row for each stage, equal ones in a row together; with ``every`` one for each amount that ranks keep."""
    rows = []
    for _, group in groupby(
        plan.stages, key=lambda stage: (_holds(stage), stage.states, stage.places, plan.steps[stage.index])
    ):
        stages = list(group)
        first, last = stages[0], stages[-1]
        name = str(first.index) if len(stages) == 1 else f"{first.index}-{last.index}"
        retained = reversed(first.states) if every else (first.fullest,)
        for position, states in enumerate(retained):
            head = (name, _ranks(plan, first, last), _holds(first)) if position == 0 else ("", "", "")
            step = "-" if plan.unplanned else format_bytes(plan.steps[first.index].expected, unit)
            rows.append((*head, *_sizes(states, unit), step if position == 0 else ""))
    return Table(("stage", "ranks", "holds", ">weights", ">grads", ">optimizer", ">kept", ">a step"), tuple(rows))


def _ranks(plan: GridPlan, first: StageStates, last: StageStates) -> str:
    """Return the ranks of neighbouring stages; where stages alternate among ranks, those of the first data parallel rank and a sign that more follow."""
    places = len(first.places) if not plan.grid.alternating else plan.grid.tensor * plan.grid.context
    begin, end = plan.grid.rank_at(first.index, 0), plan.grid.rank_at(last.index, places - 1)
    text = f"{begin}-{end}" if end > begin else str(begin)
    return f"{text}, ..." if places < len(first.places) else text


def _holds(stage: StageStates) -> str:
    ends = ("embed + " if stage.embeds else "") + f"{stage.layers}" + (" + head" if stage.ends else "")
    return f"{ends} layers" if not (stage.embeds or stage.ends) else ends


def _sizes(states: RankStates, unit: str) -> tuple[str, ...]:
    optimizer = states.master_weights + states.optimizer_states
    sizes = (states.weights, states.gradients, optimizer, states.total)
    return tuple(format_bytes(size, unit) for size in sizes)


def _lines(plan: GridPlan, number: int) -> dict[str, int]:
    """Return the lines of what a rank's GPU holds at the peak of a step."""
    states, outside = plan.rank(number), plan.outside
    step = plan.steps[plan.grid.place_of(number)[0]].expected
    return {
        **states.components,
        "step": step,
        "library_workspaces": outside.workspaces,
        "allocator_reserve": plan.reserved_of(states.total + step + outside.workspaces),
        "device_context": outside.context,
        "communicators": outside.communicator_bytes,
    }


def _components(plan: GridPlan, number: int, unit: str) -> Table:
    lines = _lines(plan, number)
    total = sum(lines.values())
    shown = [
        *((name, size) for name, size in lines.items() if size),
        ("in all" if plan.unplanned else "in a step", total),
    ]
    rows = tuple((name, format_bytes(size, unit), f"{100 * size / total:.1f} %") for name, size in shown)
    return Table(("component", ">bytes", ">share"), rows, f"rank {number}")


def _data(plan: GridPlan, number: int, notes: tuple[str, ...], catalog_hash: str) -> dict[str, Any]:
    return {
        "schema": "memplan/grid/1",
        "memplan_version": memplan.__version__,
        "catalog_hash": catalog_hash,
        "verdict": plan.verdict,
        "answer": grid_sentence(plan),
        "model": model_data(plan.model),
        "gpu": {
            "name": plan.device.name,
            "count": plan.grid.world,
            "memory_bytes": plan.device.memory_bytes,
            "usable_bytes": plan.usable_bytes,
        },
        "stack": "megatron",
        "parallel": degrees(plan),
        "stages": [_stage(plan, stage) for stage in plan.stages],
        "rank": {
            "number": number,
            "components": _named(_lines(plan, number)),
            "persistent_bytes": plan.rank(number).total,
        },
        "fullest_rank": plan.fullest_rank,
        "persistent_bytes": plan.persistent_bytes,
        "expected_bytes": None if plan.unplanned else plan.expected_bytes,
        "least_bytes": plan.least_bytes,
        "upper_bytes": None if plan.unplanned else plan.upper_bytes,
        "communicators": list(plan.outside.communicators),
        "most_communicator_bytes": plan.outside.most_communicator_bytes,
        "assumptions": list(notes),
        "not_modelled": list(_left_out(plan)),
    }


def _step_sizes(step: StepInterval) -> tuple[tuple[str, int], ...]:
    return (
        ("least_activation", step.least),
        ("step", step.expected),
        ("most_step", step.most),
        ("lasting_step", step.lasting),
    )


def _named(lines: dict[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": size} for name, size in lines.items()]


def _stage(plan: GridPlan, stage: StageStates) -> dict[str, Any]:
    return {
        "stage": stage.index,
        "layers": stage.layers,
        "embedding": stage.embeds,
        "head": stage.ends,
        "parameters_per_rank": stage.parameters,
        "first_rank": plan.grid.rank_at(stage.index, 0),
        "last_rank": plan.grid.rank_at(stage.index, len(stage.places) - 1),
        "fullest_rank": plan.fullest_of(stage),
        "components": _named(stage.fullest.components),
        "persistent_bytes": stage.fullest.total,
        "least_persistent_bytes": min(states.total for states in stage.states),
        **{f"{name}_bytes": None if plan.unplanned else size for name, size in _step_sizes(plan.steps[stage.index])},
    }
