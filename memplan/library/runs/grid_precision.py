"""Bytes of an element that Megatron-LM keeps: from a training config to what it stands for there."""

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import CannotAnswerError
from memplan.model.inventory import ROLES
from memplan.step.grids.megatron_states import MegatronPrecision
from memplan.training.resolved import FLOAT_BYTES

ADAM, SGD = "torch.optim.AdamW", "torch.optim.SGD"
"""Implementations of those of memplan's optimizers that Megatron-LM has."""
ADAM_BYTES, MOMENTUM_BYTES = 8, 4
"""Both moments of its Adam in fp32, and the momentum of Transformer Engine's ``FusedSGD``, which is there without momentum too
(``get_momentums`` in transformer_engine/pytorch/optimizers/fused_sgd.py, 2.20.2), unlike that of torch's SGD, which steps in host
memory (``CPUSGD`` in core/optimizer/__init__.py, 0.16.1)."""


def precision_of(config: TrainingConfig, catalog: Catalog) -> MegatronPrecision:
    """Return the bytes of what Megatron-LM keeps of an element.

    Raises:
        CannotAnswerError: Formats, or an optimizer, that it does not have or that are not modelled.
    """
    names = set(config.weights.values()) or {"bf16"}
    if len(names) > 1 or not names <= {"bf16", "fp16", "fp32"}:
        raise CannotAnswerError(
            f"weights: Megatron-LM keeps all of them in one of bf16, fp16 and fp32, not in {', '.join(sorted(names))}"
        )
    weights = names.pop()
    gradients = config.gradients.dtype or ("fp32" if weights == "bf16" else weights)
    if gradients not in ("fp32", weights):
        raise CannotAnswerError(f"gradients.dtype: Megatron-LM sums gradients in {weights} or fp32, not in {gradients}")
    narrow = weights != "fp32"
    if config.master_weights != ("fp32" if narrow else "none"):
        retained = (
            "fp32 copies of them: set master_weights: fp32" if narrow else "no copies of them: set master_weights: none"
        )
        raise CannotAnswerError(f"master_weights: beside {weights} weights Megatron-LM's optimizer keeps {retained}")
    states, aware = _state_bytes(config, catalog), config.parallel.precision_aware
    halves = aware and weights == "bf16" and not config.parallel.megatron.whole_copies
    master = 0 if not narrow else 2 if halves else 4
    sizes = FLOAT_BYTES[weights], FLOAT_BYTES[gradients]
    if config.offload.optimizer_states != "cpu":
        return MegatronPrecision(*sizes, master, states)
    if config.parallel.zero_stage != 1:
        raise CannotAnswerError(
            "offload.optimizer_states: Megatron-LM's states in host memory are modelled under its distributed optimizer; set parallel.zero_stage: 1"
        )
    # ``HybridDeviceOptimizer`` in core/optimizer/cpu_offloading/hybrid_optimizer.py (0.16.1): of all it updates a copy in fp32, a gradient
    # and states, in fp32 whatever dtypes are told; ``_build_model_and_main_param_groups`` makes no copies of its own if precision-aware
    return MegatronPrecision(*sizes, 0 if aware else master, 0, 4 + 4 + (ADAM_BYTES if aware else states))


def _state_bytes(config: TrainingConfig, catalog: Catalog) -> int:
    """Return the bytes of the states of an element: both moments, of which one may be wide, or a momentum."""
    roles, aware, on_gpu = config.optimizer, config.parallel.precision_aware, config.offload.optimizer_states != "cpu"
    names = {catalog.optimizers.name_of(roles.get(role, roles.get("default", "adamw-fp32"))) for role in ROLES}
    kinds: set[tuple[str, int]] = set()
    for name in sorted(names):
        entry = catalog.optimizers[name]
        moments = [slot for slot in entry.slots if slot.layout == "elementwise"]
        if entry.implementation not in (ADAM, SGD) or any(slot.block_elements != 1 for slot in moments):
            raise CannotAnswerError(
                f"optimizer: {name} under Megatron-LM is not modelled; adamw-fp32, adamw-bf16 and sgd-momentum are"
            )
        momentum = MOMENTUM_BYTES if moments or on_gpu else 0
        size = momentum if entry.implementation == SGD else sum(slot.block_bytes for slot in moments)
        kinds.add((entry.implementation, size))
    if len(kinds) > 1:
        raise CannotAnswerError("optimizer: several optimizers are not modelled under Megatron-LM")
    implementation, size = kinds.pop()
    if config.parallel.megatron.muon != "none":
        _check_muon(config, implementation)
    sharded, plain = config.parallel.zero_stage == 1, implementation == SGD or size == ADAM_BYTES
    # ``OptimizerConfig.__post_init__`` and ``DistributedOptimizer.__init__`` (core/optimizer, 0.16.1)
    if implementation == SGD and aware:
        raise CannotAnswerError("parallel.precision_aware: it takes Adam alone; leave it out")
    if implementation == SGD and sharded and on_gpu:
        raise CannotAnswerError(
            "optimizer: Megatron-LM's distributed optimizer takes SGD in host memory alone; set parallel.zero_stage: 0, or offload.optimizer_states: cpu"
        )
    if (aware or not plain) and not sharded:
        raise CannotAnswerError(
            "parallel.precision_aware: it takes Megatron-LM's distributed optimizer; set parallel.zero_stage: 1"
        )
    if not plain and not aware:
        raise CannotAnswerError(
            "optimizer: states in other dtypes than fp32 take Megatron-LM's precision-aware optimizer; set parallel.precision_aware: true"
        )
    return size if implementation == SGD else min(size + 2 * config.parallel.megatron.wide_moment, ADAM_BYTES)


def _check_muon(config: TrainingConfig, beside: str) -> None:
    """Refuse what Megatron-LM's Muon does not go with.

    Args:
        beside: Implementation of the optimizer that the rest of the parameters has.

    Source:
        ``get_megatron_muon_optimizer`` in core/optimizer/muon.py (0.16.1); ``validate_args`` in megatron/training/arguments.py;
        ``setup_embeddings_and_output_layer`` in core/models/common/language_module/language_module.py marks the first stage's embedding alone.
    """
    if config.parallel.megatron.predicted_tokens and config.parallel.pipeline > 1:
        raise CannotAnswerError(
            "parallel.megatron.muon: a later stage that predicts more tokens has a copy of the embedding, which Megatron-LM gives to Muon: "
            "not modelled; use parallel.pipeline: 1, or leave predicted_tokens out"
        )
    instead = (
        ("parallel.zero_stage: 0", config.parallel.zero_stage),
        ("weights: {default: bf16}", "fp16" in config.weights.values()),
        ("offload.optimizer_states: none", config.offload.optimizer_states != "none"),
        ("parallel.overlap_gradients: false", config.parallel.overlap_gradients),
        ("optimizer.default: adamw-fp32", beside != ADAM),
    )
    for setting, given in instead:
        if given:
            raise CannotAnswerError(f"parallel.megatron.muon: Megatron-LM's Muon takes {setting}")
