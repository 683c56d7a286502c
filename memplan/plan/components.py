"""The lines of the sum at the peak: what each is, how its bytes come about, and who says so; and a plan's closed forms as lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from memplan.catalog.config_keys.method_keys import Rollout
from memplan.catalog.entries import Kind
from memplan.documents.frozen_values import dataclass
from memplan.plan.allowances import RESERVE_SOURCE, SIMULATED_SOURCE
from memplan.step.beside.second_forward import second_bytes
from memplan.step.regimes import forwarded_rows
from memplan.step.states.parallel_shards import is_flat, is_partitioned, is_sharded
from memplan.step.tapes.linear_forms import QUANTITIES, Form, Part, Quantity, constant_form
from memplan.units import format_fraction

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that one layer saves for backward."""

    layer: str  # The run of layers
    operation: str  # The first operation that saves it
    coefficient: int  # Its bytes for each unit of ``quantity``
    quantity: str  # What its size grows with, as formulas write it
    bytes: int  # Its size in this plan


@dataclass(frozen=True, slots=True)
class InstantForm:
    """An instant of the step at its fullest moment."""

    name: str
    operation: str
    bytes: int  # What is alive besides weights, optimizer states and buffers
    formula: str  # The same as a closed form


def form_text(form: Form) -> str:
    """Return a form as text: coefficients of the quantities, parts summed."""
    terms = [f"{c:,} {QUANTITIES[q]}" if q else f"{c:,}" for q, c in zip(Quantity, form.totals(), strict=True) if c]
    return " + ".join(terms) or "0"


def part_text(plan: MemoryPlan, part: Part) -> str:
    """Return one part of what is alive at the peak as a closed form; what passes between GPUs is no temporary."""
    form = plan.peak.form.only(part)
    return form_text(form - constant_form(part, plan.peak.communication if part is Part.TEMPORARIES else 0))


def saved_tensors(plan: MemoryPlan) -> tuple[SavedTensor, ...]:
    """Return what one layer of each kind saves for backward, tensor by tensor."""
    return tuple(
        SavedTensor(layer, operation, coefficient, QUANTITIES[quantity], coefficient * plan.values[quantity])
        for layer, tensors in plan.forms.layer_saved
        for operation, quantity, coefficient, _ in tensors
    )


def instant_forms(plan: MemoryPlan) -> tuple[InstantForm, ...]:
    """Return every instant at its fullest moment."""
    fullest: dict[str, InstantForm] = {}
    for candidate in plan.forms.candidates:
        name, size = candidate.name, candidate.form.total_bytes(plan.values)
        if name not in fullest or size > fullest[name].bytes:
            fullest[name] = InstantForm(name, candidate.operation, size, form_text(candidate.form))
    return tuple(fullest.values())


COMPONENTS = (
    "weights", "master_weights", "gradients", "optimizer_states", "buffers", "activations", "logits", "temporaries",
    "communication", "library_workspaces", "allocator_reserve", "device_context", "nccl_buffers",
    "generation_engine",
)  # fmt: skip
"""The names of DESIGN section 5, in the order of every table."""

TAPE = "operations of the reference model, each tensor kept until its backward has run (memplan/step/tapes/tape.py)"
FULLY_SHARD_SOURCE = "torch/distributed/fsdp/_fully_shard (v2.13.0), traced on one rank"
PARTITIONED_SOURCE = (
    "deepspeed/runtime/zero/partitioned_param_coordinator.py, stage3.py (0.19.8), traced on the first rank"
)
FLAT_SOURCE = "deepspeed/runtime/zero/stage_1_and_2.py (0.19.8), traced on its fullest ranks"
REPLICATED_SOURCE = "torch/csrc/distributed/c10d/reducer.cpp (v2.13.0), traced on one rank"
ENGINE_SOURCE = (
    "gpu_memory_utilization in vllm/config/cache.py (002f10e): weights and cache of an engine, a share of the GPU"
)


@dataclass(frozen=True, slots=True)
class Component:
    """One line of the sum."""

    name: str
    bytes: int
    formula: str  # How the bytes come about, in symbols
    values: Mapping[str, int | str]  # What the symbols stand for
    source: str
    kind: Kind  # ``exact`` integers, ``derived`` by a rule, ``stated`` or ``measured`` allowances


def components(plan: MemoryPlan) -> tuple[Component, ...]:
    """Return the lines of the sum at the peak; they add up to the device total."""
    lines = (*_states(plan), *_step(plan), *_communication(plan), *_outside(plan))
    return tuple(line for line in lines if line.bytes)


def _states(plan: MemoryPlan) -> Iterator[Component]:
    """Yield what stays from step to step, and the gradients of the peak."""
    states, formats = plan.states, "configs/weight_formats.yaml"
    formula = "sum over tensors of ceil(n / block) * block_bytes"
    shares: dict[str, int | str] = {}
    for role, second in plan.setup.seconds.items():
        formula += f", those of the {role.replace('_', ' ')} too, {second.model.spec.name}"
        shares[role] = second_bytes(states.tensors, role)
    yield Component("weights", states.weight_bytes, formula, shares, formats, "exact")
    source = "master_weights of the config"
    yield Component("master_weights", states.master_bytes, "n * master_bytes", {}, source, "exact")
    formula, source = "gradients alive at the peak, in their dtype", "configs/gradient_dtypes.yaml"
    yield Component("gradients", plan.parts[Part.GRADIENTS], formula, {}, source, "exact")
    formula, source = "sum over tensors and state slots", "configs/optimizers.yaml"
    yield Component("optimizer_states", states.state_bytes, formula, {}, source, "exact")


