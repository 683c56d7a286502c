"""The axes of a search: the choices on each, and which axes a request fixes to the base config."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from memplan.catalog.catalog import Catalog
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import InvalidFileError, match_hint
from memplan.solver.search.space import Space, WeightChoice
from memplan.training.own_settings import is_settable
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.rules.stack_defaults import default_allocator
from memplan.training.rules.stack_rules import kernel_profile

T = TypeVar("T")

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Micro-batches that are searched."""

FROZEN_FORMATS = ("q8-0", "q6-k", "q5-k", "q4-k", "q4-0", "iq4-xs", "nf4", "nf4-dq", "iq3-xxs", "iq2-xxs")
"""Block formats that weights below adapters are searched in; trained weights are searched in every format with a codec.

Rows that do not divide into blocks stay in the compute dtype.
"""

AXES: dict[str, tuple[str, ...]] = {
    "weights": ("weights", "compute_dtype", "loss_scaling"),
    "master": ("master_weights",),
    "gradients": ("gradients.dtype",),
    "lifetime": ("gradients.lifetime",),
    "optimizer": ("optimizer",),
    "checkpointing": ("activation_checkpointing",),
    "offload": ("offload.optimizer_states",),
    "optimizer-kernel": ("kernels.optimizer",),
    "newton-schulz": ("kernels.newton_schulz",),
    "loss": ("kernels.loss", "kernels.loss_chunks"),
    "allocator": ("allocator",),
    "batch": ("micro_batch_size",),
    "accumulation": ("gradient_accumulation_steps",),
}
"""Axis, as ``--keep`` names it -> the training-config keys that it fixes; setting a key fixes its axis too."""

KERNELS = ("optimizer-kernel", "newton-schulz", "loss")
"""What ``--keep kernels`` stands for."""


def full_space(base: TrainingConfig, catalog: Catalog, batches: Sequence[int], step_batch: int = 1) -> Space:
    """Return the space over every axis, other keys taken from ``base``."""
    profile, stack = kernel_profile(base, catalog), catalog.stack(base.stack)
    adapters = base.adapter is not None
    own_optimizers = tuple(dict.fromkeys(base.optimizer.values()))
    released = not (base.clip_gradients or base.zero_gradients == "fill" or step_batch > max(batches))
    return Space(
        base=base,
        weights=tuple(choice for choice in _weight_choices(catalog, base) if _holds(stack, choice, base)),
        masters=("none",) if adapters else _able(stack, "master_weights", "none", ("fp32",)),
        gradients=(None,) if adapters else _able(stack, "gradients.dtype", None, _gradient_dtypes(catalog)),
        lifetimes=_able(stack, "gradients.lifetime", "step", ("layer",)) if released else ("step",),
        optimizers=tuple(
            {"default": name}
            for name in _optimizer_names(catalog)
            if name in own_optimizers or is_settable(stack, [("optimizer", name)])
        ),
        optimizer_kernels=_able(stack, "kernels.optimizer", profile.optimizer, ("fused", "foreach")),
        newton_schulz=_able(stack, "kernels.newton_schulz", profile.newton_schulz, ("min", "fast")),
        checkpointing=tuple(
            kind
            for kind in ("none", "selective", "full")
            if kind in (base.activation_checkpointing, stack.checkpointing.default)
            or is_settable(stack, [("activation_checkpointing", kind)])
        ),
        losses=_able(stack, "kernels.loss", profile.loss, ("bf16", "fp32", "chunked")),
        allocators=_able(
            stack, "allocator", base.allocator or default_allocator(base, stack), ("native", "expandable")
        ),
        batches=tuple(batches),
        offloads=("none",) if adapters else _able(stack, "offload.optimizer_states", "none", ("cpu",)),
        step_batch=step_batch,
    )


def _able(stack: Stack, key: str, chosen: T, others: Sequence[T]) -> tuple[T, ...]:
    """Return what is chosen, and those of the others that the stack has words for."""
    return (chosen, *(other for other in others if other != chosen and is_settable(stack, [(key, other)])))


