"""How training learns, computed from the evidence for what decides it: formats, dtypes and optimizers of a setup.

Nothing that only moves memory or time counts here: batch, length, checkpointing, kernels, parallelism, offloading.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import cast

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import Status
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.documents.printed_numbers import Records
from memplan.errors import InvalidFileError
from memplan.model.inventory import ROLES, Role
from memplan.training.rules.stack_defaults import filled, format_name, optimizer_name

ORDER: tuple[Status, ...] = ("proven", "works", "experimental", "untried", "diverges")
"""From the best to the worst."""

BEARS: Mapping[str, Status] = {
    "learns": "works",
    "level": "works",
    "indistinct": "works",
    "close": "works",
    "behind": "experimental",
    "far behind": "experimental",
    "diverges": "diverges",
}
"""Verdict of a record of training -> the best status that it bears; models of ours are small, so that none is proven."""

TRAINING, LITERATURE = "memplan/evidence/1", "memplan/literature/1"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides how training learns."""

    weights: tuple[str, ...]  # Weight format of each role
    optimizers: tuple[str, ...]  # Optimizer of each role
    gradients: str  # Dtype that gradients of hidden matrices are kept in
    compute_dtype: str
    master_weights: str
    coded: bool  # Whether weights are trained as codes
    adapter: str  # Kind of adapter, or nothing
    scaled: bool  # Whether the loss is scaled, as fp16 needs


@dataclass(frozen=True, slots=True)
class Learning:
    """How a recipe learns, and the record in ``configs/evidence/`` that says so."""

    status: Status = "untried"
    evidence: str | None = None


UNTRIED = Learning()


def recipe_of(
    config: TrainingConfig, formats: Mapping[Role, str], optimizers: Mapping[Role, str], catalog: Catalog
) -> Recipe:
    """Return what decides how a config learns.

    Args:
        formats: Weight format of each role, by catalog name.
        optimizers: Optimizer of each role, by catalog name.
    """
    hidden = formats["hidden_matrix"]
    is_float = catalog.formats[hidden].training == "float"
    trained = (config.adapter and config.adapter.dtype) or (hidden if is_float else config.compute_dtype)
    return Recipe(
        weights=tuple(formats[role] for role in ROLES),
        optimizers=tuple(optimizers[role] for role in ROLES),
        gradients=config.gradients.dtype or trained,
        compute_dtype=config.compute_dtype,
        master_weights=config.master_weights,
        coded=not is_float and config.adapter is None,
        adapter="" if config.adapter is None else config.adapter.kind,
        scaled=config.loss_scaling,
    )


def learning_of(recipe: Recipe, catalog: Catalog, known: Recipe | None, evidence: str | None, name: str) -> Learning:
    """Return how a recipe learns: as the records of it say, ``untried`` where there is none.

    Args:
        known: Recipe of the shipped config that it is named after, whose records are found without reading all.
    """
    diverging = next((n for n in recipe.optimizers if catalog.optimizers[n].status == "diverges"), None)
    if diverging is not None:
        return Learning("diverges", catalog.optimizers[diverging].evidence)
    if known == recipe:
        return of_config(recipe, catalog, name, evidence)
    return _recorded(catalog).get(recipe, UNTRIED)


def of_config(recipe: Recipe, catalog: Catalog, name: str, evidence: str | None) -> Learning:
    """Return how a shipped config learns, by its own record and by what others have published of it."""
    levels = [_borne(recipe, catalog, record) for record in (evidence, f"literature-{name}") if record is not None]
    return min(levels, key=lambda item: ORDER.index(item.status), default=UNTRIED)


def _borne(recipe: Recipe, catalog: Catalog, name: str) -> Learning:
    """Return what one record says of a recipe."""
    record = records_of(catalog).record(name)
    if record.get("schema") == LITERATURE:
        return Learning(cast("Status", record["verdict"]), name)
    if record.get("schema") != TRAINING:
        return UNTRIED
    if record["verdict"] not in BEARS:
        known = ", ".join(BEARS)
        raise InvalidFileError([f"configs/evidence/{name}.json: verdict {record['verdict']!r} is none of {known}"])
    parts = [BEARS[record["verdict"]], *(catalog.optimizers[optimizer].status for optimizer in recipe.optimizers)]
    wide = not recipe.coded and catalog.gradients[recipe.gradients].element_bytes > 1
    limit: Status = "works" if wide else "experimental"
    return Learning(max([*parts, limit], key=ORDER.index), name)


@lru_cache(maxsize=8)
def records_of(catalog: Catalog) -> Records:
    """Return the records of a catalog's evidence, which are read once."""
    return Records(catalog.root)


@lru_cache(maxsize=8)
def _recorded(catalog: Catalog) -> Mapping[Recipe, Learning]:
    """Return every recipe that evidence of ours is about: those of our configs, and of what was trained besides."""
    shipped = Catalog(catalog.root)
    known: dict[Recipe, Learning] = {}
    for name, config in shipped.configs.entries.items():
        recipe = named_recipe(config, shipped)
        known[recipe] = of_config(recipe, shipped, name, config.evidence)
    for record_name, record in records_of(catalog).training_records():
        training = record["training"]
        as_planned = (
            training["rounding"] == "stochastic" and not training["momentum_format"] and not training["matrix_options"]
        )
        if as_planned:
            recipe = named_recipe(_with_settings(shipped.configs[record["config"]], record["settings"]), shipped)
            known.setdefault(recipe, _borne(recipe, shipped, record_name))
    return known


def _with_settings(config: TrainingConfig, settings: list[str]) -> TrainingConfig:
    """Return a config with the settings of a record: formats, optimizers, and the dtype of gradients."""
    for setting in settings:
        path, _, value = setting.partition("=")
        section, _, key = path.partition(".")
        if section == "gradients" and key == "dtype":
            config = replace(config, gradients=replace(config.gradients, dtype=value))
        elif section == "weights":
            config = replace(config, weights={**config.weights, key: value})
        elif section == "optimizer":
            config = replace(config, optimizer={**config.optimizer, key: value})
        else:
            raise InvalidFileError([f"configs/evidence: a record's setting {setting!r} is not understood"])
    return config


def named_recipe(config: TrainingConfig, catalog: Catalog) -> Recipe:
    """Return what decides how a config learns; its names have to be known."""
    config = filled(config, catalog.stack(config.stack))
    formats = {role: catalog.formats.name_of(format_name(config, role)) for role in ROLES}
    return recipe_of(config, formats, {role: optimizer_name(config, catalog, role) for role in ROLES}, catalog)


def learning(config: TrainingConfig, catalog: Catalog, name: str) -> Learning:
    """Return how the config called ``name`` learns."""
    return _learning(named_recipe(config, catalog), catalog, name)


def _learning(recipe: Recipe, catalog: Catalog, name: str) -> Learning:
    shipped = catalog.shipped_config(name)
    known = None if shipped is None else _shipped_recipe(catalog, name)
    return learning_of(recipe, catalog, known, None if shipped is None else shipped.evidence, name)


@lru_cache(maxsize=64)
def _shipped_recipe(catalog: Catalog, name: str) -> Recipe:
    return named_recipe(catalog.configs.entries[name], catalog)


def with_learning(config: TrainingConfig, recipe: Recipe, catalog: Catalog, name: str) -> TrainingConfig:
    """Return a config with the status that evidence bears; evidence of a user's own is named, and bears none."""
    learned = _learning(recipe, catalog, name)
    own = config.evidence if config.evidence and not catalog.ships_evidence(config.evidence) else None
    return replace(config, status=learned.status, evidence=learned.evidence or own)
