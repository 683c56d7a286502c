"""What the notes' rules count with, as ``configs/notes_rules.yaml`` has it."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import cache

from memplan.catalog.catalog import data_directory
from memplan.documents.frozen_values import dataclass
from memplan.documents.loading import load_document
from memplan.documents.schemas import build

FILE = "configs/notes_rules.yaml"


@dataclass(frozen=True, slots=True)
class NotesCard:
    """A card of the notes, or several as one."""

    gigabytes: int  # Decimal, as on the box, of all of them
    gpu: str | None = None  # In the catalog
    count: int = 1


@dataclass(frozen=True, slots=True)
class Charge:
    """Bytes per parameter, as fractions in text."""

    weights: str
    gradients: str
    states: str

    @property
    def total(self) -> Fraction:
        """Sum of the parts."""
        return Fraction(self.weights) + Fraction(self.gradients) + Fraction(self.states)


@dataclass(frozen=True, slots=True)
class NotesRules:
    """Tables of the notes.

    Attributes:
        cards: By the notes' name, in their order.
        recommended: GPUs of the catalog that they recommend something for.
        models: Nominal size, such as ``8B``, and the catalog's model.
        charges: Accounting, and what it charges each config that it knows.
    """

    cards: Mapping[str, NotesCard]
    recommended: tuple[str, ...]
    models: Mapping[str, str]
    charges: Mapping[str, Mapping[str, Charge]]

    @property
    def gigabytes(self) -> dict[str, int]:
        """Decimal gigabytes of each single card, by its name in the catalog."""
        singles = (card for card in self.cards.values() if card.count == 1)
        return {card.gpu: card.gigabytes for card in singles if card.gpu is not None}


@cache
def notes_rules() -> NotesRules:
    """Return the tables; they ship with memplan, and the tests validate them."""
    return build(NotesRules, load_document(data_directory() / FILE).data)
