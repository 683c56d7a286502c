"""What a stack fills into a training config, and the format and optimizer of each role of a model's tensors."""

from dataclasses import replace
from typing import Literal, cast

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.method_keys import SCORED, Images
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Allocator, Checkpointing, Offload, TrainingConfig
from memplan.model.inventory import ROLES, Role
from memplan.training.rules.method_rules import GENERATING, REFERRED, UNREFERRED, with_reference
from memplan.training.rules.ppo_rules import BESIDE_VALUES
from memplan.training.rules.stack_rules import (
    FLOATS,
    Floats,
    beside_codes,
    casts_floats,
    casts_trained,
    is_flattened,
    kbit_formats,
)


def with_stack_defaults(config: TrainingConfig, stack: Stack, hidden: str) -> TrainingConfig:
    """Return a config in which what it leaves to its stack is filled in."""
    adapter = config.adapter
    if adapter is not None and adapter.dtype is None:
        adapter = replace(adapter, dtype=adapter_dtype(config, stack, hidden))
    if adapter is not None and casts_trained(config, stack) and (hidden in FLOATS or is_flattened(config)):
        adapter = replace(adapter, dtype="fp32")
    if adapter is not None and adapter.vision is None:
        named = (
            stack.vision == "frozen" and "all-linear" not in adapter.targets
        )  # get_target_modules (ms-swift's tuner.py)
        adapter = replace(adapter, vision=named or stack.vision == "as-language")
    # disable_dropout is true (trl/trainer/dpo_config.py and others, 1.16.0)
    if config.method.stage not in ("sft", "classification", *GENERATING):
        adapter = adapter and replace(adapter, dropout=0.0)
    return replace(
        config,
        method=with_reference(config, stack),
        activation_checkpointing=config.activation_checkpointing or default_checkpointing(config, stack, hidden),
        clip_gradients=_clips(config, stack),
        zero_gradients=config.zero_gradients or ("fill" if _captured(config, stack) else "free"),
        allocator=config.allocator or default_allocator(config, stack),
        adapter=adapter,
        images=_images(config, stack),
        offload=_offload(config, stack, hidden),
    )


def _clips(config: TrainingConfig, stack: Stack) -> bool:
    """Return whether gradients are clipped, which PPO's own loop never does."""
    own = stack.clip_gradients and config.method.stage not in BESIDE_VALUES
    return own if config.clip_gradients is None else config.clip_gradients


def default_allocator(config: TrainingConfig, stack: Stack) -> Allocator:
    """Return what a stack makes of torch's allocator where a config does not say."""
    own = "native" if config.parallel.gpus == 1 and stack.allocator == "expandable-of-several" else stack.allocator
    return "native" if own == "native" else "expandable"


def _captured(config: TrainingConfig, stack: Stack) -> bool:
    """Return whether a stack captures a config's forwards and backwards as a CUDA graph."""
    return stack.cuda_graphs and config.parallel.pipeline == 1 and config.parallel.expert == 1


def _offload(config: TrainingConfig, stack: Stack, hidden: str) -> Offload:
    """Return what a config keeps in host memory: with its stack's own checkpointing, inputs of layers too."""
    own = config.activation_checkpointing is None and default_checkpointing(config, stack, hidden) == "full"
    waits = own and stack.checkpointing.offloads == "buffers" and config.parallel.gpus == 1
    return replace(config.offload, activations="cpu") if waits else config.offload


def _images(config: TrainingConfig, stack: Stack) -> Images:
    """Return a config's images, with whether what they pass through is trained filled in."""
    images = config.images
    if not images.per_row:
        return images
    still: Literal["trained", "frozen"] = "frozen" if config.adapter or stack.vision != "as-language" else "trained"
    return replace(images, tower=images.tower or still, projector=images.projector or still)


def default_checkpointing(config: TrainingConfig, stack: Stack, hidden: str) -> Checkpointing:
    """Return how a stack checkpoints activations where a config does not say."""
    rules = stack.checkpointing
    if config.method.stage in BESIDE_VALUES:
        return "none"  # its own loop switches none on
    return rules.default_quantised if beside_codes(config, hidden) else rules.default


def adapter_dtype(config: TrainingConfig, stack: Stack, hidden: str) -> Floats:
    """Return the dtype of adapters that a stack makes where a config does not say."""
    rule = stack.adapter_dtype if hidden in FLOATS else stack.adapter_dtype_quantised
    if hidden not in FLOATS and config.method.stage in (*REFERRED, "reward") and not stack.loop.own_comparison:
        rule = "bf16"  # TRL's trainers make, or cast, them (trl/trainer/dpo_trainer.py and reward_trainer.py, 1.14.1 and 1.16.0)
    elif hidden not in FLOATS and config.method.stage in UNREFERRED and stack.pair_kbit_floats is not None:
        rule = "fp32"  # as PEFT makes them (trl/experimental/orpo/orpo_trainer.py, 1.16.0)
    elif hidden not in FLOATS and config.method.stage in BESIDE_VALUES:
        rule = "fp32"  # likewise
    if rule == "weights":
        rule = cast("Floats", hidden if hidden in FLOATS else config.compute_dtype)  # type: ignore[assignment]
    return cast("Floats", rule)


