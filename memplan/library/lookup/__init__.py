"""Names become values here, once: models, training configs, GPUs, profiles and prices, for every question alike."""

from functools import cache
from pathlib import Path

from memplan.catalog.catalog import Catalog, data_directory
from memplan.library.lookup.config_lookup import (
    Overrides,
    find_setup,
    parallels,
    require_one_gpu,
    require_own_loop,
)
from memplan.library.lookup.device_lookup import custom_gpu, find_device, local_gpu
from memplan.library.lookup.model_lookup import Shapes, catalog_model, find_model
from memplan.library.lookup.model_names import resolve_model_name


def open_catalog(extra: Path | None) -> Catalog:
    """Return the shipped catalog, which is read once in a process, or a new one with a user's own added."""
    return _shipped_catalog() if extra is None else Catalog(data_directory(), extra)


@cache
def _shipped_catalog() -> Catalog:
    return Catalog(data_directory())


__all__ = [
    "Overrides", "Shapes", "catalog_model", "custom_gpu", "find_device", "find_model", "find_setup", "local_gpu",
    "open_catalog", "parallels", "require_one_gpu", "require_own_loop", "resolve_model_name",
]  # fmt: skip
