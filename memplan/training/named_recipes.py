"""How a config learns, from the names that it gives."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import TrainingConfig
from memplan.model.inventory import ROLES
from memplan.training.learning import Learning, Recipe, learning_of, recipe_of
from memplan.training.rules.role_names import filled, format_name, optimizer_name


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
