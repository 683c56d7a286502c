"""One function per family: how a released ``config.json`` becomes a :class:`ModelSpec`.

A family's function stands in any module of ``kinds`` and is found by its name, which is the config's ``model_type``
with ``_`` for ``-``: ``qwen3_moe`` in ``kinds/mixtures.py`` reads ``model_type: qwen3_moe``. It takes
:class:`ConfigValues`, and ``runs_as`` above it says how transformers' code of the family computes. Private functions there, and the
modules beside that folder, are helpers and no families.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from inspect import isfunction
from pkgutil import iter_modules
from typing import Any

from memplan.errors import CannotAnswerError, InvalidFileError, nearest_match
from memplan.model.families import kinds
from memplan.model.families.config_values import ConfigValues
from memplan.model.families.family_fields import Around
from memplan.model.inventory import parameter_count
from memplan.model.parameter_tensors import inventory_of
from memplan.model.spec import ModelSpec

MAXIMUM_PARAMETERS = 10**15
"""Larger models are refused: none is within a factor of a hundred."""
MAXIMUM_RUNS = 128
"""Each run of equal layers is planned by itself, in time that grows faster than their number; the deepest released
model has 126 layers (https://arxiv.org/abs/2407.21783, table 3), so that none has more runs."""

TOWER_MODULES = ("image_prefixes", "projected_vision", "vision")
"""Modules whose families read a whole vision-language config; of others the text model alone is read."""


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Return all functions of the families' modules."""
    modules = [import_module(f"{kinds.__name__}.{module.name}") for module in iter_modules(kinds.__path__)]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isfunction(value) and value.__module__ == module.__name__
    }


@cache
def _builders() -> dict[str, Callable[[ConfigValues], ModelSpec]]:
    """Return the function of each family."""
    return {name: function for name, function in _functions().items() if not name.startswith("_")}


@cache
def transformers_rows() -> Mapping[str, Mapping[str, Any]]:
    """Return how transformers' code of each family differs from that of Llama, of parts of others too."""
    marked = {name: vars(function) for name, function in _functions().items() if "runs_as" in vars(function)}
    return {name.lstrip("_"): own["runs_as"] for name, own in marked.items()}


@cache
def around(architecture: str) -> Around:
    """Return what libraries do with a family of transformers; of others nothing is said, and all of it is taken for granted."""
    marked = {name: vars(function) for name, function in _functions().items() if "around" in vars(function)}
    said: dict[str, Around] = {name.lstrip("_"): own["around"] for name, own in marked.items()}
    return said.get(architecture, Around(scored=True))


@cache
def with_towers() -> tuple[str, ...]:
    """Return the families that read a whole vision-language config."""
    modules = {f"{kinds.__name__}.{module}" for module in TOWER_MODULES}
    return tuple(sorted(name for name, builder in _builders().items() if builder.__module__ in modules))


def families() -> tuple[str, ...]:
    """Return the supported values of ``model_type``, which are the names of the families' functions."""
    return tuple(sorted(_builders()))


def model_spec(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """Return the shapes that a released config gives.

    Args:
        config: Keys of ``config.json``, of which ``model_type`` (or ``architecture``) names the family.
        source: File or catalog entry, for messages.

    Raises:
        InvalidFileError: Keys are missing, of the wrong type or absurd; all of them are listed.
        CannotAnswerError: The family is unknown, or a key asks for something that it does not model.
    """
    return read_config(config, name, source)[0]


def read_config(
    config: Mapping[str, Any], name: str, source: str, locate: Callable[[str], str] | None = None
) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return the shapes of a config, and one sentence for each thing that they leave out.

    Args:
        config: As in :func:`model_spec`, which raises the same errors.
        source: File or catalog entry, for messages.
        locate: Turns a key into ``file:line: key``; by default ``source: key``.
    """
    family = _family(config, source)
    values = ConfigValues(config, name, source, family, locate)
    spec = _builders()[family](values)
    values.finish()
    if len(spec.runs) > MAXIMUM_RUNS:
        kinds = f"{len(spec.runs):,} changes between kinds of layers; at most {MAXIMUM_RUNS} are planned"
        raise CannotAnswerError(f"{source}: {kinds}")
    parameters = parameter_count(inventory_of(spec))
    if parameters > MAXIMUM_PARAMETERS:
        raise InvalidFileError([f"{source}: these shapes give {parameters:,} parameters, more than any model has"])
    return spec, values.notes()


def _family(config: Mapping[str, Any], source: str) -> str:
    key = "model_type" if "model_type" in config else "architecture"
    given = config.get(key)
    if not isinstance(given, str) or not given:
        raise InvalidFileError([f"{source}: model_type: required, the name of a model family; got {given!r:.60}"])
    family = given.lower().replace("-", "_").replace(".", "_")
    if family in _builders():
        return family
    match = nearest_match(given, families())
    hint = f" (the nearest that is: {match})" if match else ""
    raise CannotAnswerError(
        f"{source}: {key} {given!r:.60} is not supported{hint}; supported are {', '.join(families())}"
    )
