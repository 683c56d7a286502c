"""The answer of ``memplan suggest``: settings that fit, what each gives up, or the nearest miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.plan.model_notes import notes_on_models
from memplan.report.document import Document, Table
from memplan.report.plans.plan_answer import device_name, plan_data, sized, two_digits
from memplan.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan
    from memplan.solver.search.pareto_front import Combination
    from memplan.solver.search.suggested_settings import Settings, Suggestions
    from memplan.solver.search.timing import Rates

NOT_SEARCHED = (
    "Not searched: {gpus}; weights or activations in host memory; optimizers whose "
    "updates have not been traced{adapters}. recompute: activation checkpointing, +loss for the head too."
)
NO_ADAPTERS = "; adapters (--lora or --qlora searches them)"
ONE_GPU = "several GPUs (--gpus N searches them)"
PARALLEL_EXCLUDED = "parallelism other than data parallelism; trained block formats and released gradients, which several GPUs are not planned with"


def suggest_document(answer: Suggestions, catalog_hash: str, unit: str) -> Document:
    """Return the settings that fit, or what comes nearest."""
    data: dict[str, Any] = {
        "schema": "memplan/suggest/1",
        "rows": [row_data(row, answer, catalog_hash) for row in answer.rows],
        "combinations": answer.outcome.considered,
        "plans_compiled": answer.outcome.compiled,
    }
    head = _heading(answer, unit)
    if answer.rows:
        lines = tuple(f"{rank}. Gives up: {row.gives_up}." for rank, row in enumerate(answer.rows, 1))
        blocks = (head, _table(answer, unit), lines, _notes(answer), _sentence(answer, unit))
        return Document(data, blocks)
    if answer.miss is not None:
        miss = answer.miss
        plan = miss.plan
        data["nearest_miss"] = {
            "plan": plan_data(plan, catalog_hash),
            "over_bytes": max(0, plan.upper_bytes - plan.usable_bytes),
            "smallest_gpu": None if miss.smallest_gpu is None else miss.smallest_gpu.name,
        }
    data["experimental_fits"] = answer.experimental_fits
    return Document(data, (head, _notes(answer), _miss_sentence(answer, unit)), 1)


def row_data(row: Settings, answer: Suggestions, catalog_hash: str) -> dict[str, Any]:
    """Return one answer: a plan, with what the search says of it besides."""
    combination = row.combination
    return plan_data(row.plan, catalog_hash) | {
        "parts_status": combination.standing.status,
        "quality_risk": combination.standing.risk,
        "gives_up": row.gives_up,
        "estimate": {
            "step_seconds": combination.step_picoseconds / 10**12,
            "tokens_per_second": 10**15 * row.plan.setup.config.parallel.data / max(combination.token_femtoseconds, 1),
            "rates_of": answer.outcome.rates.source,
        },
    }


def _heading(answer: Suggestions, unit: str) -> str:
    base, space = answer.space.base, answer.space
    usable = format_bytes(answer.device.usable_bytes(parse_bytes(base.reserve)), unit)
    gpus = base.parallel.data
    on = answer.device.name if gpus == 1 else f"each of {gpus} {answer.device.name}"
    name = f"{sized(answer.model)} on {on} ({usable} usable)"
    step = f", at least {space.step_batch} sequences per step" if space.step_batch > 1 else ""
    return (
        f"{name}: {answer.outcome.considered:,} combinations at sequence {base.sequence_length}, "
        f"micro-batch {space.batches[0]} or more{step}; stack {base.stack}; {answer.outcome.compiled} planned"
    )


def _table(answer: Suggestions, unit: str) -> Table:
    several = answer.space.base.parallel.data > 1
    rows = tuple(_row(rank, row, unit) for rank, row in enumerate(answer.rows, 1))
    headers: tuple[str, ...] = (
        ">#",
        "verdict",
        "learning",
        ">risk",
        ">needs",
        ">tokens/s",
        ">b",
        "weights",
        "gradients",
        "optimizer",
        "recompute",
        *(("zero",) if several else ()),
    )
    return Table(headers, rows)


def _row(rank: int, row: Settings, unit: str) -> tuple[str, ...]:
    combination, plan = row.combination, row.plan
    state, way = combination.state, combination.way
    weights = (
        state.weights.dtype if not plan.setup.autocast else f"{state.weights.dtype}, {state.weights.compute_dtype}"
    )
    weights = f"{weights} + {state.master}" if state.master != "none" else weights
    again = plan.setup.config.checkpointing_words + ("+loss" if way.loss == "chunked" else "")
    released = " per layer" if way.lifetime == "layer" else ""
    return (
        str(rank),
        plan.verdict.upper(),
        plan.setup.config.status,
        str(combination.standing.risk),
        format_bytes(plan.most_bytes, unit),
        f"~{_tokens_per_second(combination, plan.setup.config.parallel.data):,}",
        str(combination.batch)
        if plan.setup.config.gradient_accumulation_steps == 1
        else f"{combination.batch} x {plan.setup.config.gradient_accumulation_steps}",
        weights,
        f"{state.gradient or _own_gradient_dtype(row)}{released}",
        plan.setup.optimizer_names["hidden_matrix"] + (" on host" if state.offload == "cpu" else ""),
        again,
        *((_layout(plan.setup.config.parallel),) if plan.setup.config.parallel.data > 1 else ()),
    )


def _layout(parallel: Parallel) -> str:
    flat = ", fsdp1" if parallel.engine == "fsdp1" else ""
    return f"{parallel.zero_stage}{flat}"


def _own_gradient_dtype(row: Settings) -> str:
    """Return the dtype that autograd gives gradients: that of what is trained, or of the products where codes are."""
    setup, weights = row.plan.setup, row.combination.state.weights
    if setup.config.adapter is not None:
        return setup.adapter_dtype
    return weights.compute_dtype if weights.coded else weights.dtype


def _tokens_per_second(combination: Combination, gpus: int) -> int:
    """Return an estimate for all GPUs."""
    return two_digits(10**15 * gpus // max(combination.token_femtoseconds, 1))


def _notes(answer: Suggestions) -> tuple[str, ...]:
    rates, base = answer.outcome.rates, answer.space.base
    gpus = base.parallel.data
    offloaded = any(row.combination.state.offload == "cpu" for row in answer.rows)
    link = f"{rates.host_bytes / 10**9:g} GB/s each way ({rates.host_link})"
    of = "" if rates.source == answer.device.name else f" of {rates.source}, the nearest GPU whose rates are known"
    return (
        f"tokens/s is a roofline estimate from bandwidth and dense FLOP/s{of}: it ranks settings and is no measurement.",
        "learning is what records of training say of the whole combination, untried where there is none.",
        "risk adds up statuses of weights, gradients and optimizer: 0 proven, 1 works, 2 experimental for each; 1 more for "
        "weights that ended far behind fp32 in every record, which come last.",
        *(parallel_notes(gpus, rates) if gpus > 1 else ()),
        *(
            [f"on host: optimizer states are copied to the device and back at {link}, not overlapped with compute."]
            if offloaded
            else []
        ),
        "needs: the upper end; where the allocator would cache more than is usable, the least that the run is known to survive in.",
        "Order: fits at the upper end, the worst status of the parts (experimental combinations with a training record of their "
        "own before others), estimated time in steps of 10 %, risk. Only the Pareto front of these is shown.",
        *notes_on_models([*(row.plan for row in answer.rows), *([answer.miss.plan] if answer.miss else [])]),
        NOT_SEARCHED.format(
            gpus=ONE_GPU if gpus == 1 else PARALLEL_EXCLUDED, adapters="" if base.adapter else NO_ADAPTERS
        ),
    )


def _needed(plan: MemoryPlan, unit: str) -> str:
    """Return the upper end, or what a plan is known to run in where its allocator would hold more with memory to spare."""
    if plan.releases_cache:
        resident = format_bytes(plan.upper_bytes, unit)
        return f"about {format_bytes(plan.least_bytes, unit)} (up to {resident} where memory is left, which its allocator releases)"
    return f"up to {format_bytes(plan.upper_bytes, unit)}"


def parallel_notes(gpus: int, rates: Rates) -> tuple[str, ...]:
    """Return what the figures of several GPUs mean."""
    return (
        f"b and bytes are per GPU, tokens/s for all {gpus}: {rates.peer_bytes / 10**9:g} GB/s each way between GPUs, overlapped "
        "with compute and counted where it takes longer.",
        "zero: 3 shards weights, gradients and optimizer states (torch's fully_shard; fsdp1: FullyShardedDataParallel), 0 replicates them (DistributedDataParallel).",
    )


def _sentence(answer: Suggestions, unit: str) -> str:
    best = answer.rows[0]
    plan = best.plan
    word = plan.verdict.upper()
    host = f" and {format_bytes(plan.host_bytes, unit)} of pinned host memory" if plan.setup.offloads_states else ""
    label = " These settings are experimental." if best.combination.standing.status == "experimental" else ""
    return (
        f"{word}: {plan.model.spec.name} fits on {device_name(plan)}; the best settings "
        f"need {_needed(plan, unit)} of {format_bytes(plan.usable_bytes, unit)}{host}.{label} "
        "--save FILE writes them, for --config."
    )


# ------------------------------------------------------------------ nothing fits
def _miss_sentence(answer: Suggestions, unit: str) -> str:
    name, miss = answer.model.spec.name, answer.miss
    if miss is None:
        return (
            f"NO: no combination is left for {name}: all contradict what is fixed, are experimental (add --experimental) "
            "or are known to diverge."
        )
    plan, config = miss.plan, miss.plan.setup.config
    over = format_bytes(plan.upper_bytes - plan.usable_bytes, unit)
    weights = plan.setup.format_names["hidden_matrix"]
    lifetime = "kept for the whole step" if config.gradients.lifetime == "step" else "released layer by layer"
    checkpointing = "no" if config.activation_checkpointing == "none" else config.checkpointing_words
    bigger = (
        f"The smallest GPU that would do is {miss.smallest_gpu.name}."
        if miss.smallest_gpu is not None
        else "No single GPU of the catalog would do."
    )
    if config.parallel.data > 1:
        bigger = bigger.replace("that would do", f"of which {config.parallel.data} would do")
        bigger = bigger.replace("No single GPU of the catalog", f"No {config.parallel.data} GPUs of one kind")
    host = f" in host memory ({format_bytes(plan.host_bytes, unit)})" if plan.setup.offloads_states else ""
    hint = " Experimental settings fit: add --experimental." if answer.experimental_fits else ""
    hint += "" if config.adapter else " Adapters need less: add --lora or --qlora."
    return (
        f"NO: none of {answer.outcome.considered:,} combinations fits. The nearest miss needs up to "
        f"{format_bytes(plan.upper_bytes, unit)}, {over} too much: {weights} weights, "
        f"{plan.setup.optimizer_names['hidden_matrix']}{host}, gradients {lifetime}, {checkpointing} checkpointing, "
        f"micro-batch {plan.micro_batch_size}. {bigger}{hint}"
    )
