"""A setup's config as keys with every default filled in, which ``--config`` reads back."""

from dataclasses import asdict
from typing import Any

from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.training_config import ALL_TRAIN
from memplan.model.inventory import ROLES
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.rules.stack_defaults import format_name

ALWAYS = ("data", "zero_stage", "tensor", "sequence", "pipeline", "context", "expert")
"""Keys of ``parallel`` that stand in every answer; others where they are not their default."""
_ALONE = asdict(Parallel())


def resolved_keys(setup: TrainingSetup) -> dict[str, Any]:
    """Return the keys of a setup's config with every default filled in; ``--config`` reads them back."""
    data = asdict(setup.config)
    data["parallel"] = {key: value for key, value in data["parallel"].items() if key in ALWAYS or value != _ALONE[key]}
    if setup.config.freeze == ALL_TRAIN:
        del data["freeze"]
    if not setup.config.joined_rows:
        del data["joined_rows"]
    own = (
        "rollout",
        "chosen_nll",
        "labels",
        "balances",
        "embedding",
        "teacher",
        "value_model",
        "reward_model",
        "ppo",
        "divergence",
        "trainer",
    )  # what some methods alone have
    data["method"] = {key: value for key, value in data["method"].items() if key not in own or value is not None}
    adapted = setup.config.adapter is not None
    data["weights"] = {
        role: format_name(setup.config, role) if adapted else setup.format_names[role] for role in ROLES
    }  # not as the stack casts what is beside quantised matrices: it casts again where the keys are read back
    if setup.format_names["expert_matrix"] in FLOAT_BYTES and data["weights"]["expert_matrix"] not in FLOAT_BYTES:
        del data["weights"]["expert_matrix"]  # no library quantises stacked experts, which are read back as not said
    data["optimizer"] = {role: setup.optimizer_names[role] for role in ROLES}
    data["kernels"] = asdict(setup.profile)
    if setup.stack.model_code == "transformers" and not setup.runs_flash_attn:
        data["kernels"]["attention"] = setup.attention_choice  # read back, what torch chose would be asked for
    names = {setup.adapter_dtype} if setup.config.adapter is not None else set(data["weights"].values())
    if setup.gradient is None and len(names) == 1 and names <= FLOAT_BYTES.keys():
        data["gradients"]["dtype"] = names.pop()
    unsaid = ("adapter", "autocast", "evidence", "outputs_until", "padded_rows", "reentrant_checkpointing")
    return {key: value for key, value in data.items() if value is not None or key not in unsaid}
