"""The answer for a model over a grid: what each rank keeps between steps, by stage."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import memplan
from memplan.model.inventory import active_parameter_count, parameter_count
from memplan.report.document import Document, Table
from memplan.units import format_bytes, format_count

if TYPE_CHECKING:
    from memplan.plan.grids.grid_plan import GridPlan
    from memplan.step.grids.rank_states import RankStates, StageStates

DEGREES = ("tensor", "pipeline", "virtual", "context", "expert", "expert_tensor", "data", "replicate")
NOT_MODELLED = (
    "temporaries of a step under Megatron-LM, and activations beyond those that every kernel keeps",
    "collectives' buffers inside the allocator",
)


def grid_document(plan: GridPlan, rank: str, notes: tuple[str, ...], catalog_hash: str, unit: str) -> Document:
    """Return the verdict as far as it goes, a table by stage and the states of one rank.

    Args:
        plan: All ranks.
        rank: ``worst``, ``all`` or a rank's number.
        notes: What is taken for granted.
        catalog_hash: Of the catalog, or nothing.
        unit: Of bytes, or nothing.
    """
    number = plan.fullest_rank if rank in ("worst", "all") else int(rank)
    blocks = (
        _head(plan, unit),
        _by_stage(plan, unit, every=rank == "all"),
        _components(plan, number, unit),
        tuple(f"Assumed: {note}" for note in notes),
        tuple(f"Not modelled: {what}" for what in NOT_MODELLED),
        grid_sentence(plan, unit),
    )
    return Document(_data(plan, number, notes, catalog_hash), blocks, 1 if plan.verdict == "no" else 3)


def grid_sentence(plan: GridPlan, unit: str = "") -> str:
    """Return the verdict in one sentence, as far as it goes."""
    usable, least = format_bytes(plan.usable_bytes, unit), format_bytes(plan.least_bytes, unit)
    stage = plan.fullest_in_step
    rank = plan.first_rank(stage) + stage.fullest_rank
    if plan.verdict == "no":
        return f"NO: rank {rank} takes {least} at least with what its layers keep for backward, of {usable} usable on {plan.device.name}."
    left = format_bytes(plan.usable_bytes - plan.expected_bytes, unit)
    return (
        f"UNKNOWN: before a step rank {plan.fullest_rank} holds {format_bytes(plan.expected_bytes, unit)} of {usable} usable on "
        f"{plan.device.name}; whether a step fits into the {left} left is not modelled, of which activations of rank {rank} take "
        f"{format_bytes(plan.activations[stage.index], unit)} at least."
    )


def degrees(plan: GridPlan) -> dict[str, Any]:
    """Return the degrees of a grid, by the keys of ``parallel``."""
    grid = plan.grid
    return {name: getattr(grid, name) for name in DEGREES} | {"zero_stage": grid.zero_stage, "sequence": grid.sequence}


def _head(plan: GridPlan, unit: str) -> tuple[str, ...]:
    spec, grid = plan.model.spec, plan.grid
    said = [f"{name.replace('_', ' ')} {size}" for name, size in degrees(plan).items() if name in DEGREES and size > 1]
    if grid.expert == 1:
        said = [word for word in said if not word.startswith("expert tensor")]
    optimizer = "distributed optimizer" if grid.zero_stage else "optimizer states on every data rank"
    return (
        *_verdict(plan, unit),
        f"{spec.name} ({format_count(parameter_count(plan.model.inventory))}), {grid.world:,} x {plan.device.name}, stack megatron",
        f"        {', '.join(said) or 'one GPU'}; {optimizer}",
    )


def _verdict(plan: GridPlan, unit: str) -> tuple[str, ...]:
    usable, states = format_bytes(plan.usable_bytes, unit), format_bytes(plan.fullest.fullest.total, unit)
    if plan.verdict == "no":
        return (
            f"NO      {format_bytes(plan.least_bytes, unit)} at least, {usable} usable; {states} kept between steps",
        )
    left = format_bytes(plan.usable_bytes - plan.expected_bytes, unit)
    return (f"UNKNOWN {states} kept between steps, {usable} usable, {left} left",)


def _by_stage(plan: GridPlan, unit: str, *, every: bool) -> Table:
    """Return a row for each stage, equal ones in a row together; with ``every`` one for each amount that ranks keep."""
    size = plan.grid.world // plan.grid.pipeline
    rows = []
    for _, group in groupby(
        plan.stages, key=lambda stage: (_holds(stage), stage.states, stage.places, plan.activations[stage.index])
    ):
        stages = list(group)
        first, last = stages[0], stages[-1]
        name = str(first.index) if len(stages) == 1 else f"{first.index}-{last.index}"
        ranks = (
            f"{first.index * size}-{(last.index + 1) * size - 1}" if size * len(stages) > 1 else str(first.index * size)
        )
        kept = reversed(first.states) if every else (first.fullest,)
        for position, states in enumerate(kept):
            head = (name, ranks, _holds(first)) if position == 0 else ("", "", "")
            activations = format_bytes(plan.activations[first.index], unit)
            rows.append((*head, *_sizes(states, unit), f"{activations}+" if position == 0 else ""))
    return Table(("stage", "ranks", "holds", ">weights", ">grads", ">optimizer", ">kept", ">activations"), tuple(rows))


def _holds(stage: StageStates) -> str:
    ends = ("embed + " if stage.embeds else "") + f"{stage.layers}" + (" + head" if stage.ends else "")
    return f"{ends} layers" if not (stage.embeds or stage.ends) else ends


def _sizes(states: RankStates, unit: str) -> tuple[str, ...]:
    optimizer = states.master_weights + states.optimizer_states
    sizes = (states.weights, states.gradients, optimizer, states.total)
    return tuple(format_bytes(size, unit) for size in sizes)


def _lines(plan: GridPlan, number: int) -> dict[str, int]:
    """Return the lines of what a rank's GPU holds before a step."""
    states, outside = asdict(plan.rank(number)), plan.outside
    return {
        **states,
        "library_workspaces": outside.workspaces,
        "device_context": outside.context,
        "communicators": outside.communicator_bytes,
    }


