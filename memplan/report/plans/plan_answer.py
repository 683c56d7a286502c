"""A memory plan as components, JSON and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import memplan
from memplan.model.inventory import ROLES, active_parameter_count, parameter_count
from memplan.plan.allowances import CONTEXT_SOURCE, CUBLAS_SOURCE, RESERVE_SOURCE
from memplan.plan.planner import BytesPerParameter, Component, MemoryPlan, bytes_per_parameter, form_text
from memplan.plan.suggestions import Suggestion
from memplan.report.document import Block, Document, Table
from memplan.report.plans.parallel_lines import (
    communication_rows,
    gpu_count,
    nccl_rows,
    parallel_assumptions,
    parallel_not_modelled,
)
from memplan.step.tapes.linear_forms import Part, constant_form
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import format_bytes, format_count, format_fraction

LOOSE_UNDER_TRANSFORMERS = {
    "gpt2": "its GELU runs step by step and keeps more (traced: 15 to 18 % more than planned)",
    "phi": "its GELU runs step by step and keeps more (traced: 16 to 30 % more than planned)",
    "olmo2": "its norm multiplies by its weight in fp32 and keeps more (traced: 3 to 8 % more than planned)",
    "falcon": "traced: up to 4 % more than planned",
    "phi3": "sequences longer than its window keep a mask per layer (traced: 1 to 3 % more than planned)",
    "gemma3_text": "sequences longer than its window keep a mask per layer (traced: 1 % more than planned)",
    "gpt_oss": "its norm multiplies by its weight in fp32 and keeps more (traced: up to 1 % more than planned)",
}
"""Families whose code in transformers keeps more than the hf-transformers preset says, as traced at full size."""


def components(plan: MemoryPlan) -> list[Component]:
    """Return the lines of the sum at the peak; they add up to the device total."""
    states, parts = plan.states, plan.parts
    tokens: dict[str, int | str] = {"b": plan.micro_batch_size, "t": plan.sequence_length}
    tape = "operations of the reference model, each tensor kept until its backward has run (memplan/step/tapes/tape.py)"
    rows = [
        Component(
            "weights",
            states.weight_bytes,
            "sum over tensors of ceil(n / block) * block_bytes",
            {},
            "configs/weight_formats.yaml",
            "exact",
        ),
        Component(
            "master_weights", states.master_bytes, "n * master_bytes", {}, "master_weights of the config", "exact"
        ),
        Component(
            "gradients",
            parts[Part.GRADIENTS],
            "gradients alive at the peak, in their dtype",
            {},
            "configs/gradient_dtypes.yaml",
            "exact",
        ),
        Component(
            "optimizer_states",
            states.state_bytes,
            "sum over tensors and state slots",
            {},
            "configs/optimizers.yaml",
            "exact",
        ),
        Component(
            "buffers",
            plan.buffer_bytes,
            form_text(plan.forms.buffers),
            tokens,
            "token ids, targets and rotary tables",
            "exact",
        ),
        Component("activations", parts[Part.ACTIVATIONS], _part_text(plan, Part.ACTIVATIONS), tokens, tape, "derived"),
        Component("logits", parts[Part.LOGITS], _part_text(plan, Part.LOGITS), tokens, tape, "derived"),
        Component("temporaries", parts[Part.TEMPORARIES], _temporaries_text(plan), tokens, tape, "derived"),
        *communication_rows(plan),
        _allowance(plan, "library_workspaces", plan.allowances.library_bytes, "cuBLAS workspaces", CUBLAS_SOURCE),
        _allocator(plan),
        _allowance(
            plan,
            "device_context",
            plan.allowances.context_bytes - plan.allowances.nccl_bytes,
            "CUDA context",
            CONTEXT_SOURCE,
        ),
        *nccl_rows(plan),
    ]
    return [row for row in rows if row.bytes]


def _allowance(plan: MemoryPlan, name: str, size: int, formula: str, source: str) -> Component:
    """Return an allowance, as stated in its source or as measured on a card."""
    if plan.allowances.measured_on:
        return Component(name, size, formula, {}, f"measured on {plan.allowances.measured_on}", "measured")
    return Component(name, size, formula, {}, source, "stated")


def _allocator(plan: MemoryPlan) -> Component:
    held = plan.reserved_bytes - plan.allocated_bytes
    share = format_fraction(plan.allowances.reserve_fraction * 100)
    return Component(
        "allocator_reserve",
        held + plan.rounding_bytes,
        f"block rounding + {share} % of allocated",
        {"rounding": plan.rounding_bytes, "allocated": plan.allocated_bytes},
        RESERVE_SOURCE,
        "derived",
    )


def _part_text(plan: MemoryPlan, part: Part) -> str:
    form = plan.peak.form.only(part)
    return form_text(form - constant_form(part, plan.peak.communication if part is Part.TEMPORARIES else 0))


def _temporaries_text(plan: MemoryPlan) -> str:
    return plan.forms.optimizer_formula if plan.peak.name == "optimizer step" else _part_text(plan, Part.TEMPORARIES)


def training_data(setup: TrainingSetup, plan: MemoryPlan | None = None) -> dict[str, Any]:
    """Return the keys of a training config with every default filled in; ``--config`` reads it back."""
    data = asdict(setup.config)
    data["weights"] = {role: setup.format_names[role] for role in ROLES}
    data["optimizer"] = {role: setup.optimizer_names[role] for role in ROLES}
    data["kernels"] = {"preset": setup.config.kernels.preset, **asdict(setup.profile)}
    names = set(data["weights"].values())
    if setup.gradient is None and len(names) == 1 and names <= FLOAT_BYTES.keys():
        data["gradients"]["dtype"] = names.pop()
    if plan is not None:
        data["micro_batch_size"], data["sequence_length"] = plan.micro_batch_size, plan.sequence_length
        data["dropout"] = plan.model.spec.dropout if setup.config.dropout is None else setup.config.dropout
    for key in ("adapter", "evidence"):
        if data[key] is None:
            del data[key]
    return data


def per_parameter_data(figure: BytesPerParameter) -> dict[str, float]:
    """Return bytes per parameter as decimal numbers."""
    return {
        "weights": float(figure.weights),
        "master_weights": float(figure.master_weights),
        "gradients": float(figure.gradients),
        "optimizer_states": float(figure.optimizer_states),
        "total": float(figure.total),
    }


def model_data(plan: MemoryPlan) -> dict[str, Any]:
    """Return what a plan says of its model."""
    model = plan.model
    return {
        "name": model.spec.name,
        "parameters": parameter_count(model.inventory),
        "active_parameters": active_parameter_count(model.inventory),
        "architecture": model.spec.architecture,
        "source": model.source,
    }


def plan_data(plan: MemoryPlan, catalog_hash: str, advice: Sequence[Suggestion] = ()) -> dict[str, Any]:
    """Return a plan as JSON of schema ``memplan/plan/1``."""
    return {
        "schema": "memplan/plan/1",
        "memplan_version": memplan.__version__,
        "catalog_hash": catalog_hash,
        "config": plan.setup.name,
        "status": plan.setup.config.status,
        "verdict": plan.verdict,
        "answer": answer(plan, advice),
        "model": model_data(plan),
        "gpu": {
            "name": plan.device.name,
            "count": gpu_count(plan),
            "memory_bytes": plan.device.memory_bytes,
            "usable_bytes": plan.usable_bytes,
        },
        "training": training_data(plan.setup, plan),
        "bytes_per_parameter": per_parameter_data(bytes_per_parameter(plan.setup)),
        "components": [
            {
                "name": c.name,
                "bytes": c.bytes,
                "formula": c.formula,
                "values": dict(c.values),
                "source": c.source,
                "kind": c.kind,
            }
            for c in components(plan)
        ],
        "instants": [{"name": name, "requested_bytes": size} for name, size in plan.instants],
        "peak": {
            "instant": plan.peak.name,
            "operation": plan.peak.operation,
            "requested_bytes": plan.requested_bytes,
            "allocated_bytes": plan.allocated_bytes,
            "reserved_bytes": plan.reserved_bytes,
            "device_bytes": plan.device_bytes,
            "upper_bytes": plan.upper_bytes,
        },
        "persistent_bytes": plan.persistent_bytes,
        "host": {"bytes": plan.host_bytes},
        "suggestions": [
            {
                "change": s.change,
                "saves_bytes": s.saves_bytes,
                "flips_verdict": s.flips_verdict,
                "cost": s.cost,
                "device_bytes": s.device_bytes,
            }
            for s in advice
        ],
        "assumptions": assumptions(plan),
        "not_modelled": not_modelled(plan),
    }


VERDICT_WORDS = {"fits": "FITS", "tight": "TIGHT", "no": "NO"}


def answer(plan: MemoryPlan, advice: Sequence[Suggestion] = (), unit: str = "") -> str:
    """Return the answer in one sentence, with the cheapest change that flips it."""

    def shown(size: int) -> str:
        return format_bytes(size, unit)

    name, gpu = plan.model.spec.name, device_name(plan)
    needs, usable = shown(plan.device_bytes), shown(plan.usable_bytes)
    head = f"{VERDICT_WORDS[plan.verdict]}: {name} with {plan.setup.label} needs about {needs} of the {usable} usable on {gpu}"
    if plan.verdict == "fits":
        return f"{head}, {shown(plan.usable_bytes - plan.upper_bytes)} to spare even at the upper end of {shown(plan.upper_bytes)}."
    if plan.verdict == "tight":
        head += f", but may need up to {shown(plan.upper_bytes)}"
    flip = next((s for s in advice if s.flips_verdict), None)
    if flip is None:
        return (
            f"{head}{'' if plan.verdict == 'tight' else f', {shown(plan.device_bytes - plan.usable_bytes)} too much'}."
        )
    return f"{head}; it fits with {flip.change} (saves {shown(flip.saves_bytes)}; cost: {flip.cost})."


def device_name(plan: MemoryPlan) -> str:
    """Return the device as people say it."""
    if plan.setup.config.parallel.data > 1:
        return f"each of {plan.setup.config.parallel.data} {plan.device.name}"
    return plan.device.name if plan.device.count == 1 else f"{plan.device.count} x {plan.device.name} (memory pooled)"


def assumptions(plan: MemoryPlan) -> list[str]:
    """Return what the answer takes for granted, one sentence each."""
    setup, found = plan.setup, []
    config, profile = setup.config, setup.profile
    found.append(
        f"kernels ({config.kernels.preset}): attention {profile.attention}, norm {profile.norm}, rotary {profile.rotary}, "
        f"activation {profile.activation}, optimizer {profile.optimizer}, newton_schulz {profile.newton_schulz}, loss {profile.loss}"
    )
    found.append("a steady-state step: optimizer states exist, every sequence has the full length")
    found.append(
        f"allocator: {config.allocator}; the least it lives with, {format_fraction(plan.allowances.reserve_fraction * 100)} % of what is allocated, "
        f"or {format_fraction(plan.allowances.upper_reserve_fraction * 100)} % at the upper end"
    )
    if setup.offloads_states:
        found.append(
            f"optimizer states: {plan.host_bytes:,} B of pinned host memory; the bundled optimizer steps, tensor by tensor, "
            "and two stretches of a tensor's states at a time are on the device; torch rounds each pinned tensor up to a "
            "power of two, so that up to twice as much is taken (https://github.com/pytorch/pytorch/issues/150517)"
        )
    found.extend(parallel_assumptions(plan))
    spec = plan.model.spec
    if spec.dropout and config.dropout is None:
        found.append(f"dropout {spec.dropout}, the model's own")
    kept = {
        e.tensor.role
        for e in plan.states.tensors
        if e.trainable is not None
        and e.format_name != setup.format_names[e.tensor.role]
        and not e.tensor.name.endswith(("lora_A.weight", "lora_B.weight"))
    }
    if kept:
        found.append(
            f"{', '.join(sorted(kept))}: tensors whose rows do not divide into blocks stay in {config.compute_dtype}"
        )
    if plan.device.count > 1:
        found.append(
            "memory of several devices is pooled: everything sharded evenly, nothing replicated, no communication buffers"
        )
    if 0 < spec.learned_positions == plan.sequence_length:
        found.append(f"sequence length {plan.sequence_length}: the model has no more learned positions")
    elif 0 < spec.max_position_embeddings < plan.sequence_length:
        found.append(
            f"sequence length {plan.sequence_length} is beyond the {spec.max_position_embeddings} that the model is made for"
        )
    if plan.device.gpu.unified_memory:
        found.append("memory is shared with the CPU: what the system and other programs use counts too")
    if plan.model.quantization:
        found.append(f"released in {plan.model.quantization}; planned in the config's own weight formats")
    found.extend(plan.model.notes)
    return found


def not_modelled(plan: MemoryPlan) -> list[str]:
    """Return what the answer leaves out, one sentence each."""
    found = [
        "memory of other processes and of the desktop (set reserve for it)",
        "what the sort of the embedding's backward takes inside itself",
    ]
    untraced = {entry.optimizer_name for entry in plan.states.tensors if entry.stepper == "untraced"}
    found.extend(f"temporaries of the {name} update, which is untraced" for name in sorted(untraced))
    found.extend(parallel_not_modelled(plan))
    preset, family = plan.setup.config.kernels.preset, plan.model.spec.architecture
    if preset == "hf-transformers" and family in LOOSE_UNDER_TRANSFORMERS:
        found.insert(0, f"{family} in transformers: {LOOSE_UNDER_TRANSFORMERS[family]}")
    return found


# ------------------------------------------------------------------ tables
def plan_document(
    plan: MemoryPlan, catalog_hash: str, advice: Sequence[Suggestion], unit: str, strict: bool
) -> Document:
    """Return the whole answer of ``memplan fit`` for one config."""
    blocks: list[Block] = [
        heading(plan),
        component_table(plan, unit),
        totals_table(plan, unit),
        instants_table(plan, unit),
    ]
    if advice:
        blocks.append(advice_table(advice, unit))
    blocks.append(
        (
            *(f"Assumed: {line}" for line in assumptions(plan)),
            *(f"Not counted: {line}" for line in not_modelled(plan)),
        )
    )
    blocks.append(answer(plan, advice, unit))
    return Document(plan_data(plan, catalog_hash, advice), tuple(blocks), exit_code(plan, strict))


def exit_code(plan: MemoryPlan, strict: bool) -> int:
    """Return 0 where the job fits, 1 where it does not; TIGHT is 0 unless strict."""
    return 1 if plan.verdict == "no" or (strict and plan.verdict == "tight") else 0


def heading(plan: MemoryPlan) -> tuple[str, str]:
    """Return what was asked, in two lines."""
    parameters = parameter_count(plan.model.inventory)
    config = plan.setup.config
    first = f"{plan.model.spec.name} ({format_count(parameters)} parameters) on {device_name(plan)}, {plan.setup.label} ({config.status}): {config.description}"
    second = (
        f"micro-batch {plan.micro_batch_size}, sequence {plan.sequence_length}, accumulation {config.gradient_accumulation_steps}, "
        f"checkpointing {config.activation_checkpointing}, compute in {config.compute_dtype}"
    )
    return first, second


def component_table(plan: MemoryPlan, unit: str) -> Table:
    """Return the sum at the peak."""
    rows = tuple(
        (c.name, format_bytes(c.bytes, unit), share(c.bytes, plan.device_bytes), c.kind, c.formula)
        for c in components(plan)
    )
    total = (
        "device",
        format_bytes(plan.device_bytes, unit),
        "100.0 %",
        "",
        f"at the {plan.peak.name} ({plan.peak.operation})",
    )
    return Table(("component", ">bytes", ">share", "kind", "formula"), (*rows, total))


def share(part: int, whole: int) -> str:
    """Return a share in per cent with one decimal."""
    tenths = (2000 * part + whole) // (2 * whole) if whole else 0
    return f"{tenths // 10}.{tenths % 10} %"


def totals_table(plan: MemoryPlan, unit: str) -> Table:
    """Return the four totals and what they are held against; and what lies in host memory."""
    rows: tuple[tuple[str, ...], ...] = (
        (
            "requested",
            format_bytes(plan.requested_bytes, unit),
            "live tensors, and what kernels allocate inside themselves",
        ),
        ("allocated", format_bytes(plan.allocated_bytes, unit), "after rounding to blocks, with library workspaces"),
        ("reserved", format_bytes(plan.reserved_bytes, unit), "segments that the allocator holds"),
        ("device", format_bytes(plan.device_bytes, unit), "what nvidia-smi shows"),
        ("upper end", format_bytes(plan.upper_bytes, unit), "of the interval around it"),
        (
            "usable",
            format_bytes(plan.usable_bytes, unit),
            f"of {format_bytes(plan.device.memory_bytes, unit)} on the device",
        ),
    )
    if plan.setup.offloads_states:
        rows += (("host", format_bytes(plan.host_bytes, unit), "optimizer states in pinned host memory"),)
    return Table(("total", ">bytes", "meaning"), rows)


def instants_table(plan: MemoryPlan, unit: str) -> Table:
    """Return the requested bytes at every instant."""
    rows = tuple(
        (name, format_bytes(size, unit), "peak" if name == plan.peak.name else "") for name, size in plan.instants
    )
    return Table(("instant", ">requested", ""), rows)


def advice_table(advice: Sequence[Suggestion], unit: str) -> Table:
    """Return what to change."""
    rows = tuple(
        (
            format_bytes(s.saves_bytes, unit),
            format_bytes(s.device_bytes, unit),
            "fits" if s.flips_verdict else "not yet",
            f"{s.change} ({s.cost})",
        )
        for s in advice
    )
    return Table((">saves", ">device after", "verdict", "change (its cost)"), rows)
