"""What moved between two baselines, and whether the user's config moved it or memplan's own figures did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from memplan.budget.baseline import Baseline, Entry
from memplan.plan.components import COMPONENTS

Cause = Literal["added", "removed", "config", "memplan", "config and memplan", "none"]

CAUSES: dict[Cause, str] = {
    "added": "new job",
    "removed": "job removed",
    "config": "your config changed",
    "memplan": "memplan's own figures changed",
    "config and memplan": "your config changed, and memplan's own figures may have too",
    "none": "nothing moved",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One job on one GPU, before and after."""

    name: str
    gpu: str
    before: Entry | None
    after: Entry | None
    cause: Cause  # Why it moved
    components: Mapping[str, int]  # Bytes that components gained or lost, without those that stayed

    @property
    def moved_bytes(self) -> int:
        """Bytes that the device total gained."""
        return (self.after.device_bytes if self.after else 0) - (self.before.device_bytes if self.before else 0)

    @property
    def moved(self) -> bool:
        """Whether there is anything to tell."""
        return self.cause != "none"


def differences(base: Baseline, head: Baseline) -> list[Change]:
    """Return every job of either baseline: the largest growth first, then new, removed and unmoved ones."""
    same_memplan = (base.memplan_version, base.catalog_hash) == (head.memplan_version, head.catalog_hash)
    changes = []
    for key in sorted({*base.entries, *head.entries}):
        before, after = base.entries.get(key), head.entries.get(key)
        changes.append(Change(*key, before, after, _cause(before, after, same_memplan), _components(before, after)))
    return sorted(changes, key=lambda c: (not c.moved, -c.moved_bytes, c.name, c.gpu))


def _cause(before: Entry | None, after: Entry | None, same_memplan: bool) -> Cause:
    """Return why a job moved.

    What the user wrote has a hash of its own, and so has what it resolved to: where one of them is the
    same and the figures are not, it was memplan. Where both differ, memplan can have had a part in it
    only if its version or catalog differ too.
    """
    if before is None:
        return "added"
    if after is None:
        return "removed"
    figures = [(e.device_bytes, e.upper_bytes, e.components) for e in (before, after)]
    if before.asked == after.asked or before.inputs == after.inputs:
        return "none" if figures[0] == figures[1] else "memplan"
    return "config" if same_memplan else "config and memplan"


def _components(before: Entry | None, after: Entry | None) -> dict[str, int]:
    old = before.components if before else {}
    new = after.components if after else {}
    names = [*COMPONENTS, *sorted({*old, *new} - set(COMPONENTS))]
    moved = {name: new.get(name, 0) - old.get(name, 0) for name in names}
    return {name: size for name, size in moved.items() if size}
