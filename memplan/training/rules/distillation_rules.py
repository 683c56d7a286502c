"""Distillation: what a library's trainers of it fill into a config, and what of one they never do."""

from collections.abc import Iterator
from dataclasses import replace

from memplan.catalog.config_keys.method_keys import DistillingTrainer, Method
from memplan.catalog.kernel_profiles import LossKernel
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import TrainingConfig

Path = tuple[str, ...]
DISTILLED = frozenset(("distillation",))
"""Stages that learn from a teacher: a frozen model of its own."""
LOSSES: dict[DistillingTrainer, LossKernel] = {"gkd": "divergence", "distillation": "fused-divergence"}
"""Trainer -> how it compares a student with its teacher."""
RETURNED: dict[DistillingTrainer, LossKernel] = {"gkd": "logits", "distillation": "hidden-states"}
"""Trainer -> what it is given of a teacher."""


def on_policy(method: Method) -> bool:
    """Tell whether all that a student learns from is what it has generated, as ``DistillationTrainer`` has it."""
    return method.stage in DISTILLED and method.trainer == "distillation"


def with_teacher(method: Method) -> Method:
    """Return the method of a distillation with its trainer, and what that does by default, filled in.

    Source:
        ``beta`` in trl/experimental/gkd/gkd_config.py and trl/trainer/distillation_config.py; ``training_step`` in gkd_trainer.py and
        ``_prepare_inputs`` in trl/trainer/distillation_trainer.py, which generates the rows of all micro-steps together (1.16.0).
    """
    method = replace(method, trainer=method.trainer or "gkd")
    if method.divergence is None:
        method = replace(method, divergence="reverse-kl" if on_policy(method) else "jsd")
    if (rollout := method.rollout) is None:
        return method
    together = rollout.micro_batches if on_policy(method) else rollout.micro_batches or 1
    return replace(method, rollout=replace(rollout, micro_batches=together))


def outside_autocast(stack: Stack) -> Stack:
    """Return a stack as it runs a model whose forward is replaced by what calls its parts: nothing is cast for products.

    Source:
        ``_ForwardRedirection`` in trl/models/utils.py (1.16.0), which puts another in the place of the forward that ``prepare_model``
        in accelerate/accelerator.py (1.15.0) has wrapped.
    """
    return replace(stack, autocast="never")


def teacher_problems(config: TrainingConfig, hidden: str) -> Iterator[tuple[Path, str]]:
    """Yield what a config says of a teacher, or of what its trainer compares, that cannot be."""
    method, distils = config.method, config.method.stage in DISTILLED
    if config.kernels.loss in LOSSES.values() and not distils:
        yield ("kernels", "loss"), f"{config.kernels.loss} from a teacher is the loss of distillation; leave it out"
    if distils and (method.teacher is None or not method.teacher.model):
        yield ("method", "teacher"), f"{method.stage} learns from a teacher; name one: --set method.teacher.model=MODEL"
    for key in () if distils else ("teacher", "divergence", "trainer"):
        if getattr(method, key) is not None:
            yield ("method", key), f"{method.stage} has no teacher; leave it out"
    if not on_policy(method):
        return
    trainer, narrow = "TRL's DistillationTrainer", config.compute_dtype
    if method.rollout is None:
        yield (
            ("method", "rollout"),
            f"{trainer} learns from what the model generates; say method.rollout.completion_length",
        )
    if config.autocast or (hidden == "fp32" and narrow != "fp32"):
        text = f"{trainer} runs models out of autocast, whatever bf16 says; "
        key = "autocast" if config.autocast else "compute_dtype"
        yield (key,), text + ("leave it out" if config.autocast else f"use weights: {narrow}, or compute_dtype: fp32")


def distillation_refusals(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield what of a distillation the formula does not follow."""
    method, loss = config.method, config.kernels.loss
    assert method.trainer is not None, "a setup's config is filled in"
    if loss not in (None, LOSSES[method.trainer]):
        yield (
            ("kernels", "loss"),
            f"{loss} is not what {stack.label} compares a student with its teacher by; leave it out",
        )
    engine = None if method.rollout is None else method.rollout.engine
    if not on_policy(method):
        if engine not in (None, "transformers"):
            text = f"distillation by {stack.label}'s GKDTrainer generates by the model itself; use transformers"
            yield ("method", "rollout", "engine"), text
        return
    if config.compute_dtype == "fp16":
        text = "fp16, whose loss a scaler multiplies though nothing is cast, is not modelled for DistillationTrainer; use bf16"
        yield ("compute_dtype",), text
    if config.adapter is not None and config.adapter.modules_to_save:
        text = "copies that train beside DistillationTrainer's loss are not modelled; leave it out"
        yield ("adapter", "modules_to_save"), text
