"""The answers about several GPUs: layouts that fit, what each sends over which links, or the nearest miss; and what ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import plan_data, sized, two_digits
from memplan.training.own_settings import OwnSetting, own_settings
from memplan.units import format_bytes, format_count

if TYPE_CHECKING:
    from memplan.plan.grids.distinct_ranks import RankRow
    from memplan.plan.memory_plan import MemoryPlan
    from memplan.solver.layouts.layout_search import LayoutFront, LayoutRow

PADDED = (
    "fully_shard pads weights and gradients to the first rank's rows; the optimizer's states are of the rows that a rank has.",
    "peak and upper end are at most, where the optimizer's scratch is in them; every rank takes part in all gathers alike.",
)


def ranks_document(rows: Sequence[RankRow], plan: MemoryPlan, unit: str, *, strict: bool) -> Document:
    """Return a table of ranks, with the verdict of the fullest.

    Args:
        plan: Of the first rank.
    """
    parallel = plan.setup.config.parallel
    headers = (">shards", ">ranks", "", ">states", ">kept", ">peak", ">upper end")
    cells = tuple(_cells(row, unit) for row in rows)
    fullest = max(rows, key=lambda row: row.upper_bytes)
    head = (
        f"{plan.model.spec.name} with {plan.setup.name} on {parallel.gpus:,} x {plan.device.name}, {plan.setup.stack.name}",
        f"at the peak, {plan.peak.name}; a group has {parallel.shards if parallel.zero_stage else 1:,} shards",
        f"each keeps {format_bytes(fullest.weight_bytes, unit)} of weights and {format_bytes(fullest.gradient_bytes, unit)} of gradients",
    )
    sentence = (
        f"{fullest.verdict.upper()}: the fullest rank takes up to {format_bytes(fullest.upper_bytes, unit)} of "
        f"{format_bytes(plan.usable_bytes, unit)}."
    )
    data: dict[str, Any] = {
        "schema": "memplan/ranks/1",
        "gpus": parallel.gpus,
        "usable_bytes": plan.usable_bytes,
        "peak_instant": plan.peak.name,
        "rows": [asdict(row) | {"persistent_bytes": row.persistent_bytes} for row in rows],
    }
    fits = fullest.verdict == "fits" or (fullest.verdict == "tight" and not strict)
    return Document(data, (head, Table(headers, cells), PADDED, sentence), 0 if fits else 1)


def _cells(row: RankRow, unit: str) -> tuple[str, ...]:
    shards = str(row.first) if row.first == row.last else f"{row.first}-{row.last}"
    sizes = (row.state_bytes, row.persistent_bytes, row.device_bytes, row.upper_bytes)
    return (shards, f"{row.ranks:,}", row.verdict.upper(), *(format_bytes(size, unit) for size in sizes))


SECOND = 10**12
MOST_REASONS = 3
NO_MEASUREMENT = (
    "Times are a roofline from dense FLOP/s, memory and link bandwidth as vendors state them, with rings that enter and leave each "
    "node once. They order layouts and are no measurement: kernels reach 30 to 80 % of such rates; latency, congestion and "
    "stragglers are not counted."
)
WHAT_OVERLAPS = (
    "inside and between: what each GPU sends in a step within its node and to other nodes. exposed: the communication that products "
    "wait for, all of that between GPUs that share matrices or experts; overlapped: what shards gather and reduce beside the "
    "products. No layout has a pipeline, hence no bubble."
)


def layouts_document(result: LayoutFront, catalog_hash: str, unit: str) -> Document:
    """Return the front, or what comes nearest."""
    cluster, requested = result.request.cluster, result.request.space
    data: dict[str, Any] = {
        "schema": "memplan/layouts/1",
        "gpus": requested.gpus,
        "cluster": {
            "gpus_per_node": cluster.per_node,
            "link": cluster.link,
            "link_bytes_per_second": cluster.inside,
            "network": cluster.network,
            "network_bytes_per_second": cluster.between,
        },
        "layouts": result.layouts,
        "candidates": result.plans,
        "rows": [_row_data(row, result, catalog_hash) for row in result.rows],
        "left_out": list(result.left_out),
    }
    if result.miss is not None:
        data["nearest_miss"] = plan_data(result.miss, catalog_hash)
        return Document(data, (_heading(result, unit), _left_out(result), _miss_sentence(result, result.miss, unit)), 1)
    own = tuple(f"{rank}. {_own_words(row.plan)}" for rank, row in enumerate(result.rows, 1))
    notes = (*_left_out(result), NO_MEASUREMENT, WHAT_OVERLAPS)
    blocks = (_heading(result, unit), _memory_table(result, unit), _time_table(result, unit), own, notes)
    return Document(data, (*blocks, _sentence(result, unit)))


def _row_data(row: LayoutRow, result: LayoutFront, catalog_hash: str) -> dict[str, Any]:
    """Return one answer: a plan, and what the search says of it besides."""
    time, parallel = row.spot.time, row.spot.config.parallel
    return plan_data(row.plan, catalog_hash) | {
        "layout": {
            "stack": row.plan.setup.stack.name,
            "data": parallel.data,
            "tensor": parallel.tensor,
            "sequence": parallel.sequence,
            "expert": parallel.expert,
            "pipeline": parallel.pipeline,
            "engine": parallel.engine,
            "zero_stage": parallel.zero_stage,
            "replicate": parallel.replicate,
        },
        "fullest_rank": fullest_rank(parallel),
        "own_words": [f"{own.own_key}: {own.own_value}" for own in _own_settings(row.plan) if own.own_key],
        "sent": {"inside_bytes": time.inside_bytes, "between_bytes": time.between_bytes},
        "estimate": {
            "step_seconds": time.total / SECOND,
            "exposed_seconds": time.exposed / SECOND,
            "overlapped_seconds": time.overlapped / SECOND,
            "bubble": 0.0,
            "tokens_per_step": time.tokens,
            "tokens_per_second": 10**15 / max(time.token_femtoseconds, 1),
            "rates_of": result.rates_of,
        },
    }


def _heading(result: LayoutFront, unit: str) -> tuple[str, ...]:
    request, cluster = result.request, result.request.cluster
    gpus = request.space.gpus
    nodes = -(-gpus // cluster.per_node)
    where = (
        f"{nodes:,} nodes of {cluster.per_node}, {cluster.network or 'no network known'} between"
        if nodes > 1
        else "one node"
    )
    config = request.bases[0]
    weights = ", ".join(sorted(set(config.weights.values())))
    usable = format_bytes(result.device.usable_bytes(0), unit)
    return (
        f"{sized(result.model, '')} on {gpus:,} x {result.device.name} ({usable} each)",
        f"{where}; {cluster.link} inside",
        f"{result.layouts} layouts, {result.plans} with each kind of recompute; sequence {config.sequence_length:,}",
        f"{weights} weights, compute in {config.compute_dtype}; {', '.join(base.stack for base in request.bases)}",
    )


def sharding(parallel: Parallel) -> str:
    """Return what data parallel GPUs divide, in a word."""
    if parallel.engine == "deepspeed":
        return f"zero {parallel.zero_stage}"
    groups = f" x {parallel.replicate}" if parallel.replicate > 1 else ""
    experts = f", ep {parallel.expert}" if parallel.expert > 1 else ""
    return f"fsdp2{groups}{experts}" if parallel.zero_stage else "ddp"


def _memory_table(result: LayoutFront, unit: str) -> Table:
    rows = []
    for rank, row in enumerate(result.rows, 1):
        config, plan = row.spot.config, row.plan
        parallel, steps = config.parallel, config.gradient_accumulation_steps
        rows.append(
            (
                str(rank),
                plan.verdict.upper(),
                f"{parallel.tensor}{' +sp' if parallel.sequence else ''}",
                str(parallel.data),
                sharding(parallel),
                plan.setup.config.checkpointing_words,
                str(config.micro_batch_size) if steps == 1 else f"{config.micro_batch_size} x {steps}",
                format_bytes(plan.upper_bytes, unit),
                f"~{two_digits(10**15 // max(row.spot.time.token_femtoseconds, 1)):,}",
                format_count(row.spot.time.tokens),
            )
        )
    headers = ("#", "", "tp", "dp", "", "recompute", ">b", ">upper end", ">tokens/s", ">a step")
    return Table(headers, tuple(rows))


def _time_table(result: LayoutFront, unit: str) -> Table:
    rows = []
    for rank, row in enumerate(result.rows, 1):
        time = row.spot.time
        rows.append(
            (
                str(rank),
                f"{_rank(row.spot.config.parallel)}, {row.plan.peak.name}",
                format_bytes(time.inside_bytes, unit),
                format_bytes(time.between_bytes, unit),
                f"~{time.total / SECOND:.2g} s",
                _share(time.exposed, time.total),
                _share(time.overlapped, time.total),
            )
        )
    return Table(("#", "fullest", ">inside", ">between", ">step", ">exposed", ">overlapped"), tuple(rows))


def fullest_rank(parallel: Parallel) -> int | None:
    """Return the rank that is planned, which has as much as any other; DeepSpeed's fullest is another one at each instant."""
    return None if parallel.engine == "deepspeed" else 0


