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

COLUMNS = 800
"""Moments of a step on a page, where it can be zoomed."""


def quick_sections(plan: Plan, command: str) -> dict[str, str]:
    """Return the title, the answer and the components of a plan, as HTML by the section's name."""
    return {
        "answer": answer_section(plan.advised, plan.sentence, command),
        "components": components_section(plan.memory),
    }


def slow_sections(plan: Plan) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the step, what would change it and every formula, as HTML by name; and what the chart is drawn from."""
    timeline = step_timeline(plan.memory, COLUMNS)
    sections = {
        "step": timeline_section(plan.memory, timeline),
        "changes": changes_section(plan.advised, plan.what_if),
        "formulas": formulas_section(plan.memory),
    }
    return sections, timeline_data(plan.memory, timeline)


def footer_of(plan: Plan) -> str:
    """Return who says so, of which catalog, and whose charting library draws it."""
    return f"memplan {memplan.__version__}, catalog {plan.catalog.hash[:12]}. Chart: {CHART_LIBRARY}."


def report_page(plan: Plan, command: str) -> str:
    """Return a plan as one HTML file that loads nothing."""
    quick, (slow, data) = quick_sections(plan, command), slow_sections(plan)
    main = "".join((quick["answer"], slow["step"], quick["components"], slow["changes"], slow["formulas"]))
    return one_file(title_of(plan.memory), main, data, footer_of(plan))
