"""The answer of ``memplan explain``: the whole sum, term by term."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import answer, component_table, heading, plan_data, totals_table
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan
    from memplan.step.tensors.tensor_states import TensorStates

LEGEND = (
    "b: micro-batch size; t: sequence length; n: elements of a tensor. Every tensor's bytes are rounded up to whole blocks; "
    "'x count' is the number of layers that have one."
)


def explain_document(plan: MemoryPlan, catalog_hash: str, unit: str) -> Document:
    """Return every term of a plan, with its values and sources."""
    states = states_table(plan)
    saved = saved_table(plan, unit)
    instants = instant_forms_table(plan, unit)
    sources = tuple(f"{c.name} ({c.kind}): {c.formula}{_values(c.values)}. Source: {c.source}" for c in plan.components)
    blocks = (
        heading(plan),
        LEGEND,
        states,
        _sums(plan),
        saved,
        instants,
        component_table(plan, unit),
        totals_table(plan, unit),
        sources,
        answer(plan),
    )
    data = {
        **plan_data(plan, catalog_hash),
        "schema": "memplan/explain/1",
        "tensors": [_tensor_data(e) for e in plan.states.tensors],
    }
    data["saved_for_backward"] = [
        {"layer": saved.layer, "operation": saved.operation, "formula": f"{saved.coefficient} {saved.quantity}"}
        for saved in plan.saved_tensors
    ]
    return Document(data, blocks)


def _values(values: Any) -> str:
    return (
        " with " + ", ".join(f"{k} = {v:,}" if isinstance(v, int) else f"{k} = {v}" for k, v in values.items())
        if values
        else ""
    )


def _tensor_data(entry: TensorStates) -> dict[str, Any]:
    return {
        "name": entry.tensor.name,
        "shape": list(entry.tensor.shape),
        "role": entry.tensor.role,
        "count": entry.tensor.count,
        "format": entry.format_name,
        "optimizer": entry.optimizer_name if entry.trainable else None,
        "weight_bytes": entry.weight_bytes,
        "master_bytes": entry.master_bytes,
        "gradient_bytes": entry.gradient_bytes,
        "state_bytes": entry.state_bytes,
        "host_bytes": entry.host_bytes,
    }


def states_table(plan: MemoryPlan) -> Table:
    """Return the bytes that training keeps for every tensor."""
    rows = tuple(
        (
            entry.tensor.name.replace("model.", "", 1),
            "x".join(map(str, entry.tensor.shape)),
            str(entry.tensor.count),
            entry.format_name,
            f"{entry.weight_bytes:,}",
            f"{entry.gradient_bytes:,}",
            f"{entry.state_bytes:,}",
            entry.optimizer_name if entry.trainable else "frozen",
        )
        for entry in plan.states.tensors
    )
    headers = ("tensor", "shape", ">x count", "format", ">weight B", ">gradient B", ">states B", "optimizer")
    return Table(headers, rows, "Model states, bytes of one tensor")


def _sums(plan: MemoryPlan) -> tuple[str, ...]:
    """Return the sums over all tensors, as exact integers."""
    states = plan.states
    lines = [
        f"weights          = sum(weight B x count)   = {states.weight_bytes:,}",
        f"gradients        = sum(gradient B x count) = {states.gradient_bytes:,}",
        f"optimizer_states = sum(states B x count)   = {states.state_bytes:,}",
    ]
    if plan.setup.offloads_states:
        lines.append(f"host             = sum(states on the host x count) = {states.host_bytes:,}")
    if plan.host.tensors:
        words = plan.host.words()
        lines.append(f"host             = sum(host B x count)     = {plan.host_bytes:,} ({words})")
    if states.master_bytes:
        lines.append(f"master_weights   = sum(n x width x count)  = {states.master_bytes:,}")
    return tuple(lines)


def saved_table(plan: MemoryPlan, unit: str) -> Table:
    """Return what one layer of each kind keeps for backward, tensor by tensor."""
    rows: list[tuple[str, ...]] = []
    for layer, tensors in groupby(plan.saved_tensors, key=attrgetter("layer")):
        total = 0
        for saved in tensors:
            total += saved.bytes
            formula = f"{saved.coefficient:,} x {saved.quantity}"
            rows.append((layer, formula, format_bytes(saved.bytes, unit), saved.operation))
        rows.append((layer, "sum", format_bytes(total, unit), ""))
    config = plan.setup.config
    again = "" if config.activation_checkpointing == "none" else " while it is recomputed"
    title = f"Saved for backward by one layer{again}{f' (checkpointing {config.checkpointing_words})' if again else ''}"
    return Table(("layer", ">formula", ">bytes", "first saved by"), tuple(rows), title)


def instant_forms_table(plan: MemoryPlan, unit: str) -> Table:
    """Return each instant's closed form: what is alive beyond weights, optimizer states and buffers."""
    rows = tuple(
        (instant.name, instant.operation, format_bytes(instant.bytes, unit), instant.formula)
        for instant in plan.instant_forms
    )
    return Table(
        ("instant", "operation", ">bytes", "closed form"),
        rows,
        "Instants: live bytes beyond weights, optimizer states and buffers",
    )
