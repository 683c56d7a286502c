"""The answers of ``memplan fit``: one plan in full, or one row for each shipped config."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import join

from memplan.catalog.catalog import Catalog
from memplan.model.inventory import parameter_count
from memplan.model.model import Model
from memplan.plan.planner import CompiledPlan, Device, MemoryPlan
from memplan.plan.suggestions import suggestions
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import (
    VERDICT_WORDS,
    device_name,
    exit_code,
    not_modelled,
    plan_data,
    plan_document,
)
from memplan.training.resolved import TrainingSetup
from memplan.units import format_bytes, format_count

ORDER = {"fits": 0, "tight": 1, "no": 2}


def fit_document(
    model: Model,
    setups: Sequence[TrainingSetup],
    device: Device,
    catalog: Catalog,
    unit: str,
    *,
    strict: bool,
    single: bool,
    full: bool,
    left_out: Sequence[str] = (),
) -> Document:
    """Return the answer for one setup, or a row for each of several.

    Args:
        model: The model.
        setups: Setups to plan.
        device: The device.
        catalog: For suggestions, and for its hash in JSON.
        unit: Unit of bytes in tables.
        strict: TIGHT counts as NO.
        single: Whether one config was asked for, which is answered in full.
        full: Whether the JSON is wanted, which holds the catalog's hash.
        left_out: Configs that contradict what was asked for, each with the reason.
    """
    plans = [CompiledPlan(model, setup).evaluate(device) for setup in setups]
    catalog_hash = catalog.hash if full else ""
    if single:
        plan = plans[0]
        advice = suggestions(plan, catalog) if plan.verdict != "fits" else []
        return plan_document(plan, catalog_hash, advice, unit, strict)
    plans.sort(key=lambda plan: (ORDER[plan.verdict], plan.device_bytes))
    rows = [plan_data(plan, catalog_hash) for plan in plans] if full else []
    code = 0 if any(exit_code(plan, strict) == 0 for plan in plans) else 1
    first = plans[0]
    head = (
        f"{model.spec.name} ({format_count(parameter_count(model.inventory))} parameters) on {device_name(first)}: "
        f"{format_bytes(first.usable_bytes, unit)} usable; micro-batch {first.micro_batch_size}, sequence {first.sequence_length}"
    )
    notes = [f"Not counted: {line}" for line in not_modelled(first)]
    notes += [f"Left out: {line}" for line in left_out]
    blocks = (head, _table(plans, unit), tuple(notes), _sentence(plans, model, unit))
    data = {"schema": "memplan/fit/1", "rows": rows, "left_out": list(left_out)}
    return Document(data, blocks, code)


def _table(plans: Sequence[MemoryPlan], unit: str) -> Table:
    rows = tuple(
        (
            VERDICT_WORDS[plan.verdict],
            plan.setup.label,
            format_bytes(plan.device_bytes, unit),
            format_bytes(plan.upper_bytes, unit),
            plan.setup.config.status,
            plan.setup.config.description,
        )
        for plan in plans
    )
    return Table(("verdict", "config", ">device", ">upper end", "status", "what it is"), rows)


def _sentence(plans: Sequence[MemoryPlan], model: Model, unit: str) -> str:
    """Return the answer in one sentence."""
    device = device_name(plans[0])
    ranks = plans[0].setup.config.parallel.data
    several = ["--gpus", str(ranks)] if ranks > 1 else []
    asked = join([model.source.removeprefix("catalog:"), "--gpu", plans[0].device.name, *several])
    fitting = [plan for plan in plans if plan.verdict == "fits"]
    sound = [plan for plan in fitting if plan.setup.config.status in ("proven", "works")]
    if fitting:
        best = (sound or fitting)[0]
        return (
            f"FITS: {model.spec.name} fits on {device} with {len(fitting)} of {len(plans)} configs; "
            f"{best.setup.name} ({best.setup.config.status}) needs about {format_bytes(best.device_bytes, unit)}. "
            f"In full: memplan fit {asked} --config {best.setup.name}"
        )
    tight = [plan for plan in plans if plan.verdict == "tight"]
    if tight:
        return f"TIGHT: {model.spec.name} may just fit on {device} with {tight[0].setup.name}, which needs about {format_bytes(tight[0].device_bytes, unit)}."
    least = plans[0]
    over = least.device_bytes - least.usable_bytes
    return (
        f"NO: {model.spec.name} fits on {device} with none of {len(plans)} configs; {least.setup.name} comes closest, "
        f"{format_bytes(over, unit)} too much. What to change: memplan fit {asked} --config {least.setup.name}"
    )