def _rank(parallel: Parallel) -> str:
    return "rank 0" if fullest_rank(parallel) == 0 else "any rank"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"


def _own_settings(plan: MemoryPlan) -> tuple[OwnSetting, ...]:
    """Return what a layout sets, in the words of its stack."""
    config = plan.setup.config
    parallel = config.parallel
    settings: list[tuple[str, Any]] = [("parallel.tensor", parallel.tensor)] if parallel.tensor > 1 else []
    if parallel.expert > 1:  # which no CUDA graph goes with
        settings += [("parallel.expert", parallel.expert), ("zero_gradients", "free")]
    settings += [
        ("parallel.zero_stage", parallel.zero_stage),
        ("activation_checkpointing", plan.setup.checkpointing),
        ("micro_batch_size", config.micro_batch_size),
    ]
    own = own_settings(plan.setup.stack, settings)
    if parallel.engine != "deepspeed":
        return own
    stage = str(parallel.zero_stage)
    return (OwnSetting(f"parallel.zero_stage={stage}", "zero_optimization.stage", stage), *own)


def _own_words(plan: MemoryPlan) -> str:
    said = [f"{own.own_key}: {own.own_value}" for own in _own_settings(plan) if own.own_key]
    return f"{plan.setup.stack.name}: {', '.join(said)}"


