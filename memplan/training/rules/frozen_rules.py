"""Which parameters of a model train where the others are frozen."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import ALL_TRAIN, Freeze, TrainingConfig
from memplan.documents.name_patterns import name_pattern, take_long
from memplan.errors import InvalidFileError
from memplan.model.inventory import ROLES, Inventory, ParameterTensor, expanded
from memplan.model.model import Model
from memplan.model.spec import LayerRun, ModelSpec
from memplan.training.rules.image_rules import out_of_range

Path = tuple[str, ...]
ALL_LAYERS = "and all of them train"
"""What a model's note says where more layers are to train than there are."""
Trains = Callable[[str, ParameterTensor], bool]
"""Tells whether a single parameter trains, given its name with the number of its layer."""


def freeze_problems(freeze: Freeze) -> Iterator[tuple[Path, str]]:
    """Yield what of a config's ``freeze`` is no pattern, no role or no number."""
    for key in ("parameters", "train"):
        for pattern in (patterns := getattr(freeze, key)):
            try:
                name_pattern(pattern)
            except ValueError as error:
                yield ("freeze", key), f"{pattern!r} {error}"
        if take_long(patterns):
            yield ("freeze", key), f"{len(patterns):,} patterns could take long to match; use fewer, or shorter ones"
    for role in freeze.roles:
        if role not in ROLES:
            yield ("freeze", "roles"), f"unknown role {role!r}; known: {', '.join(ROLES)}"
    yield from out_of_range(freeze, ("freeze",), ("first_layers", "last_layers"), 2**16)
    if freeze.input_gradients is not None and freeze == replace(ALL_TRAIN, input_gradients=freeze.input_gradients):
        yield ("freeze", "input_gradients"), "it counts where parameters are frozen; say which, or leave it out"


