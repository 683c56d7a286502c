"""Frozen models of their own beside the one that is trained: what a teacher is, and the config that its forward runs by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.method_keys import Images, Method, SecondModel
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import ALL_TRAIN, Adapter, CheckpointedLayers, Gradients, Offload, TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.model.model import Model
from memplan.training.resolved import TrainingSetup
from memplan.training.rules.distillation_rules import RETURNED, on_policy, outside_autocast
from memplan.training.rules.ppo_rules import BESIDE_VALUES, as_policy_runs

TEACHER = "teacher"
"""What a teacher is called among the models beside the one that is trained, and what names of its tensors begin with."""

VALUES, REWARD = "value_model", "reward_model"
"""The same of what trains beside a policy, and of what scores the answers of one."""

DEFAULT_DTYPE: Literal["bf16"] = "bf16"
"""Of weights as most checkpoints have them, which loading takes over where nothing is asked for: ``dtype`` is then ``auto``
(``from_pretrained`` in transformers/modeling_utils.py, 5.24.0)."""


@dataclass(frozen=True, slots=True)
class BesideModel:
    """A model of its own beside the one that a config is about: frozen, and then its forward runs alone; or trained with it."""

    given: Model  # As it was looked up
    model: Model  # As the stack builds it
    setup: TrainingSetup  # How it runs
    # What its forward returns beside logits: quantities, by number, and the bytes for each unit of them.
    cached: tuple[tuple[int, int], ...] = ()


def trained_config(config: TrainingConfig, given: SecondModel, catalog: Catalog) -> TrainingConfig:
    """Return the config by which a model of values trains beside the policy of ``config``: whole, by the same optimizer.

    The states of torch's are as wide as the weights that it steps, which each model has its own of.

    Source:
        ``PolicyAndValueWrapper`` and ``PPOTrainer.__init__`` in trl/experimental/ppo/ppo_trainer.py (1.12.0), which puts adapters on
        the policy alone.
    """
    dtype = given.dtype or DEFAULT_DTYPE
    torch = catalog.optimizers["adamw-fp32"].implementation
    own = {role: name for role, name in config.optimizer.items() if catalog.optimizers[name].implementation != torch}
    frozen = second_config(config, given)
    return replace(
        frozen,
        weights={"default": dtype},
        optimizer=own,
        gradients=config.gradients,
        kernels=Kernels(optimizer=config.kernels.optimizer),
        adapter=None,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )


def second_config(config: TrainingConfig, given: SecondModel) -> TrainingConfig:
    """Return the config by which a second model is loaded, frozen, beside the one that ``config`` trains.

    Its kernels are the stack's own: what a config says of kernels, and Liger's, are of the model that is trained.
    """
    dtype = given.dtype or DEFAULT_DTYPE
    narrow = on_policy(config.method) or config.method.stage in BESIDE_VALUES  # out of autocast
    compute = (given.dtype or DEFAULT_DTYPE) if narrow else config.compute_dtype
    weights = {"default": dtype} | ({"hidden_matrix": given.weights} if given.weights is not None else {})
    return replace(
        config,
        weights=weights,
        compute_dtype=compute,
        master_weights="none",
        gradients=Gradients(),
        optimizer={},
        gradient_accumulation_steps=1,
        activation_checkpointing="none",
        checkpointed_layers=CheckpointedLayers(),
        reentrant_checkpointing=None,
        kernels=Kernels(),
        outputs_until=None,
        method=Method(),
        images=Images(),
        adapter=Adapter(dtype="fp32"),  # beside which weights are frozen
        freeze=ALL_TRAIN,
        parallel=Parallel(),
        offload=Offload(),
        dropout=None,
        weight_average="none",
        evaluation=False,
        evaluation_batch_size=None,
        save_checkpoint=False,
        compile="none",
    )


def as_it_runs(setup: TrainingSetup) -> TrainingSetup:
    """Return the setup of a second model as tapes have it: without the adapters that stand for its being frozen."""
    return replace(setup, config=replace(setup.config, adapter=None))


def with_seconds(setup: TrainingSetup, seconds: Mapping[str, BesideModel]) -> TrainingSetup:
    """Return a setup with models of their own beside the one that it trains, of which others stay as they are."""
    if not seconds:
        return setup
    known = {**setup.seconds, **seconds}
    teacher, values, rewards = (known.get(role) for role in (TEACHER, VALUES, REWARD))
    return replace(setup, teacher=teacher, value_model=values, reward_model=rewards)


def without_dropout(model: Model) -> Model:
    """Return a model as it is evaluated."""
    return replace(model, spec=replace(model.spec, dropout=0.0, attention_dropout=0.0))


def as_called(setup: TrainingSetup, method: Method) -> TrainingSetup:
    """Return the setup of a second model as the trainer of ``method`` calls it: as it was loaded, so that it returns logits, and keys and
    values as copies; or its layers alone, for hidden states, of which scores of each token may be formed.

    Source:
        ``get_reward`` in trl/experimental/utils.py (1.12.0);
        ``compute_loss`` in trl/experimental/gkd/gkd_trainer.py and ``_get_last_hidden_state`` in trl/trainer/distillation_trainer.py
        (1.16.0); ``DynamicLayer.update`` in transformers/cache_utils.py (5.24.0).
    """
    if method.stage in BESIDE_VALUES:
        config = replace(
            setup.config,
            method=Method(stage="classification", labels=1, reference_model="none", rollout=method.rollout),
        )
        setup = replace(setup, config=config, profile=replace(setup.profile, loss="values"))
        return replace(setup, stack=as_policy_runs(setup.stack))
    assert method.trainer is not None, "a setup's config is filled in"
    setup = replace(setup, profile=replace(setup.profile, loss=RETURNED[method.trainer]))
    if on_policy(method):
        return replace(setup, stack=outside_autocast(setup.stack))
    return replace(setup, stack=replace(setup.stack, loop=replace(setup.stack.loop, cache="copies", balances=False)))
