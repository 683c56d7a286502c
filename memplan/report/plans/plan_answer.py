"""A memory plan as JSON and tables, and the stack that it is of in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import memplan
from memplan.catalog.stacks import Stack
from memplan.model.inventory import active_parameter_count, parameter_count
from memplan.model.model import Model
from memplan.plan.bytes_per_parameter import BytesPerParameter
from memplan.report.document import Block, Document, Table
from memplan.training.resolved import TrainingSetup
from memplan.units import format_bytes, format_count

if TYPE_CHECKING:
    from memplan.plan.memory_plan import Device, MemoryPlan, Suggestion

BY_SHARE = (
    "The allocator's reserve is a share of the allocated bytes here; fit simulates it, and may say up to a fifth more."
)
"""What answers of a search say, which plan many jobs."""


def stack_data(stack: Stack) -> dict[str, str]:
    """Return a stack as answers name it in JSON."""
    return {"name": stack.name, "version": stack.version}


def stack_words(setups: Iterable[TrainingSetup]) -> str:
    """Return the stack that several setups share, or each with the setups that are of it, the most common first.

    Args:
        setups: At least one; one of a name counts once.
    """
    by_name = {setup.name: setup.stack for setup in setups}
    labels = [label for label, _ in Counter(stack.label for stack in by_name.values()).most_common()]
    if len(labels) == 1:
        return f"stack {labels[0]}"
    others = (
        f"{label} ({', '.join(name for name, stack in by_name.items() if stack.label == label)})"
        for label in labels[1:]
    )
    return f"stacks {', '.join((labels[0], *others))}"


def per_parameter_data(figure: BytesPerParameter) -> dict[str, float]:
    """Return bytes per parameter as decimal numbers."""
    return {
        "weights": float(figure.weights),
        "master_weights": float(figure.master_weights),
        "gradients": float(figure.gradients),
        "optimizer_states": float(figure.optimizer_states),
        "total": float(figure.total),
    }


def sized(model: Model, what: str = " parameters") -> str:
    """Return a model's name with how many parameters it has: ``Llama-3.1-8B (8.03B parameters)``."""
    return f"{model.spec.name} ({format_count(parameter_count(model.inventory))}{what})"


def model_data(model: Model) -> dict[str, Any]:
    """Return what an answer says of its model."""
    return {
        "name": model.spec.name,
        "parameters": parameter_count(model.inventory),
        "active_parameters": active_parameter_count(model.inventory),
        "architecture": model.spec.architecture,
        "source": model.source,
    }


def plan_data(plan: MemoryPlan, catalog_hash: str) -> dict[str, Any]:
    """Return a plan as JSON of schema ``memplan/plan/1``."""
    return {
        "schema": "memplan/plan/1",
        "memplan_version": memplan.__version__,
        "catalog_hash": catalog_hash,
        "config": plan.setup.name,
        "stack": stack_data(plan.setup.stack),
        "status": plan.setup.config.status,
        "verdict": plan.verdict,
        "answer": answer(plan),
        "model": model_data(plan.model),
        "gpu": {
            "name": plan.device.name,
            "count": plan.gpu_count,
            "memory_bytes": plan.device.memory_bytes,
            "usable_bytes": plan.usable_bytes,
        },
        "training": plan.training,
        "bytes_per_parameter": per_parameter_data(plan.bytes_per_parameter),
        "components": [asdict(line) for line in plan.components],
        "instants": [{"name": name, "requested_bytes": size} for name, size in plan.instants],
        "peak": {
            "instant": plan.peak.name,
            "operation": plan.peak.operation,
            "requested_bytes": plan.requested_bytes,
            "allocated_bytes": plan.allocated_bytes,
            "reserved_bytes": plan.reserved_bytes,
            "device_bytes": plan.device_bytes,
            "upper_bytes": plan.upper_bytes,
            "lower_bytes": plan.lower_bytes,
            "least_bytes": plan.least_bytes,
            "reserve_by_share": plan.reserve_by_share,
            **({"padding_bytes": plan.padding_bytes} if plan.padding_bytes else {}),
        },
        "persistent_bytes": plan.persistent_bytes,
        "host": host_data(plan),
        "suggestions": [asdict(suggestion) for suggestion in plan.suggestions],
        "assumptions": list(plan.assumptions),
        "not_modelled": list(plan.not_modelled),
        **({"ranks": [asdict(row) for row in plan.ranks]} if plan.ranks else {}),
    }


def host_data(plan: MemoryPlan) -> dict[str, Any]:
    """Return what lies in host memory: of one rank, and of all ranks of a node where an engine of several GPUs keeps it there."""
    limit = plan.device.host_memory_bytes
    data: dict[str, Any] = {"bytes": plan.host_bytes} | ({} if limit is None else {"limit_bytes": limit})
    if not plan.host.tensors:
        return data
    return data | {
        "pinned_bytes": plan.host.pinned_bytes,
        "taken_bytes": plan.host.taken_bytes,
        "components": [{"name": name, "bytes": size} for name, size in plan.host.components.items()],
        "ranks_per_node": plan.node_ranks,
        "node_bytes": plan.node_host_bytes,
    }


