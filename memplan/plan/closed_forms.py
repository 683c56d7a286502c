"""Closed forms of a plan as lines: formulas in symbols, what layers save, what is alive at each instant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memplan.documents.frozen_values import dataclass
from memplan.step.tapes.linear_forms import QUANTITIES, Form, Part, Quantity, constant_form

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
