"""Unknown names, impossible numbers and contradictions of a training config, each at its path of keys."""

from collections.abc import Iterator

from memplan.catalog.catalog import Catalog
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import CheckpointedLayers, TrainingConfig
from memplan.errors import MemplanError, match_hint
from memplan.model.inventory import ROLES
from memplan.training.parallelism import parallel_problems
from memplan.training.resolution.config_refusals import number_problems, word_problems
from memplan.training.resolved import FLOAT_BYTES
from memplan.training.rules.frozen_rules import freeze_problems
from memplan.training.rules.method_rules import method_problems
from memplan.training.rules.role_names import MATRIX_ROLES, filled, format_name
from memplan.training.rules.stack_rules import never_run, stack_problems

Path = tuple[str, ...]


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
        yield from never_run(whole, stack, format_name(config, "hidden_matrix"))
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