def _components(plan: GridPlan, number: int, unit: str) -> Table:
    lines = _lines(plan, number)
    total = sum(lines.values())
    shown = [*((name, size) for name, size in lines.items() if size), ("before a step", total)]
    rows = tuple((name, format_bytes(size, unit), f"{100 * size / total:.1f} %") for name, size in shown)
    return Table(("component", ">bytes", ">share"), rows, f"rank {number}")


def _data(plan: GridPlan, number: int, notes: tuple[str, ...], catalog_hash: str) -> dict[str, Any]:
    spec = plan.model.spec
    return {
        "schema": "memplan/grid/1",
        "memplan_version": memplan.__version__,
        "catalog_hash": catalog_hash,
        "verdict": plan.verdict,
        "answer": grid_sentence(plan),
        "model": {
            "name": spec.name,
            "parameters": parameter_count(plan.model.inventory),
            "active_parameters": active_parameter_count(plan.model.inventory),
            "architecture": spec.architecture,
            "source": plan.model.source,
        },
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
        "persistent_bytes": plan.fullest.fullest.total,
        "expected_bytes": plan.expected_bytes,
        "least_bytes": plan.least_bytes,
        "communicators": list(plan.outside.communicators),
        "most_communicator_bytes": plan.outside.most_communicator_bytes,
        "assumptions": list(notes),
        "not_modelled": list(NOT_MODELLED),
    }


def _named(lines: dict[str, int]) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": size} for name, size in lines.items()]


def _stage(plan: GridPlan, stage: StageStates) -> dict[str, Any]:
    first = plan.first_rank(stage)
    return {
        "stage": stage.index,
        "layers": stage.layers,
        "embedding": stage.embeds,
        "head": stage.ends,
        "parameters_per_rank": stage.parameters,
        "first_rank": first,
        "last_rank": first + len(stage.places) - 1,
        "fullest_rank": first + stage.fullest_rank,
        "components": _named(asdict(stage.fullest)),
        "persistent_bytes": stage.fullest.total,
        "least_persistent_bytes": min(states.total for states in stage.states),
        "least_activation_bytes": plan.activations[stage.index],
    }