def _step(plan: MemoryPlan) -> Iterator[Component]:
    """Yield what batch and sequence length decide."""
    rows = forwarded_rows(plan.setup, plan.micro_batch_size, plan.sequence_length)
    tokens = dict(zip("bt", rows, strict=True))
    source = "token ids, targets and rotary tables"
    yield Component("buffers", plan.buffer_bytes, form_text(plan.forms.buffers), tokens, source, "exact")
    parts = (("activations", Part.ACTIVATIONS), ("logits", Part.LOGITS))
    for name, part in parts:
        yield Component(name, plan.parts[part], part_text(plan, part), tokens, TAPE, "derived")
    stepping = plan.peak.name == "optimizer step"
    formula = plan.forms.optimizer_formula if stepping else part_text(plan, Part.TEMPORARIES)
    yield Component("temporaries", plan.parts[Part.TEMPORARIES], formula, tokens, TAPE, "derived")


def _communication(plan: MemoryPlan) -> Iterator[Component]:
    """Yield the line of what is gathered and reduced, where there are several GPUs."""
    parallel = plan.setup.config.parallel
    if parallel.gpus == 1 and not is_flat(parallel):
        return
    if is_partitioned(parallel):
        formula = "parameters gathered for the module that runs and ahead of it, and DeepSpeed's bucket of gradients"
        yield Component(
            "communication", plan.communication_bytes, formula, {"N": parallel.data}, PARTITIONED_SOURCE, "exact"
        )
        return
    if is_flat(parallel):
        formula, source = "DeepSpeed's buckets of gradients, and the copy that is reduced", FLAT_SOURCE
        if plan.states.staged_bytes:
            formula += "; a buffer for the largest gradient on its way to host memory"
    elif is_sharded(parallel):
        formula = "weights gathered for the root and for the layer that runs or comes next, gradients being reduced"
        if parallel.pipeline > 1:
            formula = "gathered weights of the rank's stages, gradients being reduced"
        source = FULLY_SHARD_SOURCE
    else:
        formula, source = "buckets that gradients are reduced in: as many bytes as gradients", REPLICATED_SOURCE
    yield Component("communication", plan.communication_bytes, formula, {"N": parallel.data}, source, "exact")


def _outside(plan: MemoryPlan) -> Iterator[Component]:
    """Yield what no formula over tensors can see."""
    allowances = plan.allowances
    yield _allowance(
        plan, "library_workspaces", allowances.library_bytes, "cuBLAS workspaces", allowances.library_source
    )
    yield _reserve(plan)
    context = allowances.context_bytes - allowances.nccl_bytes - allowances.engine_bytes
    yield _allowance(plan, "device_context", context, "CUDA context", allowances.context_source)
    parallel, source = plan.setup.config.parallel, allowances.nccl_source
    several = len(parallel.groups)
    number = (
        f"{('two', 'three', 'four', 'five')[several - 2]} NCCL communicators"
        if several > 1
        else "one NCCL communicator"
    )
    yield Component("nccl_buffers", allowances.nccl_bytes, number, {"N": parallel.gpus}, source, "stated")
    rollout = plan.setup.config.method.rollout
    if allowances.engine_bytes and rollout is not None:
        yield _engine(plan, rollout)


def _engine(plan: MemoryPlan, rollout: Rollout) -> Component:
    """Return what an engine that generates on the same GPU takes."""
    shared: dict[str, int | str] = {"engine_fraction": str(rollout.engine_fraction)}
    shared["memory"] = plan.device.gpu.cuda_total_bytes
    formula = "engine_fraction * memory" + (" - what a step has let go of" if rollout.sleeps else "")
    return Component("generation_engine", plan.allowances.engine_bytes, formula, shared, ENGINE_SOURCE, "stated")


def _reserve(plan: MemoryPlan) -> Component:
    """Return what the allocator holds beyond live tensors and workspaces."""
    reserve = plan.reserved_bytes - plan.requested_bytes - plan.allowances.library_bytes
    if not plan.reserve_by_share:
        values = {"reserved": plan.reserved_bytes, "allocated": plan.allocated_bytes}
        formula = "segments of the simulated allocator less what is requested and workspaces"
        if plan.apart_bytes:
            formula, values["apart"] = f"{formula}, and what a CUDA graph keeps apart", plan.apart_bytes
        return Component("allocator_reserve", reserve, formula, values, SIMULATED_SOURCE, "derived")
    formula = f"block rounding + {format_fraction(plan.allowances.reserve_fraction * 100)} % of allocated"
    values = {"rounding": plan.rounding_bytes, "allocated": plan.allocated_bytes}
    if plan.apart_bytes:
        formula, values["apart"] = f"{formula} + what a CUDA graph keeps apart", plan.apart_bytes
    return Component("allocator_reserve", reserve, formula, values, RESERVE_SOURCE, "derived")


def _allowance(plan: MemoryPlan, name: str, size: int, formula: str, source: str) -> Component:
    """Return an allowance, as stated in its source or as measured on a card."""
    if plan.allowances.measured_on:
        return Component(name, size, formula, {}, f"measured on {plan.allowances.measured_on}", "measured")
    return Component(name, size, formula, {}, source, "stated")
