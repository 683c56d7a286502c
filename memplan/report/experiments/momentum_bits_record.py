"""The record of ``memplan lab momentum-bits`` as tables and a picture."""

from typing import Any

from memplan.report.document import Table
from memplan.report.experiments.gaps import Series, draw_gaps, gap_table, line_label
from memplan.report.figures import Figure, new_figure

TITLES = {"teacher-student": "One layer learns from a teacher (the notes' test)", "language-model": "Language model"}
WEIGHTS = {"q4-0": "Q4_0 weights", "fp32": "fp32 weights"}


def blocks(record: dict[str, Any]) -> tuple[Table | str, ...]:
    """Return a table for each problem."""
    return tuple(
        gap_table(rows, ("weights", "momentum"), title)
        for name, title in TITLES.items()
        if (rows := _rows(record, name))
    )


def _rows(record: dict[str, Any], problem: str) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if row["problem"] == problem]


def figure(record: dict[str, Any]) -> Figure:
    """Return gaps to fp32 momentum by format, a panel for each problem."""
    problems = [name for name in TITLES if _rows(record, name)]
    drawn, panels = new_figure(len(problems), width=5.6 * len(problems), height=4.8)
    for axes, problem in zip(panels, problems, strict=True):
        rows = [row for row in _rows(record, problem) if row["momentum"] != "fp32"]
        lines = {row["momentum"]: line_label(row["momentum"], row["bytes_per_parameter"]) for row in _sorted(rows)}
        series = _students(rows, lines) if problem == "teacher-student" else _families(rows, lines)
        draw_gaps(axes, list(lines.values()), series, apart=0.3 if problem == "teacher-student" else 0.0)
        axes.set_title(TITLES[problem])
        axes.set_xlabel("Loss above that with fp32 momentum (bar: seeds)")
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.13), ncols=3)
    panels[0].set_ylabel("Momentum, and bytes for each parameter")
    drawn.suptitle(_headline(record["rows"]), fontsize=12)
    return drawn


def _headline(rows: list[dict[str, Any]]) -> str:
    """Return what is to be seen, as far as the rows say so."""
    bad = {(row["problem"], row["momentum"]) for row in rows if row["diverged"]}
    if bad == {("teacher-student", "notes-2")}:
        return "Momentum in few bits: the notes' 2-bit codes diverge on the notes' own problem, sound ones do not"
    return "Momentum in few bits"


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (-row["bytes_per_parameter"], row["momentum"].startswith("notes")))


def _students(rows: list[dict[str, Any]], lines: dict[str, str]) -> list[Series]:
    return [
        Series(name, {lines[row["momentum"]]: row for row in rows if row["weights"] == weights}, place)
        for place, (weights, name) in enumerate(WEIGHTS.items(), 1)
    ]


def _families(rows: list[dict[str, Any]], lines: dict[str, str]) -> list[Series]:
    """Return the rows by codebook."""
    families: dict[str, dict[str, Any]] = {"linear or float": {}, "Gaussian": {}, "the notes'": {}}
    for row in rows:
        name = "Gaussian" if row["format"].startswith("gauss") else "the notes'" if "notes" in row["format"] else ""
        families[name or "linear or float"][lines[row["momentum"]]] = row
    return [Series(name, points, place) for place, (name, points) in enumerate(families.items(), 1) if points]
