"""What playing a tape yields: moments of forward and backward, and those of them that can be the fullest."""

from __future__ import annotations

from collections.abc import Sequence
from operator import ge, itemgetter

from memplan.documents.frozen_values import dataclass
from memplan.step.tapes.linear_forms import ZERO, Coefficients, Form
from memplan.step.tapes.reduction_workspaces import column_sum_bytes
from memplan.step.tapes.taped_operations import Reduction

BEHIND_REGION = "behind the region"
"""Name of moments of a forward behind the region of autocast, when what that has cast is gone."""

POOLED = "pooled"
"""Name of those in which token embeddings are pooled, when the model's own forward has returned these."""


@dataclass(frozen=True, slots=True)
class Instant:
    """A point of a step: the bytes alive there, as far as the tape knows them."""

    name: str
    operation: str
    form: Form
    # How many of the form's constant temporaries are gathered weights and reduced gradients of several GPUs.
    communication: int = 0
    reduces: Reduction | None = None  # A sum over rows that runs there, whose partial sums are no linear form

    def around(self, form: Form, name: str = "", operation: str = "") -> Instant:
        """Return the point with ``form`` alive besides, under another name where one is given."""
        return Instant(
            name or self.name, operation or self.operation, form + self.form, self.communication, self.reduces
        )

    def partial_bytes(self, values: Sequence[int]) -> int:
        """Return the partial sums that are there, given the values of the quantities."""
        if self.reduces is None:
            return 0
        return column_sum_bytes(self.reduces.times * values[self.reduces.quantity], self.reduces.columns)


@dataclass(frozen=True, slots=True)
class Played:
    """What a part of the model has alive in forward and in backward."""

    forward: list[Instant]  # Moments of its forward, with what it is given
    saved: Form  # What forward leaves for backward
    carried: Form  # What stays besides until the whole forward ends: weights that autocast has cast
    # Moments of its backward, what is computed again for it included; the first one has the gradient of its output, and
    # all that forward left.
    backward: list[Instant]
    escaped: Form = ZERO  # What of that stays until the graph of the loss goes, whatever backward has done


def dominant(instants: Sequence[Instant]) -> list[Instant]:
    """Return, for each name, the instants that can be the fullest: none of them is below another in every quantity.

    One with partial sums is below another only where that has the same.
    """
    groups: dict[str, list[Instant]] = {}
    for instant in instants:
        groups.setdefault(instant.name, []).append(instant)
    return [instant for group in groups.values() for instant in _highest(group)]


def _highest(instants: Sequence[Instant]) -> Sequence[Instant]:
    """Return the instants of one name that none of the others covers."""
    if len(instants) == 1:
        return instants
    distinct = {(instant.form.totals(), instant.reduces): instant for instant in reversed(instants)}
    chosen: list[tuple[Coefficients, Reduction | None]] = []
    for key in sorted(distinct, key=itemgetter(0), reverse=True):
        total, own = key
        if not any((own is None or own == other) and all(map(ge, form, total)) for form, other in chosen):
            chosen.append(key)
    return [distinct[key] for key in chosen]
