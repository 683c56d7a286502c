"""The same job in fp16 in place of bf16, for cards that only emulate bf16."""

from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import TrainingConfig


def fp16_settings(config: TrainingConfig, catalog: Catalog) -> tuple[tuple[str, Any], ...]:
    """Return the settings that turn a job in bf16 into one in fp16; none where it is in no bf16.

    fp16 needs a loss scale, and adapters are then in fp32, since torch's GradScaler refuses fp16 gradients, which DeepSpeed scales itself; AdamW whose
    states are in 16 bits would lose them below 6e-8, and keeps fp32 ones instead.

    Source:
        torch/amp/grad_scaler.py (v2.13.0): "Attempting to unscale FP16 gradients."
    """
    if config.compute_dtype != "bf16":
        return ()
    settings: list[tuple[str, Any]] = [("compute_dtype", "fp16")]
    settings += [(f"weights.{role}", "fp16") for role, name in config.weights.items() if name == "bf16"]
    if not config.loss_scaling:
        settings.append(("loss_scaling", True))
    adapted = "fp16" if config.parallel.engine == "deepspeed" else "fp32"
    if config.adapter is not None and config.adapter.dtype != adapted:
        settings.append(("adapter.dtype", adapted))
    if _keeps_narrow_moments(config, catalog):
        settings.append(("optimizer", "adamw-fp32"))
    return tuple(settings)


def _keeps_narrow_moments(config: TrainingConfig, catalog: Catalog) -> bool:
    """Tell whether AdamW steps with moments in 16 bits, which it also does where a config names no optimizer."""
    if not config.optimizer:
        return config.adapter is None
    entries = [catalog.optimizers[name] for name in config.optimizer.values()]
    return any(
        not entry.orthogonalises and any((s.block_elements, s.block_bytes) == (1, 2) for s in entry.slots)
        for entry in entries
    )
