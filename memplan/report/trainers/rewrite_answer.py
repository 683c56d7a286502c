"""The answer of ``memplan suggest`` for a trainer's file: a unified diff, and the verdict before and after."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import unified_diff
from typing import TYPE_CHECKING, Any

from memplan import __version__
from memplan.documents.frozen_values import dataclass
from memplan.report.document import Block, Document, Table
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.plan.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A trainer's file as it is and as it could be."""

    path: str
    before_text: str
    after_text: str
    before: MemoryPlan
    after: MemoryPlan
    costs: tuple[str, ...]  # What each change costs besides memory, in the order in which they were made

    @property
    def diff(self) -> tuple[str, ...]:
        """The lines of a unified diff."""
        lines = unified_diff(
            self.before_text.splitlines(),
            self.after_text.splitlines(),
            f"a/{self.path.lstrip('/')}",
            f"b/{self.path.lstrip('/')}",
            lineterm="",
            n=1,
        )
        return tuple(lines)


def rewrite_document(rewritten: Rewritten, unit: str, strict: bool) -> Document:
    """Return the answer: what to change in the file's own keys, and what that does."""
    right = ("fits",) if strict else ("fits", "tight")
    fits = rewritten.after.verdict in right
    data = {
        "schema": "memplan/rewrite/1",
        "memplan_version": __version__,
        "file": rewritten.path,
        "diff": "\n".join(rewritten.diff),
        "before": _side(rewritten.before),
        "after": _side(rewritten.after),
        "costs": list(rewritten.costs),
    }
    rows = tuple(_row(name, plan, unit) for name, plan in (("before", rewritten.before), ("after", rewritten.after)))
    blocks: list[Block] = [rewritten.diff] if rewritten.diff else []
    blocks.append(Table(("", "Verdict", ">Expected", ">Worst case", ">Usable"), rows))
    if rewritten.costs:
        blocks.append(tuple(f"costs {cost}" for cost in dict.fromkeys(rewritten.costs)))
    blocks.append(_answer(rewritten, fits))
    return Document(data, tuple(blocks), 0 if fits else 1)


def _answer(rewritten: Rewritten, fits: bool) -> str:
    if not rewritten.diff:
        return "It fits as it is." if fits else "Nothing that keeps what is trained makes it smaller."
    return "It fits with these changes; --write makes them." if fits else "It does not fit even with these changes."


def _side(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "verdict": plan.verdict,
        "device_bytes": plan.device_bytes,
        "least_bytes": plan.least_bytes,
        "upper_bytes": plan.upper_bytes,
        "usable_bytes": plan.usable_bytes,
    }


def _row(name: str, plan: MemoryPlan, unit: str) -> tuple[str, ...]:
    """Return a plan's sizes; where it fits because the allocator gives back what is free, all that is usable is the worst."""
    most = min(plan.upper_bytes, plan.usable_bytes) if plan.verdict == "fits" else plan.upper_bytes
    sizes: Sequence[int] = (plan.needed_bytes, most, plan.usable_bytes)
    return (name, plan.verdict.upper(), *(format_bytes(size, unit) if unit else format_bytes(size) for size in sizes))
