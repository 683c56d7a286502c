"""What a config by itself, or with the catalog's entries, cannot be: each problem with the path of its key."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from memplan.catalog.catalog import Catalog
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import MAXIMUM_TOKENS, Offload, TrainingConfig
from memplan.errors import CannotAnswerError, MemplanError, match_hint
from memplan.model.inventory import Role
from memplan.training.rules.image_rules import image_problems, out_of_range
from memplan.training.rules.shared_rules import steps_beside
from memplan.training.rules.stack_rules import kernel_profile
from memplan.units import parse_bytes

Path = tuple[str, ...]
Where = Callable[[Path], str]


def word_problems(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield every word of a config, or of a part of it, that is none of those which its key takes."""
    for name, allowed in _word_fields(cast("Hashable", type(value))).items():
        given = getattr(value, name)
        if given not in allowed:
            known = ", ".join(str(word) for word in allowed if word is not None)
            hint = match_hint(str(given), [word for word in allowed if word])
            yield (*path, name), f"expected one of {known}, got {given!r}{hint}"
    if not path:
        for name in ("gradients", "kernels", "method", "images", "adapter", "offload"):
            if (part := getattr(value, name)) is not None:
                yield from word_problems(part, (name,))


@cache
def _word_fields(kind: Hashable) -> Mapping[str, tuple[Any, ...]]:
    """Return the keys of a config's part that take one of several words, with these words."""
    result: dict[str, tuple[Any, ...]] = {}
    for name, hint in get_type_hints(kind).items():
        options = [
            option for part in (hint, *get_args(hint)) if get_origin(part) is Literal for option in get_args(part)
        ]
        if options:
            result[name] = (*options, *((None,) if type(None) in get_args(hint) else ()))
    return result


def number_problems(config: TrainingConfig) -> Iterator[tuple[Path, str]]:
    """Yield every number of a config that is out of range."""
    limits = {"micro_batch_size": 2**24, "sequence_length": 2**30, "gradient_accumulation_steps": 2**20}
    for key, most in limits.items():
        yield from out_of_range(config, (), (key,), most)
    yield from out_of_range(config, (), ("evaluation_batch_size",), 2**24)
    within = all(1 <= getattr(config, key) <= most for key, most in limits.items())
    if within and config.micro_batch_size * config.sequence_length > MAXIMUM_TOKENS:
        yield ("sequence_length",), "batch times sequence length is beyond any machine"
    if config.dropout is not None and not 0 <= config.dropout < 1:
        yield ("dropout",), f"expected a probability from 0 to below 1, got {config.dropout}"
    yield from out_of_range(config.checkpointed_layers, ("checkpointed_layers",), ("every", "first"), 2**16)
    yield from image_problems(config.images)
    if config.adapter is not None and config.adapter.dropout is not None and not 0 <= config.adapter.dropout < 1:
        yield ("adapter", "dropout"), f"expected a probability from 0 to below 1, got {config.adapter.dropout}"
    if config.adapter is not None:
        yield from out_of_range(config.adapter, ("adapter",), ("rank",), 2**16)
    yield from out_of_range(config.kernels, ("kernels",), ("loss_chunks",), 2**16)
    batch = config.kernels.muon_batch_bytes
    if batch is not None and not 0 <= batch <= 2**50:
        yield ("kernels", "muon_batch_bytes"), f"expected a whole number of bytes from 0 to 2^50, got {batch}"
    try:
        parse_bytes(config.reserve)
    except MemplanError as error:
        yield ("reserve",), str(error)


def refuse_unmodelled(config: TrainingConfig, stack: Stack, place: Where) -> None:
    """Refuse keys whose effect is not modelled.

    Args:
        config: The config, filled in.
        place: Turns a path of keys into words for messages.

    Raises:
        CannotAnswerError: One of them is set.
    """
    for name in Offload.__dataclass_fields__:
        given = getattr(config.offload, name)
        beside: tuple[str, ...] = (
            ("optimizer_states", "weights") if steps_beside(config.parallel) else ("optimizer_states",)
        )
        if stack.checkpointing.offloads and config.activation_checkpointing == "full" and config.parallel.gpus == 1:
            beside += ("activations",)
        if given != getattr(Offload(), name) and (name not in beside or given != "cpu"):
            path = ("offload", name)
            able = "; shards of several GPUs are (--gpus, parallel.zero_stage: 3)" if name == "weights" else ""
            raise CannotAnswerError(
                f"{place(path)}: {given} is not supported: offloading {name} to the host is not modelled yet{able}"
            )


def refuse_frozen_formats(format_names: Mapping[Role, str], catalog: Catalog, place: Where) -> None:
    """Refuse to train weights in a format that can only be frozen.

    Raises:
        CannotAnswerError: Nothing codes them again after an update.
    """
    for role, given in format_names.items():
        if catalog.formats[given].training == "frozen":
            name = catalog.formats.name_of(given)
            able = ", ".join(key for key, entry in catalog.formats.entries.items() if entry.training != "frozen")
            raise CannotAnswerError(
                f"{place(('weights', role))}: weights in {name} cannot be trained: nothing codes them again after an update; "
                f"use one of {able}, or freeze them beside adapters"
            )


def refuse_offloading(config: TrainingConfig, optimizers: Iterable[str], catalog: Catalog, place: Where) -> None:
    """Refuse states in host memory where the bundled optimizer, which alone keeps them there, does not step.

    Raises:
        CannotAnswerError: Another optimizer would have to.
    """
    where = place(("offload", "optimizer_states"))
    used = {name: catalog.optimizers[name] for name in optimizers}
    for name, entry in used.items():
        if entry.bundled is None:
            able = ", ".join(key for key, other in catalog.optimizers.entries.items() if other.bundled is not None)
            raise CannotAnswerError(
                f"{where}: cpu is not supported with {name}: only the bundled optimizer keeps states in host memory ({able})"
            )
    if config.master_weights != "none":
        raise CannotAnswerError(
            f"{where}: cpu is not supported with master weights, which torch's own optimizers step; use master_weights: none"
        )
    muon = any(entry.orthogonalises for entry in used.values())
    if muon and kernel_profile(config, catalog).newton_schulz == "torch":
        raise CannotAnswerError(
            f"{where}: cpu is not supported with kernels.newton_schulz: torch, whose momentum stays on the device; use min or fast"
        )
