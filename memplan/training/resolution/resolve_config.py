"""Turn a training config into a setup: names looked up, gaps filled in by its stack, contradictions refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from memplan.catalog.catalog import Catalog
from memplan.catalog.shipped_tables import FamilyGap
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Parallel, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.hardware.hardware_tables import hardware_tables
from memplan.model.inventory import ROLES
from memplan.training.config_refusals import refuse_frozen_formats, refuse_offloading, refuse_unmodelled
from memplan.training.learning import recipe_of
from memplan.training.named_recipes import with_learning
from memplan.training.parallelism import parallel_refusals
from memplan.training.resolution.config_problems import Path, config_problems
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.rules.frozen_rules import freeze_refusals
from memplan.training.rules.method_rules import method_refusals, with_method, with_method_rules, with_replicas
from memplan.training.rules.offload_rules import steps_beside
from memplan.training.rules.role_names import filled, format_name, optimizer_name
from memplan.training.rules.stack_rules import kbit_formats, unmodelled, with_adapters
from memplan.units import parse_bytes

Where = Callable[[Path], str]


def resolve(config: TrainingConfig, catalog: Catalog, name: str, where: Where | None = None) -> TrainingSetup:
    """Return the setup that a config describes.

    Args:
        config: Read from a file, with overrides applied.
        catalog: Where its names are looked up.
        name: What messages call the config.
        where: Turns a path of keys into ``file:line: key`` for messages.

    Raises:
        InvalidFileError: Every unknown name, impossible number and contradiction at once.
        CannotAnswerError: Keys whose effect is not modelled yet.
    """
    place = where or (lambda path: f"{name}: {'.'.join(path)}")
    problems = [f"{place(path)}: {text}" for path, text in config_problems(config, catalog)]
    if problems:
        raise InvalidFileError(problems)
    stack = catalog.stack(config.stack)
    config, profile = filled(config, stack), config.kernels.over(stack.kernels)
    hidden = catalog.formats[format_name(config, "hidden_matrix")]
    stack = with_replicas(config, with_method_rules(config, stack, hidden))
    profile = with_adapters(config, with_method(config, stack, profile), stack, hidden)
    if profile.adapters != stack.kernels.adapters:
        config = replace(config, kernels=replace(config.kernels, adapters=profile.adapters))
    refuse_unmodelled(config, place)
    for path, text in freeze_refusals(config, stack):
        raise CannotAnswerError(f"{place(path)}: {text}")
    for path, text in method_refusals(config, stack, catalog, format_name(config, "hidden_matrix")):
        raise CannotAnswerError(f"{place(path)}: {text}")
    format_names = {role: format_name(config, role) for role in ROLES}
    named_formats = {role: catalog.formats.name_of(n) for role, n in format_names.items()}
    if config.adapter is None:
        refuse_frozen_formats(format_names, catalog, place)
    optimizer_names = {role: optimizer_name(config, catalog, role) for role in ROLES}
    if config.offload.optimizer_states == "cpu" and not steps_beside(config.parallel):
        refuse_offloading(config, optimizer_names.values(), catalog, place)
    known_formats = kbit_formats(config, stack, named_formats)
    if config.parallel != Parallel():
        used = {key: catalog.optimizers[key] for key in optimizer_names.values()}
        whole = {name for name in known_formats.values() if "bitsandbytes-4bit" in catalog.formats[name].needs}
        for path, text in parallel_refusals(config, profile, known_formats, FLOAT_BYTES, used, stack, whole):
            raise CannotAnswerError(f"{place(path)}: {text}")
    recipe = recipe_of(config, named_formats, optimizer_names, catalog)
    stored = {role: catalog.formats[n] for role, n in known_formats.items()}
    return TrainingSetup(
        name=name,
        config=with_learning(config, recipe, catalog, name),
        stack=stack,
        profile=profile,
        format_names=known_formats,
        formats=stored,
        gradient=None if config.gradients.dtype is None else catalog.gradients[config.gradients.dtype],
        optimizer_names=optimizer_names,
        optimizers={role: catalog.optimizers[n] for role, n in optimizer_names.items()},
        compute_bytes=FLOAT_BYTES[config.compute_dtype],
        reserve_bytes=parse_bytes(config.reserve),
        reserve_share=catalog.tables.reserve_share(config.allocator, recipe.coded),
        hardware=hardware_tables(catalog.root),
        family_gaps=_family_gaps(stack, catalog),
        unmodelled=tuple(f"{place(path)}: {text}" for path, text in unmodelled(stack, profile, known_formats, catalog)),
    )


def _family_gaps(stack: Stack, catalog: Catalog) -> Mapping[str, FamilyGap]:
    gaps = catalog.tables.family_gaps.get(stack.name)
    return {} if gaps is None else gaps.families