def _left_out(result: LayoutFront) -> tuple[str, ...]:
    shown = [f"Left out: {reason}" for reason in result.left_out[:MOST_REASONS]]
    more = len(result.left_out) - MOST_REASONS
    return (*shown, *([f"... and {more} more; --json has them"] if more > 0 else []))


def _sentence(result: LayoutFront, unit: str) -> str:
    row = result.rows[0]
    plan, gpus = row.plan, result.request.space.gpus
    needs = f"{format_bytes(plan.upper_bytes, unit)} of {format_bytes(plan.usable_bytes, unit)}"
    return (
        f"{plan.verdict.upper()}: {plan.model.spec.name} fits on {gpus:,} x {result.device.name}; the fastest takes up to {needs} "
        "on each. --save FILE writes them, for --config."
    )


def _miss_sentence(result: LayoutFront, miss: MemoryPlan, unit: str) -> str:
    parallel, over = miss.setup.config.parallel, format_bytes(miss.upper_bytes - miss.usable_bytes, unit)
    tensor = f"tensor {parallel.tensor}{' with sequence' if parallel.sequence else ''}, " if parallel.tensor > 1 else ""
    return (
        f"NO: none of {result.layouts} layouts of {result.request.space.gpus:,} x {result.device.name} fits. The nearest miss needs up to "
        f"{format_bytes(miss.upper_bytes, unit)}, {over} too much: {tensor}data {parallel.data}, {sharding(parallel)}, "
        f"{miss.setup.config.checkpointing_words} checkpointing, micro-batch {miss.setup.config.micro_batch_size}, at {miss.peak.name}."
        + ("" if miss.setup.config.adapter else " Adapters need less: add --lora or --qlora.")
    )
