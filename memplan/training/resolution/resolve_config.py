"""Turn a training config into a setup: names looked up, gaps filled in by its stack, contradictions refused."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import get_args

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.method_keys import SecondModel
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.entries import Optimizer
from memplan.catalog.hardware.hardware_tables import hardware_tables
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.shipped_tables import FamilyGap
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Allocator, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.inventory import ROLES, Role
from memplan.model.model import Model
from memplan.training.learning import recipe_of, with_learning
from memplan.training.parallelism import parallel_refusals
from memplan.training.resolution.config_problems import (
    Path,
    config_problems,
    refuse_frozen_formats,
    refuse_offloading,
    refuse_unmodelled,
)
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.rules.distillation_rules import on_policy
from memplan.training.rules.flat_rules import steps_beside
from memplan.training.rules.frozen_rules import freeze_refusals
from memplan.training.rules.method_rules import (
    method_refusals,
    with_checkpointing,
    with_method,
    with_method_rules,
    with_outputs,
)
from memplan.training.rules.ppo_rules import BESIDE_VALUES
from memplan.training.rules.stack_defaults import filled, format_name, optimizer_name, wide_optimizer
from memplan.training.rules.stack_rules import (
    activation_refusals,
    kbit_formats,
    kernel_refusals,
    unmodelled,
    with_adapters,
)
from memplan.training.second_models import (
    DEFAULT_DTYPE,
    REWARD,
    TEACHER,
    VALUES,
    BesideModel,
    as_called,
    second_config,
    trained_config,
    with_seconds,
    without_dropout,
)
from memplan.training.stack_models import built_by, with_model_built
from memplan.units import parse_bytes

Where = Callable[[Path], str]


def resolve(
    config: TrainingConfig,
    catalog: Catalog,
    name: str,
    where: Where | None = None,
    beside: Mapping[str, Model] | None = None,
) -> TrainingSetup:
    """Return the setup that a config describes.

    Args:
        config: Read from a file, with overrides applied.
        name: What messages call the config.
        where: Turns a path of keys into ``file:line: key`` for messages.
        beside: Models of their own that the config names, as they were looked up, by what they are.

    Raises:
        InvalidFileError: Every unknown name, impossible number and contradiction at once.
        CannotAnswerError: Keys whose effect is not modelled yet.
    """
    place = where or (lambda path: f"{name}: {'.'.join(path)}")
    if problems := [f"{place(path)}: {text}" for path, text in config_problems(config, catalog)]:
        raise InvalidFileError(problems)
    setup = replace(_setup(_filled(config, catalog), catalog, name, place), given=config)
    config, method = setup.config, setup.config.method
    named = {TEACHER: method.teacher, VALUES: method.value_model, REWARD: method.reward_model}
    seconds = {
        role: _second(config, given, role, catalog, beside or {}) for role, given in named.items() if given is not None
    }
    return with_seconds(setup, seconds)


def _setup(
    known: tuple[TrainingConfig, Stack, KernelProfile], catalog: Catalog, name: str, place: Where
) -> TrainingSetup:
    """Return the setup of a config that is filled in, with its stack and kernels.

    Raises:
        CannotAnswerError: Keys whose effect is not modelled yet.
    """
    config, stack, profile = known
    refuse_unmodelled(config, place)
    offloading = activation_refusals(config, stack, profile, catalog.formats[format_name(config, "hidden_matrix")])
    _refuse_first([*offloading, *kernel_refusals(config, stack), *freeze_refusals(config, stack)], place)
    _refuse_first(method_refusals(config, stack, catalog, format_name(config, "hidden_matrix")), place)
    format_names = {role: format_name(config, role) for role in ROLES}
    named_formats = {role: catalog.formats.name_of(n) for role, n in format_names.items()}
    if config.adapter is None:
        refuse_frozen_formats(format_names, catalog, place)
    optimizer_names = {role: optimizer_name(config, catalog, role) for role in ROLES}
    if config.offload.optimizer_states == "cpu" and not steps_beside(config.parallel):
        refuse_offloading(config, optimizer_names.values(), catalog, place)
    known_formats = kbit_formats(config, stack, named_formats)
    if config.parallel != Parallel():
        used, whole = {key: catalog.optimizers[key] for key in optimizer_names.values()}, _whole(known_formats, catalog)
        _refuse_first(parallel_refusals(config, profile, known_formats, used, stack, whole), place)
    recipe = recipe_of(config, named_formats, optimizer_names, catalog)
    return TrainingSetup(
        name=name,
        config=with_learning(config, recipe, catalog, name),
        stack=stack,
        profile=profile,
        format_names=known_formats,
        formats={role: catalog.formats[n] for role, n in known_formats.items()},
        gradient=None if config.gradients.dtype is None else catalog.gradients[config.gradients.dtype],
        optimizer_names=optimizer_names,
        optimizers=_optimizers(optimizer_names, stack, catalog),
        wide_optimizers=_wide_optimizers(config, stack, catalog),
        compute_bytes=FLOAT_BYTES[config.compute_dtype],
        reserve_bytes=parse_bytes(config.reserve),
        reserve_shares={name: catalog.tables.reserve_share(name, recipe.coded) for name in get_args(Allocator)},
        hardware=hardware_tables(catalog.root),
        family_gaps=_family_gaps(stack, catalog),
        unmodelled=tuple(f"{place(path)}: {text}" for path, text in unmodelled(stack, profile, known_formats, catalog)),
    )


def _second(
    config: TrainingConfig, given: SecondModel, role: str, catalog: Catalog, beside: Mapping[str, Model]
) -> BesideModel:
    """Return a model that a config names beside the one that it trains.

    Raises:
        CannotAnswerError: Nobody has looked it up, or it does not run so.
    """
    if role not in beside:
        raise CannotAnswerError(f"method.{role}.model: {given.model} was not looked up")
    dtype, compute = given.dtype or DEFAULT_DTYPE, config.compute_dtype
    if given.weights in FLOAT_BYTES and given.weights != dtype:
        told = f"a {role} that is not quantised is loaded in one dtype; use method.{role}.dtype: {given.weights} in its place"
        raise InvalidFileError([f"method.{role}.weights: {told}"])
    own_precision = on_policy(config.method) or config.method.stage in BESIDE_VALUES
    if dtype not in ("fp32", compute) and not own_precision:
        narrow = "fp32" if compute == "fp32" else f"{compute}, or fp32"
        raise CannotAnswerError(
            f"method.{role}.dtype: {dtype} beside products in {compute} is not modelled; use {narrow}"
        )
    own = trained_config(config, given, catalog) if role == VALUES else second_config(config, given)
    setup = as_called(resolve(own, catalog, f"method.{role}"), config.method)
    model = built_by(beside[role], setup)
    return BesideModel(beside[role], without_dropout(model), with_model_built(setup, model, beside[role]))


def _whole(formats: Mapping[Role, str], catalog: Catalog) -> set[str]:
    """Return the formats whose tensors no GPUs share."""
    return {name for name in formats.values() if "bitsandbytes-4bit" in catalog.formats[name].needs}


def _wide_optimizers(config: TrainingConfig, stack: Stack, catalog: Catalog) -> dict[Role, tuple[str, Optimizer]]:
    """Return what steps roles that a stack leaves in fp32 where a family's code does, by name and as an entry."""
    norms: list[Role] = ["norm"] if stack.model_code == "transformers" else []
    routers: list[Role] = ["router"] if stack.models.wide_routers else []
    names = {role: wide_optimizer(config, catalog, role) for role in (*norms, *routers)}
    return {role: (name, catalog.optimizers[name]) for role, name in names.items()}