MATRIX_ROLES: frozenset[Role] = frozenset(("hidden_matrix", "expert_matrix"))

WEIGHT_FALLBACKS: dict[Role, tuple[str, ...]] = {
    "hidden_matrix": ("hidden_matrix", "default"),
    "expert_matrix": ("expert_matrix", "hidden_matrix", "default"),
    "embedding": ("embedding", "default"),
    "head": ("head", "embedding", "default"),
    "router": ("router", "default"),
    "norm": ("norm", "default"),
    "bias": ("bias", "norm", "default"),
}
"""Role -> keys that may say its weight format, the most particular first."""


def format_name(config: TrainingConfig, role: Role) -> str:
    """Return the weight format that a config gives a role, in its own spelling."""
    for key in WEIGHT_FALLBACKS[role]:
        if key in config.weights:
            return config.weights[key]
    return config.compute_dtype


def filled(config: TrainingConfig, stack: Stack) -> TrainingConfig:
    """Return a config in which what it leaves to its stack is filled in; its formats need not be known."""
    return with_stack_defaults(config, stack, format_name(config, "hidden_matrix"))


def _is_whole(config: TrainingConfig, role: Role) -> bool:
    """Tell whether tensors of a role are trained whole beside adapters: modules to save, and a head that scores."""
    if config.adapter is None or role in (*MATRIX_ROLES, "router"):
        return False
    if role in ("norm", "bias") and config.adapter.kind == "dora":  # whose magnitudes go with the norms
        return False
    return bool(config.adapter.modules_to_save) or (config.method.stage in SCORED and role == "head")


def optimizer_name(config: TrainingConfig, catalog: Catalog, role: Role) -> str:
    """Return the optimizer that a role's tensors go to, following ``rest`` where one takes only matrices."""
    trained = config.adapter.dtype if config.adapter is not None else format_name(config, "hidden_matrix")
    whole, stack = _is_whole(config, role), catalog.stack(config.stack)
    if whole and stack.saved_modules == "weights":
        names = {each: format_name(config, each) for each in ROLES}
        trained = kbit_formats(config, stack, names)[role]
    if config.parallel.engine == "deepspeed" and config.parallel.zero_stage:
        trained = "fp32"  # what it steps is a flat copy
    default = "adamw-fp32" if trained == "fp32" else "adamw-bf16"
    if stack.quantised_optimizer and beside_codes(config, format_name(config, "hidden_matrix")):
        default = stack.quantised_optimizer
    keys = (role, "hidden_matrix", "default") if role == "expert_matrix" else (role, "default")
    given = next((config.optimizer[key] for key in keys if key in config.optimizer), default)
    name = catalog.optimizers.name_of(given)
    name = stack.own_formats.get(name, name)
    entry = catalog.optimizers[name]
    if entry.takes == "matrices" and role not in MATRIX_ROLES and entry.rest is not None:
        return entry.rest
    alike = entry.implementation == catalog.optimizers[default].implementation
    if whole and alike and role not in config.optimizer:
        return default  # its states are as wide as the module that is trained, not as adapters are
    if config.adapter is None and alike and casts_floats(config, stack):
        names = {each: format_name(config, each) for each in ROLES}
        wide = kbit_formats(config, stack, names)[role] == "fp32"
        return "adamw-fp32" if wide else name  # states are as wide as what the stack has cast
    own = entry.implementation
    if alike and not whole and stack.model_code == "transformers" and set(implementations(config, catalog)) == {own}:
        return default  # torch's class keeps states as wide as what it steps, whatever a config calls it
    return name


def implementations(config: TrainingConfig, catalog: Catalog) -> list[str]:
    """Return the classes of the optimizers that a config names."""
    return [catalog.optimizers[catalog.optimizers.name_of(name)].implementation for name in config.optimizer.values()]


def wide_optimizer(config: TrainingConfig, catalog: Catalog, role: Role) -> str:
    """Return the optimizer of a role that stays in fp32 beside weights in 16 bits: its states are as wide as it is."""
    name, wide = optimizer_name(config, catalog, role), "adamw-fp32"
    alike = catalog.optimizers[name].implementation == catalog.optimizers[wide].implementation
    return wide if alike else name