def freeze_refusals(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield why a step whose parameters do not all train is not followed."""
    freeze = config.freeze
    if freeze == ALL_TRAIN:
        return
    if stack.model_code != "transformers":
        able = "those whose models are transformers' are, such as transformers and trl"
        yield ("freeze",), f"frozen parts of a model are not modelled for stack {stack.name}; {able}"
    if config.adapter is not None:
        yield ("freeze",), "parameters that train beside adapters are not modelled so; use adapter.modules_to_save"
    if config.parallel != Parallel():
        yield ("freeze",), "frozen parts of a model are not modelled on several GPUs"
    if config.compile != "none" or config.gradients.lifetime != "step":
        key = ("compile",) if config.compile != "none" else ("gradients", "lifetime")
        yield key, "not modelled where parts of the model are frozen; leave it out"
    if config.method.stage != "sft":
        yield ("method", "stage"), f"{config.method.stage} is not modelled where parts of the model are frozen; sft is"


def with_frozen(model: Model, freeze: Freeze, where: str) -> Model:
    """Return a model whose tensors say whether they are frozen, with runs of layers in which all layers train alike.

    Args:
        where: What messages begin with.

    Raises:
        InvalidFileError: None trains.
    """
    if freeze == ALL_TRAIN:
        tower = {one.name for one in model.spec.tower.tensors} if model.spec.tower else set[str]()  # see images.tower
        if not any(tensor.frozen and tensor.name not in tower for tensor in model.inventory):
            return model
        # one that was built for a plan whose parameters were frozen, as files that are read back are planned on
        tensors = [tensor if tensor.name in tower else replace(tensor, frozen=False) for tensor in model.inventory]
        return replace(model, inventory=tuple(tensors))
    spec, inventory = _split(model.spec, model.inventory, freeze)
    if all(tensor.frozen or not tensor.used for tensor in inventory):
        ends = (model.spec.names.embedding, model.spec.names.layer)  # not the first of all, which a vision tower has
        own = [tensor.name for tensor in model.inventory if tensor.name.startswith(ends)]
        names = ", ".join([*dict.fromkeys(own)][:3])
        raise InvalidFileError([f"{where}: no parameter of {model.spec.name} trains; its names are {names}, ..."])
    notes = [text for text in _whole_models(model.spec, freeze) if text not in model.notes]
    return replace(model, spec=spec, inventory=inventory, notes=(*model.notes, *notes))


def _whole_models(spec: ModelSpec, freeze: Freeze) -> Iterator[str]:
    """Yield what is said where more layers are to train than there are."""
    # Source: ``_setup_freeze_tuning`` in llamafactory/model/adapter.py (0.9.5), which takes all of them then.
    for key in ("first_layers", "last_layers"):
        if (getattr(freeze, key) or 0) > (layers := spec.num_hidden_layers):
            yield f"freeze.{key} {getattr(freeze, key)}: {spec.name} has {layers} layers, {ALL_LAYERS}"


@lru_cache(maxsize=128)
def _split(spec: ModelSpec, inventory: Inventory, freeze: Freeze) -> tuple[ModelSpec, Inventory]:
    """Return a model's shapes and tensors, runs of layers cut where other parameters train."""
    trains = _rule(spec, freeze)
    by_first, runs, tensors = {run.first: run for run in spec.runs}, list[LayerRun](), list[ParameterTensor]()
    for first, group in groupby(inventory, lambda tensor: tensor.first if _in_layers(spec, tensor) else None):
        if first is None:
            tensors += [replace(tensor, frozen=not trains(tensor.name, tensor)) for tensor in group]
            continue
        for part, retained in _alike(by_first[first], list(group), trains):
            runs.append(part)
            tensors += retained
    return replace(spec, runs=tuple(runs)), tuple(tensors)


def _in_layers(spec: ModelSpec, tensor: ParameterTensor) -> bool:
    return tensor.name.startswith(f"{spec.names.layer}.")


def _alike(
    run: LayerRun, tensors: list[ParameterTensor], trains: Trains
) -> Iterator[tuple[LayerRun, list[ParameterTensor]]]:
    """Yield the parts of a run in which layers train alike, with their tensors."""

    def frozen(number: int) -> tuple[bool, ...]:
        return tuple([not trains(tensor.name.replace("{}", str(number)), tensor) for tensor in tensors])

    for still, group in groupby(range(run.first, run.first + run.count), frozen):
        numbers = list(group)
        part = LayerRun(run.layer, len(numbers), numbers[0])
        pairs = zip(tensors, still, strict=True)
        yield part, [replace(t, count=part.count, first=part.first, frozen=own) for t, own in pairs]


def trained_names(model: Model, freeze: Freeze) -> frozenset[str]:
    """Return the names of the parameters of a model that train, with the numbers of their layers."""
    trains = _rule(model.spec, freeze)
    return frozenset(name for name, tensor in expanded(model.inventory) if trains(name, tensor))


def _rule(spec: ModelSpec, freeze: Freeze) -> Trains:
    """Return what tells whether a parameter of a model trains."""
    stays, trained = (tuple(map(name_pattern, patterns)) for patterns in (freeze.parameters, freeze.train))
    layers = _layers(spec, freeze)
    layered = re.compile(re.escape(f"{spec.names.layer}.").replace(re.escape("{}"), r"(\d+)"))

    def chosen(name: str, tensor: ParameterTensor) -> bool:
        inside = layered.match(name)
        within = layers is None or (inside is not None and int(inside[1]) in layers)
        part = not freeze.parts or (inside is not None and name[inside.end() :].startswith(freeze.parts))
        return within and part and (not freeze.roles or tensor.role in freeze.roles)

    says = layers is not None or bool(freeze.parts or freeze.roles)

    def trains(name: str, tensor: ParameterTensor) -> bool:
        if any(pattern.search(name) for pattern in trained) or (says and chosen(name, tensor)):
            return True
        return bool(stays) and not any(pattern.search(name) for pattern in stays)

    return trains


def _layers(spec: ModelSpec, freeze: Freeze) -> frozenset[int] | None:
    """Return the layers that are said to train, or None where none is."""
    if freeze.first_layers is None and freeze.last_layers is None:
        return None
    numbers = range(spec.num_hidden_layers)
    behind = max(0, len(numbers) - (freeze.last_layers or 0))
    return frozenset((*numbers[: freeze.first_layers or 0], *numbers[behind:]))
