"""A plan as a page: its sections, and the one file that has them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import memplan
from memplan.plan.reserve.step_timeline import step_timeline
from memplan.report.page.plan_sections import (
    answer_section,
    changes_section,
    components_section,
    formulas_section,
    timeline_data,
    timeline_section,
    title_of,
)
from memplan.report.page.whole_page import CHART_LIBRARY, one_file

if TYPE_CHECKING:
    from memplan.library.answers.planned_job import Plan
    from memplan.plan.memory_plan import MemoryPlan

COLUMNS = 800
"""Moments of a step on a page, where it can be zoomed."""


def quick_sections(plan: MemoryPlan, sentence: str, command: str, note: str = "") -> dict[str, str]:
    """Return the answer and the components of a plan, as HTML by the section's name.

    Args:
        command: A command line that asks the same, or nothing.
        note: What is to be known of the figures, or nothing.
    """
    return {"answer": answer_section(plan, sentence, command, note), "components": components_section(plan)}


def step_section(plan: MemoryPlan) -> tuple[str, dict[str, Any]]:
    """Return the step as HTML, and what its chart is drawn from."""
    timeline = step_timeline(plan, COLUMNS)
    return timeline_section(plan, timeline), timeline_data(plan, timeline)


def slow_sections(plan: Plan) -> dict[str, str]:
    """Return what would change a plan and every formula, as HTML by the section's name."""
    return {
        "changes": changes_section(plan.advised, plan.what_if),
        "formulas": formulas_section(plan.memory),
    }


def footer_of(plan: Plan) -> str:
    """Return who says so, of which catalog, and whose charting library draws it."""
    return f"memplan {memplan.__version__}, catalog {plan.catalog.hash[:12]}. Chart: {CHART_LIBRARY}."


def report_page(plan: Plan, command: str) -> str:
    """Return a plan as one HTML file that loads nothing."""
    quick, slow = quick_sections(plan.advised, plan.sentence, command), slow_sections(plan)
    step, data = step_section(plan.memory)
    main = "".join((quick["answer"], step, quick["components"], slow["changes"], slow["formulas"]))
    return one_file(title_of(plan.memory), main, data, footer_of(plan))