def _optimizers(names: Mapping[Role, str], stack: Stack, catalog: Catalog) -> dict[Role, Optimizer]:
    """Return the optimizer of each role; where the stack exempts a role from it, every tensor keeps the exempt slots."""
    entries = {role: catalog.optimizers[name] for role, name in names.items()}
    exempt = {role for role, entry in entries.items() if entry.implementation in stack.exempts.get(role, ())}
    return {
        role: replace(entry, exempt_below=sys.maxsize) if role in exempt else entry for role, entry in entries.items()
    }


def _filled(config: TrainingConfig, catalog: Catalog) -> tuple[TrainingConfig, Stack, KernelProfile]:
    """Return a config with its gaps filled in by its stack, the stack as it runs it, and the kernels."""
    stack = catalog.stack(config.stack)
    config, profile = filled(config, stack), config.kernels.over(stack.kernels)
    hidden = catalog.formats[format_name(config, "hidden_matrix")]
    stack = with_outputs(config, with_checkpointing(config, with_method_rules(config, stack, hidden)))
    profile = with_adapters(config, with_method(config, stack, profile), stack, hidden)
    if profile.adapters != stack.kernels.adapters:
        config = replace(config, kernels=replace(config.kernels, adapters=profile.adapters))
    return config, stack, profile


def _refuse_first(refusals: Iterable[tuple[Path, str]], place: Where) -> None:
    """Raise the first of what is not modelled, each with its path of keys, where there is any."""
    for path, text in refusals:
        raise CannotAnswerError(f"{place(path)}: {text}")


def _family_gaps(stack: Stack, catalog: Catalog) -> Mapping[str, FamilyGap]:
    gaps = catalog.tables.family_gaps.get(stack.name)
    return {} if gaps is None else gaps.families
