"""``memplan max`` and ``memplan where`` by a rule of the notes: labelled as theirs in every answer."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.errors import InvalidFileError
from memplan.model.model import Model
from memplan.published import notes_accounting as legacy
from memplan.report.document import Document, Table
from memplan.units import format_bytes, format_count, format_fraction, parse_bytes

WARNING = (
    "This is the notes' accounting, not memplan's: nothing is left for activations, embeddings, scales or the CUDA "
    "context but the share that the rule keeps free. Without --accounting memplan plans the real job."
)


def _label(accounting: str) -> str:
    return f"By the notes' accounting {accounting}, not memplan's: {legacy.ACCOUNTINGS[accounting]}"


def _config(accounting: str, config: str, catalog: Catalog) -> str:
    """Return the catalog name of a config that an accounting knows.

    Raises:
        UnknownNameError: The notes have no rule for it.
    """
    name = catalog.configs.name_of(config) if config in catalog.configs else config
    legacy.parts_of(accounting, name)
    return name


def max_by_notes(
    accounting: str, config: str | None, gpu: str | None, gpu_memory: str | None, count: int, catalog: Catalog
) -> Document:
    """Return the largest parameter counts by a rule of the notes.

    Args:
        accounting: One of :data:`memplan.published.notes_accounting.ACCOUNTINGS`.
        config: A config that it knows; None for all of them.
        gpu: A card of the notes; None for all of them, or with ``gpu_memory``.
        gpu_memory: A size with its unit in place of a card.
        count: How many cards, their memory added up.
        catalog: Where names are looked up.

    Raises:
        UnknownNameError: A config or card that the notes do not have.
        InvalidFileError: A card and a size at once.
    """
    if gpu is not None and gpu_memory is not None:
        raise InvalidFileError(["both --gpu and --gpu-memory given: give one of them"])
    if gpu_memory is not None:
        cards = {f"a GPU of {gpu_memory}": parse_bytes(gpu_memory)}
    else:
        names = list(legacy.CARD_GIGABYTES) if gpu is None else [catalog.gpus.name_of(gpu)]
        cards = {name: legacy.card_gigabytes(accounting, name) * legacy.GB for name in names}
    configs = list(legacy.PARTS[accounting]) if config is None else [_config(accounting, config, catalog)]
    data = [_max_data(accounting, name, card, size * count, count) for card, size in cards.items() for name in configs]
    rows = tuple(
        (
            accounting,
            row["gpu"] if count == 1 else f"{count} x {row['gpu']}",
            format_bytes(row["memory_bytes"], "GB"),
            row["config"],
            format_fraction(legacy.parts_of(accounting, row["config"]).total),
            format_count(row["max_parameters"]),
        )
        for row in data
    )
    table = Table(("accounting", "gpu", ">memory", "config", ">B/param", ">max_parameters"), rows, _label(accounting))
    best = max(data, key=lambda row: row["max_parameters"])
    sentence = (
        f"By {accounting} the largest is {format_count(best['max_parameters'])} parameters, with {best['config']} on "
        f"{best['gpu'] if count == 1 else f'{count} x ' + best['gpu']}; that is the notes' figure, not memplan's."
    )
    return Document({"schema": "memplan/max/1", "accounting": accounting, "rows": data}, (table, WARNING, sentence))


def _max_data(accounting: str, config: str, card: str, memory_bytes: int, count: int) -> dict[str, Any]:
    return {
        "accounting": accounting,
        "gpu": card,
        "count": count,
        "config": config,
        "memory_bytes": memory_bytes,
        "bytes_per_parameter": float(legacy.parts_of(accounting, config).total),
        "max_parameters": max(0, int(legacy.largest_parameters(accounting, config, memory_bytes))),
        "largest_fitting_model": None,
        "largest_fitting_parameters": 0,
    }


def where_by_notes(accounting: str, model: Model, config: str | None, catalog: Catalog) -> Document:
    """Return the GPUs that the notes say a model needs, by the size in its name.

    Args:
        accounting: ``notes-min-gpus``; the other rules have no such table.
        model: A catalog model with its nominal size in its name.
        config: A config that the rule knows; None for all of them.
        catalog: Where names are looked up.

    Raises:
        InvalidFileError: Another accounting, or a model without a nominal size.
        UnknownNameError: A config that the notes do not have.
    """
    if accounting != legacy.MINIMUM_GPUS:
        raise InvalidFileError([f"memplan where --accounting takes {legacy.MINIMUM_GPUS}, got {accounting}"])
    billions = nominal_billions(model)
    configs = list(legacy.PARTS[accounting]) if config is None else [_config(accounting, config, catalog)]
    data = [_where_data(accounting, name, billions) for name in configs]
    rows = tuple(
        (accounting, row["config"], format_bytes(row["device_bytes"], "GB"), str(row["count"]), row["gpu"])
        for row in data
    )
    size = f"{format_fraction(billions)}B"
    table = Table(("accounting", "config", ">needed", ">count", "gpu"), rows, f"{_label(accounting)}; {size} nominal")
    counts = " or ".join(f"{row['count']} x {row['gpu']} ({row['config']})" for row in data)
    sentence = f"By {accounting} {size} parameters take {counts}; that is the notes' figure, not memplan's."
    return Document(
        {"schema": "memplan/where/1", "accounting": accounting, "model": model.spec.name, "rows": data},
        (table, WARNING, sentence),
    )


def _where_data(accounting: str, config: str, billions: Fraction) -> dict[str, Any]:
    count, gpu = legacy.minimum_gpus(config, billions)
    needed = int(legacy.state_bytes(config, billions))
    return {
        "accounting": accounting,
        "config": config,
        "gpu": gpu,
        "count": count,
        "pooled": count > 1,
        "usable_bytes": legacy.CARD_GIGABYTES[gpu] * legacy.GB * count,
        "device_bytes": needed,
        "upper_bytes": needed,
        "verdict": "fits",
    }


def nominal_billions(model: Model) -> Fraction:
    """Return the billions of parameters that a catalog model's name gives.

    Raises:
        InvalidFileError: Its name gives none.
    """
    name = model.source.removeprefix("catalog:") if model.source.startswith("catalog:") else ""
    match = re.search(r"-([0-9]+(?:\.[0-9]+)?)b(?:-v[0-9.]+)?$", name)
    if match is None:
        raise InvalidFileError(
            [
                f"--accounting {legacy.MINIMUM_GPUS} goes by the size in a catalog model's name; {model.spec.name} has none"
            ]
        )
    return Fraction(match[1])
