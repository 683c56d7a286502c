"""What a training config cannot be, by itself or with the catalog's entries: each problem at the path of its key."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from memplan.catalog.catalog import Catalog
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import MAXIMUM_TOKENS, CheckpointedLayers, Offload, TrainingConfig
from memplan.errors import CannotAnswerError, MemplanError, match_hint
from memplan.model.inventory import ROLES, Role
from memplan.training.parallelism import parallel_problems
from memplan.training.resolved import FLOAT_BYTES
from memplan.training.rules.distillation_rules import teacher_problems
from memplan.training.rules.flat_rules import steps_beside
from memplan.training.rules.frozen_rules import freeze_problems
from memplan.training.rules.image_rules import image_problems, out_of_range
from memplan.training.rules.method_rules import method_problems
from memplan.training.rules.ppo_rules import ppo_problems
from memplan.training.rules.stack_defaults import MATRIX_ROLES, filled, format_name
from memplan.training.rules.stack_rules import kernel_profile, never_run, stack_problems
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
            beside = (
                *((True, False) if bool in get_args(hint) else ()),
                *((None,) if type(None) in get_args(hint) else ()),
            )
            result[name] = (*options, *beside)
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


def refuse_unmodelled(config: TrainingConfig, place: Where) -> None:
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
        if name == "activations":
            continue
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


def config_problems(config: TrainingConfig, catalog: Catalog) -> Iterator[tuple[Path, str]]:
    """Yield every unknown name, impossible number and contradiction of a config, with its path of keys."""
    yield from word_problems(config, ())
    yield from number_problems(config)
    yield from freeze_problems(config.freeze)
    yield from _names(config, catalog)
    if problems := tuple(stack_problems(config, catalog)):
        yield from problems
    else:
        stack = catalog.stack(config.stack)
        yield from _contradictions(whole := filled(config, stack))
        yield from _narrow_weights(whole, stack)
        yield from _layer_problems(whole, stack)
        yield from method_problems(whole, stack)
        yield from teacher_problems(whole, format_name(whole, "hidden_matrix"))
        yield from ppo_problems(whole, format_name(whole, "hidden_matrix"))
        hidden = format_name(config, "hidden_matrix")
        yield from never_run(whole, stack, catalog.formats.name_of(hidden) if hidden in catalog.formats else hidden)
    yield from parallel_problems(config.parallel)
    if config.gradients.dtype is not None and config.gradients.dtype not in catalog.gradients:
        yield ("gradients", "dtype"), _unknown(catalog.gradients, config.gradients.dtype)


def _names(config: TrainingConfig, catalog: Catalog) -> Iterator[tuple[Path, str]]:
    for section, mapping, shelf in (
        ("weights", config.weights, catalog.formats),
        ("optimizer", config.optimizer, catalog.optimizers),
    ):
        for role, name in mapping.items():
            if role not in ROLES and role != "default":
                known = (*ROLES, "default")
                yield (section, role), "unknown role" + match_hint(role, known, f"; known: {', '.join(known)}")
            if name not in shelf:
                yield (section, role), _unknown(shelf, name)
    for role, name in config.weights.items():
        if name in catalog.formats and not catalog.formats[name].storable:
            yield ("weights", role), f"{name} exists only during computation; weights cannot be stored in it"
        if role in ("norm", "bias") and name in catalog.formats and catalog.formats[name].block_elements > 1:
            yield ("weights", role), f"norms and biases stay in fp32, bf16 or fp16, not {name}"
    for role, name in config.optimizer.items():
        entry = catalog.optimizers[name] if name in catalog.optimizers else None
        if entry and entry.takes == "matrices" and role in ROLES and role not in MATRIX_ROLES:
            yield (
                ("optimizer", role),
                f"{name} takes hidden and expert matrices only; give {role} an AdamW, say {entry.rest}",
            )


def _unknown(shelf: object, name: str) -> str:
    try:
        shelf[name]  # type: ignore[index]
    except MemplanError as error:
        return str(error)
    raise AssertionError(name)


def _layer_problems(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield why not some layers alone can be checkpointed, where a config says so."""
    key, parallel = ("checkpointed_layers",), config.parallel
    if config.checkpointed_layers == CheckpointedLayers():
        return
    if config.activation_checkpointing != "full":
        yield key, "it counts where activation_checkpointing is full"
    elif not stack.own_models or stack.checkpointing.reentrant:
        yield (
            key,
            f"checkpointing of some layers only is not modelled for stack {stack.name}; torchtitan and bundled are",
        )
    elif parallel.pipeline > 1 or config.compile != "none":
        other = "over a pipeline" if parallel.pipeline > 1 else "of a compiled model"
        yield key, f"checkpointing of some layers only is not modelled {other}; leave it out"


def _narrow_weights(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield the weights that are narrower than what they would be multiplied by, or the other 16 bits, of models that no library casts."""
    compute, hidden = config.compute_dtype, format_name(config, "hidden_matrix")
    said = FLOAT_BYTES.get(hidden, 4) < FLOAT_BYTES[compute] or {hidden, compute} == {"bf16", "fp16"}
    if said or not stack.own_models:
        return  # said of compute_dtype itself; or cast by a library
    for role in ("embedding", "head", "expert_matrix"):
        name = format_name(config, role)
        why = f"torch multiplies no {name} by {compute}; give {role} {compute}"
        if FLOAT_BYTES.get(name, 4) < FLOAT_BYTES[compute]:
            yield ("weights", role), f"{name} is narrower than compute_dtype ({compute}): {why}"
        elif hidden != "fp32" and name != compute and FLOAT_BYTES.get(name) == FLOAT_BYTES[compute]:
            yield ("weights", role), f"{name} is not compute_dtype ({compute}): {why}"


def _contradictions(config: TrainingConfig) -> Iterator[tuple[Path, str]]:
    hidden = format_name(config, "hidden_matrix")
    if hidden in FLOAT_BYTES and FLOAT_BYTES[hidden] < FLOAT_BYTES[config.compute_dtype]:
        yield (
            ("compute_dtype",),
            f"{config.compute_dtype} is wider than the weights ({hidden}); torch computes in the weights' dtype",
        )
    if {hidden, config.compute_dtype} == {"bf16", "fp16"}:
        yield ("compute_dtype",), f"weights in {hidden} compute in {hidden}, not in {config.compute_dtype}"
    if config.gradients.lifetime == "layer":
        if config.gradient_accumulation_steps > 1:
            yield (
                ("gradient_accumulation_steps",),
                "gradients released inside backward cannot accumulate; use lifetime: step",
            )
        if config.clip_gradients:
            yield (
                ("clip_gradients",),
                "clipping needs the norm of all gradients before the first update; use lifetime: step",
            )
        if config.zero_gradients == "fill":
            yield (
                ("zero_gradients",),
                "gradients released inside backward leave nothing to fill; use zero_gradients: free",
            )
    if config.adapter is not None and config.master_weights != "none":
        yield ("master_weights",), "with adapters the base weights are frozen and have no master copy"
    if config.adapter is not None and not config.adapter.targets:
        yield ("adapter", "targets"), "expected at least one projection, such as q_proj, or all-linear"
