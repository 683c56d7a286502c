"""What the notes' own rules answer for a GPU, a config and a model: the largest counts, the fewest cards."""

import re
from fractions import Fraction

from memplan.catalog.catalog import Catalog
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError
from memplan.model.model import Model
from memplan.published.notes_accounting import (
    GB,
    MINIMUM_GPUS,
    card_gigabytes,
    largest_parameters,
    minimum_gpus,
    notes_rules,
    parts_of,
    state_bytes,
)
from memplan.units import parse_bytes


@dataclass(frozen=True, slots=True)
class NotesLargest:
    """The largest parameter count that a rule of the notes gives."""

    accounting: str
    gpu: str  # A card of the notes, or a size in place of one
    count: int  # How many, their memory added up
    config: str
    memory_bytes: int  # Memory of all of them, in the decimal gigabytes on the box
    bytes_per_parameter: Fraction
    max_parameters: int


@dataclass(frozen=True, slots=True)
class NotesPlacement:
    """The cards that a rule of the notes gives a model."""

    accounting: str
    config: str
    gpu: str
    count: int
    usable_bytes: int  # Memory of all of them
    device_bytes: int  # What the rule says that the model needs


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards that are meant: one of the notes by name, a size in its place, or all of theirs."""

    gpu: str | None = None
    gpu_memory: str | None = None
    count: int = 1


def largest_by_notes(accounting: str, config: str | None, cards: Cards, catalog: Catalog) -> list[NotesLargest]:
    """Return the largest parameter counts by a rule of the notes.

    Args:
        accounting: One of :data:`memplan.published.notes_accounting.ACCOUNTINGS`.
        config: A config that it knows; None for all of them.

    Raises:
        UnknownNameError: A config or card that the notes do not have.
        InvalidFileError: A card and a size at once.
    """
    sizes = _card_bytes(accounting, cards, catalog)
    return [
        NotesLargest(
            accounting=accounting,
            gpu=card,
            count=cards.count,
            config=name,
            memory_bytes=size * cards.count,
            bytes_per_parameter=parts_of(accounting, name).total,
            max_parameters=max(0, int(largest_parameters(accounting, name, size * cards.count))),
        )
        for card, size in sizes.items()
        for name in _configs(accounting, config, catalog)
    ]


def _card_bytes(accounting: str, cards: Cards, catalog: Catalog) -> dict[str, int]:
    """Return the memory of one of each card."""
    if cards.gpu is not None and cards.gpu_memory is not None:
        raise InvalidFileError(["both --gpu and --gpu-memory given: give one of them"])
    if cards.gpu_memory is not None:
        return {f"a GPU of {cards.gpu_memory}": parse_bytes(cards.gpu_memory)}
    names = list(notes_rules().gigabytes) if cards.gpu is None else [catalog.gpus.name_of(cards.gpu)]
    return {name: card_gigabytes(accounting, name) * GB for name in names}


def _configs(accounting: str, config: str | None, catalog: Catalog) -> list[str]:
    """Return the catalog names of the configs that are meant, all of an accounting's where none is given."""
    if config is None:
        return list(notes_rules().charges[accounting])
    name = catalog.configs.name_of(config) if config in catalog.configs else config
    parts_of(accounting, name)
    return [name]


def fewest_by_notes(accounting: str, model: Model, config: str | None, catalog: Catalog) -> list[NotesPlacement]:
    """Return the GPUs that the notes say a model needs, by the size in its name.

    Args:
        accounting: ``notes-min-gpus``; the other rules have no such table.
        model: A catalog model with its nominal size in its name.
        config: A config that the rule knows; None for all of them.

    Raises:
        InvalidFileError: Another accounting, or a model without a nominal size.
        UnknownNameError: A config that the notes do not have.
    """
    if accounting != MINIMUM_GPUS:
        raise InvalidFileError([f"memplan where --accounting takes {MINIMUM_GPUS}, got {accounting}"])
    billions = nominal_billions(model)
    placements = []
    for name in _configs(accounting, config, catalog):
        count, gpu = minimum_gpus(name, billions)
        usable, needed = card_gigabytes(accounting, gpu) * GB * count, int(state_bytes(name, billions))
        placements.append(NotesPlacement(accounting, name, gpu, count, usable, needed))
    return placements


def nominal_billions(model: Model) -> Fraction:
    """Return the billions of parameters that a catalog model's name gives.

    Raises:
        InvalidFileError: Its name gives none.
    """
    name = model.source.removeprefix("catalog:") if model.source.startswith("catalog:") else ""
    match = re.search(r"-([0-9]+(?:\.[0-9]+)?)b(?:-v[0-9.]+)?$", name)
    if match is None:
        raise InvalidFileError(
            [f"--accounting {MINIMUM_GPUS} goes by the size in a catalog model's name; {model.spec.name} has none"]
        )
    return Fraction(match[1])
