"""PPO: what TRL's trainer of it fills into a config, and what of one it never does."""

from collections.abc import Iterator
from dataclasses import replace

from memplan.catalog.config_keys.method_keys import Method, Ppo, Rollout, SecondModel
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.kernel_profiles import LossKernel
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import ALL_TRAIN, Offload, TrainingConfig
from memplan.training.rules.distillation_rules import outside_autocast
from memplan.training.rules.image_rules import out_of_range

Path = tuple[str, ...]
BESIDE_VALUES = frozenset(("ppo",))
"""Stages that train a model of values beside their policy, with one optimizer."""
HAS_TRAINER = "trl@1.12"
"""The newest stack with a trainer for it, which 1.13 no longer has in ``trl.experimental``."""
POLICY_LOSS: LossKernel = "policy"
"""How such a stage compares log-probabilities that a policy has now with those that it had."""
RESPONSE_LENGTH = 53
"""Tokens that are generated where nothing is said (``response_length`` in trl/experimental/ppo/ppo_config.py, 1.12.0)."""
FLOATS = ("fp32", "bf16", "fp16")


def with_phase(method: Method) -> Method:
    """Return the method of a PPO with what its trainer does by default filled in: values begin as the reward model is.

    Source:
        trl/experimental/ppo/ppo_config.py and examples/scripts/ppo/ppo.py (1.12.0), which loads both from ``reward_model_path``.
    """
    rewards = method.reward_model
    return replace(
        method,
        ppo=method.ppo or Ppo(),
        rollout=method.rollout or Rollout(completion_length=RESPONSE_LENGTH),
        value_model=method.value_model or (rewards and SecondModel(rewards.model, None, rewards.dtype)),
    )


def as_policy_runs(stack: Stack) -> Stack:
    """Return a stack as PPO's loop calls its models: out of autocast, with positions of every row, and asked for no less than a cache.

    What lies beside quantised matrices stays as it was loaded. TRL casts norms to fp32 where ``bf16`` is said, which a head in bf16 then
    does not take out of autocast: such a run ends at its first forward.

    Source:
        ``forward`` and ``PPOTrainer.__init__`` in trl/experimental/ppo/ppo_trainer.py (1.12.0), where ``Accelerator`` is made without the
        precision that TrainingArguments no longer leave in the environment (transformers 5.24.0).
    """
    loop = replace(stack.loop, cache="copies", balances=False)
    tables = replace(stack.rotary_tables, rows="batch")
    return replace(outside_autocast(stack), loop=loop, rotary_tables=tables, kbit_floats="as-is", magnitudes="apart")


def ppo_problems(config: TrainingConfig, hidden: str) -> Iterator[tuple[Path, str]]:
    """Yield what a config, filled in, says of PPO that cannot be."""
    method, learns = config.method, config.method.stage in BESIDE_VALUES
    for key in () if learns else ("value_model", "reward_model", "ppo"):
        if getattr(method, key) is not None:
            yield ("method", key), f"{method.stage} has none; leave it out"
    if not learns:
        if config.kernels.loss == POLICY_LOSS:
            yield ("kernels", "loss"), f"{POLICY_LOSS} is the loss of ppo; leave it out"
        return
    if method.reward_model is None or not method.reward_model.model:
        yield ("method", "reward_model"), "ppo scores what it generates by a model; name one: method.reward_model.model"
    elif method.value_model is None or not method.value_model.model:
        yield ("method", "value_model"), "name it: method.value_model.model, or leave it out for the reward model's"
    if method.value_model is not None and method.value_model.weights not in (None, method.value_model.dtype):
        yield (
            ("method", "value_model", "weights"),
            "all of a model of values trains, which codes do not; use dtype alone",
        )
    if config.autocast or (hidden in FLOATS and hidden != config.compute_dtype):
        key, way = (
            ("autocast", "leave it out")
            if config.autocast
            else ("compute_dtype", f"use weights: {config.compute_dtype}")
        )
        yield (key,), f"TRL's PPOTrainer runs models out of autocast, whatever bf16 says; {way}"
    yield from _phase_problems(config, method.ppo or Ppo())


def _phase_problems(config: TrainingConfig, phase: Ppo) -> Iterator[tuple[Path, str]]:
    """Yield numbers of a phase that do not divide its rows."""
    yield from out_of_range(phase, ("method", "ppo"), ("epochs", "mini_batches", "forward_batch"), 2**20)
    rows = config.micro_batch_size * config.gradient_accumulation_steps
    if phase.mini_batches > 0 and rows % phase.mini_batches:
        yield ("method", "ppo", "mini_batches"), f"{rows} rows of a phase are not divided by {phase.mini_batches}"
    elif phase.mini_batches > 0 and rows // phase.mini_batches % config.micro_batch_size:
        text = f"mini-batches of {rows // phase.mini_batches} rows are not divided into micro-batches of {config.micro_batch_size}"
        yield ("method", "ppo", "mini_batches"), text


def ppo_refusals(config: TrainingConfig) -> Iterator[tuple[Path, str]]:
    """Yield what of a PPO the formula does not follow."""
    method, who = config.method, "TRL's PPOTrainer"
    if config.parallel != Parallel():
        yield ("method", "stage"), "ppo on several GPUs is not modelled; plan one GPU: parallel.data: 1"
    if config.activation_checkpointing != "none":
        # only ``Trainer._inner_training_loop`` switches it on, which PPOTrainer's own ``train`` never calls
        text = f"{who} has a loop of its own, which never switches checkpointing on, whatever gradient_checkpointing says; use none"
        yield ("activation_checkpointing",), text
    if config.clip_gradients:
        yield ("clip_gradients",), f"{who} clips no gradients, whatever max_grad_norm says; use false"
    if method.rollout is not None and method.rollout.engine != "transformers":
        yield ("method", "rollout", "engine"), f"{who} generates by the policy itself; use transformers"
    if config.kernels.loss not in (None, POLICY_LOSS):
        yield ("kernels", "loss"), f"{config.kernels.loss} is not what {who} learns by; leave it out"
    if config.evaluation:
        yield ("evaluation",), f"{who} generates to show samples, and does not evaluate; use evaluation: false"
    if config.joined_rows:
        yield ("joined_rows",), f"{who} joins no rows: it pads prompts; leave it out"
    if config.compute_dtype == "fp16":
        yield ("compute_dtype",), f"fp16 is not modelled for {who}; use bf16"
    if config.freeze != ALL_TRAIN:
        yield ("freeze",), "a policy of which parts are frozen is not modelled for ppo; use full or LoRA"
    if config.offload != Offload():
        yield ("offload",), "offloading is not modelled for ppo; leave it out"
    if config.adapter is not None and config.adapter.modules_to_save:
        yield ("adapter", "modules_to_save"), "copies that train beside ppo's policy are not modelled; leave it out"
    if config.images.per_row:
        yield ("images",), "images are not modelled for ppo; leave them out"
