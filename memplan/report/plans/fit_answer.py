"""The answers of ``memplan fit``: one plan in full, or one row for each shipped config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import join
from types import MappingProxyType
from typing import TYPE_CHECKING

from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import device_name, exit_code, plan_data, sized, stack_words
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan

ORDER = {"fits": 0, "tight": 1, "no": 2}


def rows_document(
    plans: Sequence[MemoryPlan],
    catalog_hash: str,
    unit: str,
    *,
    strict: bool,
    full: bool,
    left_out: Sequence[str] = (),
    settings: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Document:
    """Return a row for each of several configs, those that fit first.

    Args:
        plans: One model on one device under several setups.
        full: Whether the JSON is wanted, which has every plan in full.
        left_out: Configs that contradict the other settings, each with the reason.
        settings: What was set in some configs, by name, for a GPU that only emulates bf16.
    """
    plans = sorted(plans, key=lambda plan: (ORDER[plan.verdict], plan.device_bytes))
    rows = [plan_data(plan, catalog_hash) for plan in plans] if full else []
    code = 0 if any(exit_code(plan, strict) == 0 for plan in plans) else 1
    first = plans[0]
    head = (
        f"{sized(first.model)} on {device_name(first)}: "
        f"{format_bytes(first.usable_bytes, unit)} usable; micro-batch {first.micro_batch_size}, sequence {first.sequence_length}; "
        f"{stack_words(plan.setup for plan in plans)}"
    )
    notes = [f"Not counted: {line}" for line in first.not_modelled]
    notes += [f"Left out: {line}" for line in left_out]
    notes += [f"{', '.join(names)}: {note}" for note, names in _card_notes(plans).items()]
    notes += [f"{name} is planned with {_as_options(own)}" for name, own in settings.items()]
    blocks = (head, _table(plans, unit), tuple(notes), _sentence(plans, unit, settings))
    data = {"schema": "memplan/fit/1", "rows": rows, "left_out": list(left_out)}
    return Document(data, blocks, code)


def _table(plans: Sequence[MemoryPlan], unit: str) -> Table:
    rows = tuple(
        (
            plan.verdict.upper(),
            plan.setup.label,
            format_bytes(plan.device_bytes, unit),
            format_bytes(plan.most_bytes, unit),
            plan.setup.config.status,
            plan.setup.config.description,
        )
        for plan in plans
    )
    return Table(("verdict", "config", ">device", ">upper end", "learning", "what it is"), rows)


def _card_notes(plans: Sequence[MemoryPlan]) -> dict[str, list[str]]:
    """Return what the GPU does in another way, with the configs that it concerns."""
    notes: dict[str, list[str]] = {}
    for plan in plans:
        for note in plan.setup.card_notes:
            notes.setdefault(note, []).append(plan.setup.name)
    every = len(plans)
    return {note: ["all"] if len(names) == every else names for note, names in notes.items()}


def _as_options(settings: Sequence[str]) -> str:
    return join([part for setting in settings for part in ("--set", setting)])


def _sentence(plans: Sequence[MemoryPlan], unit: str, settings: Mapping[str, Sequence[str]]) -> str:
    """Return the answer in one sentence."""
    model, device = plans[0].model, device_name(plans[0])
    ranks = plans[0].setup.config.parallel.gpus
    several = ["--gpus", str(ranks)] if ranks > 1 else []

    def named(plan: MemoryPlan) -> str:
        return " ".join(filter(None, (plan.setup.name, _as_options(settings.get(plan.setup.name, ())))))

    job = join([model.source.removeprefix("catalog:"), *plans[0].device.options, *several])
    fitting = [plan for plan in plans if plan.verdict == "fits"]
    sound = [plan for plan in fitting if plan.setup.config.status in ("proven", "works")]
    if fitting:
        best = (sound or fitting)[0]
        return (
            f"FITS: {model.spec.name} fits on {device} with {len(fitting)} of {len(plans)} configs; "
            f"{best.setup.name} (learning: {best.setup.config.status}) needs about {format_bytes(best.device_bytes, unit)}. "
            f"In full: memplan fit {job} --config {named(best)}"
        )
    tight = [plan for plan in plans if plan.verdict == "tight"]
    if tight:
        return f"TIGHT: {model.spec.name} may just fit on {device} with {tight[0].setup.name}, which needs about {format_bytes(tight[0].device_bytes, unit)}."
    least = plans[0]
    over = least.device_bytes - least.usable_bytes
    return (
        f"NO: {model.spec.name} fits on {device} with none of {len(plans)} configs; {least.setup.name} comes closest, "
        f"{format_bytes(over, unit)} too much. What to change: memplan fit {job} --config {named(least)}"
    )