def total_words(plan: MemoryPlan) -> tuple[str, str]:
    """Return what the two totals of an answer are called, needed and upper bytes."""
    return ("at least", "with memory to spare") if plan.releases_cache else ("expected", "worst case")


def answer(plan: MemoryPlan, unit: str = "") -> str:
    """Return the answer in one sentence, with the cheapest suggestion that flips it."""

    def shown(size: int) -> str:
        return format_bytes(size, unit)

    name, gpu = plan.model.spec.name, device_name(plan)
    needs, usable = plan.needed_bytes, shown(plan.usable_bytes)
    head = f"{plan.verdict.upper()}: {name} with {plan.setup.label} needs about {shown(needs)} of the {usable} usable on {gpu}"
    if plan.exceeds_host:
        assert plan.device.host_memory_bytes is not None
        host = f"{shown(plan.node_host_bytes)} of host memory on a {plan.node_name}"
        return f"{head}, and {host}, which has {shown(plan.device.host_memory_bytes)}."
    if plan.verdict == "fits" and not plan.releases_cache:
        return f"{head}, {shown(plan.usable_bytes - plan.upper_bytes)} to spare even at the upper end of {shown(plan.upper_bytes)}."
    if plan.verdict == "fits":
        return f"{head}; its allocator then releases what it caches, and would hold {shown(plan.device_bytes)} with memory to spare."
    if plan.verdict == "tight":
        head += f", but may need up to {shown(plan.upper_bytes)}"
    flip = next((s for s in plan.suggestions if s.flips_verdict), None)
    if flip is None:
        return f"{head}{'' if plan.verdict == 'tight' else f', {shown(needs - plan.usable_bytes)} too much'}."
    return f"{head}; it fits with {flip.change}{_own(flip)} (saves {shown(flip.saves_bytes)}; cost: {flip.cost})."


def _own(suggestion: Suggestion) -> str:
    """Return a suggestion in the words of the job's stack, where it has its own."""
    return f" [{suggestion.own_text}]" if suggestion.own_text else ""


def device_name(plan: MemoryPlan) -> str:
    """Return the device as people say it."""
    pooled = plan.device.count > 1 and plan.setup.config.parallel.gpus == 1
    return f"{plan.device.counted_name} (memory pooled)" if pooled else of_each(plan.device, plan.setup)


def of_each(device: Device, setup: TrainingSetup) -> str:
    """Return a GPU by name, and how many share the job where there are several."""
    ranks = setup.config.parallel.gpus
    return f"each of {ranks} {device.name}" if ranks > 1 else device.name


# ------------------------------------------------------------------ tables
def plan_document(plan: MemoryPlan, catalog_hash: str, unit: str, strict: bool) -> Document:
    """Return the whole answer of ``memplan fit`` for one config."""
    blocks: list[Block] = [
        heading(plan),
        component_table(plan, unit),
        totals_table(plan, unit),
        instants_table(plan, unit),
        *([ranks_table(plan, unit)] if plan.ranks else []),
    ]
    if plan.suggestions:
        blocks.append(suggestions_table(plan.suggestions, plan.usable_bytes, unit))
    blocks.append(
        (*(f"Assumed: {line}" for line in plan.assumptions), *(f"Not counted: {line}" for line in plan.not_modelled))
    )
    blocks.append(answer(plan, unit))
    return Document(plan_data(plan, catalog_hash), tuple(blocks), exit_code(plan, strict))


def exit_code(plan: MemoryPlan, strict: bool) -> int:
    """Return 0 where the job fits, 1 where it does not; TIGHT is 0 unless strict."""
    return 1 if plan.verdict == "no" or (strict and plan.verdict == "tight") else 0


def heading(plan: MemoryPlan) -> tuple[str, str]:
    """Return the job in two lines."""
    config = plan.setup.config
    first = f"{sized(plan.model)} on {device_name(plan)}, {plan.setup.label}, {stack_words([plan.setup])}; learning: {learning(plan.setup)}"
    second = (
        f"micro-batch {plan.micro_batch_size}, sequence {plan.sequence_length}, accumulation {config.gradient_accumulation_steps}, "
        f"checkpointing {config.checkpointing_words}, compute in {config.compute_dtype}"
    )
    return first, second


def learning(setup: TrainingSetup) -> str:
    """Return what is known of how a setup learns, and what it is where its config says so and nothing was changed."""
    status, about = setup.config.status, setup.config.description
    return status if setup.changed or about == setup.stack.label else f"{status}; {about}"