def _holds(stack: Stack, choice: WeightChoice, base: TrainingConfig) -> bool:
    """Tell whether a stack can hold weights so, where a config may say that nothing runs under autocast."""
    never = stack.autocast == "never" or base.autocast is False
    if never and choice.dtype == "fp32" and choice.compute_dtype != "fp32":
        return False
    if base.autocast is False and choice.loss_scaling:
        return False
    key = next((key for key in ("weights.hidden_matrix", "weights.default") if key in stack.keys), None)
    return choice.dtype in FLOAT_BYTES if stack.keys and key is None else is_settable(stack, [(str(key), choice.dtype)])


def _weight_choices(catalog: Catalog, base: TrainingConfig) -> tuple[WeightChoice, ...]:
    floats = (
        WeightChoice("fp32 under bf16 autocast", "fp32", {"default": "fp32"}, "bf16", False, False),
        WeightChoice("fp32", "fp32", {"default": "fp32"}, "fp32", False, False),
        WeightChoice("bf16", "bf16", {"default": "bf16"}, "bf16", False, False),
        WeightChoice("fp16", "fp16", {"default": "fp16"}, "fp16", True, False),
    )
    narrow = "bf16" if base.adapter is not None else "q8-0"
    rest = {"embedding": narrow, "head": narrow, "router": "bf16", "norm": "bf16" if base.adapter else "fp32"}
    coded = (
        WeightChoice(name, name, {"hidden_matrix": name, **rest}, "bf16", False, True)
        for name in (_trained_formats(catalog) if base.adapter is None else FROZEN_FORMATS)
        if name in catalog.formats
    )
    return (*floats, *coded)


def _trained_formats(catalog: Catalog) -> list[str]:
    """Return the formats that are trained as codes, the widest first."""
    coded = [(name, entry) for name, entry in catalog.formats.entries.items() if entry.training == "coded"]
    return [name for name, _ in sorted(coded, key=lambda item: -item[1].bytes_per_element)]


def _gradient_dtypes(catalog: Catalog) -> tuple[str, ...]:
    return tuple(name for name in ("bf16", "fp32", "fp8-e4m3", "fp8-e5m2") if name in catalog.gradients)


def _optimizer_names(catalog: Catalog) -> Iterator[str]:
    """Yield the optimizers that are searched; any other can be set, and is planned then."""
    for name, entry in catalog.optimizers.entries.items():
        if entry.searched:
            yield name


# ------------------------------------------------------------------ fixing axes
def with_fixed_axes(space: Space, names: Sequence[str], catalog: Catalog) -> Space:
    """Return a space whose axes called ``names`` are fixed to the base config's values.

    Raises:
        InvalidFileError: An unknown axis.
    """
    unknown = [name for name in names if name not in AXES and name != "kernels"]
    if unknown:
        known = (*AXES, "kernels")
        hint = match_hint(unknown[0], known)
        raise InvalidFileError([f"--keep {unknown[0]}: expected one of {', '.join(known)}{hint}"])
    base = space.base
    setup = resolve(base, catalog, "base")
    fixed: dict[str, object] = {}
    for axis in [part for name in names for part in (KERNELS if name == "kernels" else (name,))]:
        fixed |= _fixed(axis, base, setup.profile, setup)
    return replace(space, **fixed)  # type: ignore[arg-type]


def _fixed(name: str, base: TrainingConfig, profile: KernelProfile, setup: TrainingSetup) -> dict[str, object]:
    coded = setup.format_names["hidden_matrix"] not in FLOAT_BYTES
    hidden = setup.format_names["hidden_matrix"]
    own = WeightChoice(hidden, hidden, base.weights, base.compute_dtype, base.loss_scaling, coded)
    choices: dict[str, dict[str, object]] = {
        "weights": {"weights": (own,)},
        "master": {"masters": (base.master_weights,)},
        "gradients": {"gradients": (base.gradients.dtype,)},
        "lifetime": {"lifetimes": (base.gradients.lifetime,)},
        "optimizer": {"optimizers": (dict(setup.optimizer_names),)},
        "checkpointing": {"checkpointing": (base.activation_checkpointing,)},
        "offload": {"offloads": (base.offload.optimizer_states,)},
        "optimizer-kernel": {"optimizer_kernels": (profile.optimizer,)},
        "newton-schulz": {"newton_schulz": (profile.newton_schulz,)},
        "loss": {"losses": (profile.loss,)},
        "allocator": {"allocators": (setup.config.allocator,)},
        "batch": {"batches": (base.micro_batch_size,)},
        "accumulation": {"accumulation": base.gradient_accumulation_steps},
    }
    return choices[name]
