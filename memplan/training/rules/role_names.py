"""Weight format and optimizer of each role of a model's tensors, as a training config names them."""

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.method_keys import SCORED
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig
from memplan.model.inventory import ROLES, Role
from memplan.training.rules.stack_defaults import with_stack_defaults
from memplan.training.rules.stack_rules import casts_floats, kbit_formats

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
    keys = (role, "hidden_matrix", "default") if role == "expert_matrix" else (role, "default")
    given = next((config.optimizer[key] for key in keys if key in config.optimizer), default)
    name = catalog.optimizers.name_of(given)
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
    return name