def component_table(plan: MemoryPlan, unit: str) -> Table:
    """Return the sum at the peak."""
    rows = tuple(
        (c.name, format_bytes(c.bytes, unit), share(c.bytes, plan.device_bytes), c.kind, c.formula)
        for c in plan.components
    )
    total = (
        "device",
        format_bytes(plan.device_bytes, unit),
        "100.0 %",
        "",
        f"at the {plan.peak.name} ({plan.peak.operation})",
    )
    return Table(("component", ">bytes", ">share", "kind", "formula"), (*rows, total))


def ranks_table(plan: MemoryPlan, unit: str) -> Table:
    """Return a row for each rank of a pipeline, equal ones in a row together."""
    alike = [list(group) for _, group in groupby(plan.ranks, key=lambda row: replace(row, rank=0, stages=()))]
    named = [(str(g[0].rank) if len(g) == 1 else f"{g[0].rank}-{g[-1].rank}", g[0]) for g in alike]
    rows = tuple(
        (
            name,
            ("embed + " if row.embedding else "") + " + ".join(map(str, row.layers)) + (" + head" if row.head else ""),
            str(row.pairs),
            format_bytes(row.persistent_bytes, unit),
            row.instant,
            format_bytes(row.device_bytes, unit),
            "fullest" if row.device_bytes == plan.device_bytes else "",
        )
        for name, row in named
    )
    return Table((">rank", "layers", ">in flight", ">kept", "peak", ">device", ""), rows)


def share(part: int, whole: int) -> str:
    """Return a share in per cent with one decimal."""
    tenths = (2000 * part + whole) // (2 * whole) if whole else 0
    return f"{tenths // 10}.{tenths % 10} %"


def two_digits(rate: int) -> int:
    """Return an estimate with two digits, which is more than it is good for."""
    scale: int = 10 ** max(0, len(str(rate)) - 2)
    return (rate + scale // 2) // scale * scale


def totals_table(plan: MemoryPlan, unit: str) -> Table:
    """Return the four totals, what they are compared with, and what lies in host memory."""
    rows: tuple[tuple[str, ...], ...] = (
        (
            "requested",
            format_bytes(plan.requested_bytes, unit),
            "live tensors and what kernels allocate while they run",
        ),
        (
            "allocated",
            format_bytes(plan.allocated_bytes, unit),
            "rounded up to the allocator's blocks, with library workspaces",
        ),
        ("reserved", format_bytes(plan.reserved_bytes, unit), "segments that the allocator holds with memory to spare"),
        ("device", format_bytes(plan.device_bytes, unit), "what nvidia-smi shows then"),
        *_ends(plan, unit),
        (
            "usable",
            format_bytes(plan.usable_bytes, unit),
            f"of {format_bytes(plan.device.memory_bytes, unit)} on the device",
        ),
    )
    if plan.setup.offloads_states:
        rows += (("host", format_bytes(plan.host_bytes, unit), "optimizer states in pinned host memory"),)
    if plan.host.tensors:
        pinned = format_bytes(plan.host.pinned_bytes, unit)
        rows += (
            ("host", format_bytes(plan.host.taken_bytes, unit), f"host memory of one rank, {pinned} of it pinned"),
            ("host per node", format_bytes(plan.node_host_bytes, unit), f"of {plan.node_ranks} ranks"),
        )
    return Table(("total", ">bytes", "meaning"), rows)


def _ends(plan: MemoryPlan, unit: str) -> tuple[tuple[str, ...], ...]:
    """Return the ends of the interval around the device total; the lower one, and the least, where they are simulated."""
    meaning = "of the interval around the device total"
    if plan.padding_bytes:
        meaning += f", {format_bytes(plan.padding_bytes, unit)} of it for rows that may be padded"
    upper = ("upper end", format_bytes(plan.upper_bytes, unit), meaning)
    if plan.reserve_by_share:
        return (upper,)
    least = "the device total with which it is known to run when the card is nearly full"
    return (
        ("least", format_bytes(plan.least_bytes, unit), least),
        ("lower end", format_bytes(plan.lower_bytes, unit), "of the interval around the device total"),
        upper,
    )


def instants_table(plan: MemoryPlan, unit: str) -> Table:
    """Return the requested bytes at every instant."""
    rows = tuple(
        (name, format_bytes(size, unit), "peak" if name == plan.peak.name else "") for name, size in plan.instants
    )
    return Table(("instant", ">requested", ""), rows)


def suggestions_table(suggestions: Sequence[Suggestion], usable_bytes: int, unit: str) -> Table:
    """Return what to change."""
    rows = tuple(
        (
            format_bytes(s.saves_bytes, unit),
            format_bytes(s.needed_bytes, unit),
            s.verdict_in(usable_bytes),
            f"{s.change}{_own(s)} ({s.cost})",
        )
        for s in suggestions
    )
    return Table((">saves", ">device after", "verdict", "change (its cost)"), rows)
