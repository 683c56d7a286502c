"""A training config's shards as DeepSpeed's JSON, which goes beside a trainer's file."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import reduce
from typing import Any

from memplan.catalog.config_keys.parallel_keys import DeepSpeed
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import CannotAnswerError
from memplan.library.job_options import DEFAULT_CONFIG, JobOptions, job_inputs
from memplan.library.lookup.config_lookup import read_config
from memplan.library.lookup.trainer_files import trainer_job

DEEPSPEED = "deepspeed"
PINNED = {"pinned_optimizer": "offload_optimizer", "pinned_weights": "offload_param"}
"""Keys of ``parallel.deepspeed`` that say whether what is kept in host memory is pinned -> where DeepSpeed's file says it."""
OWN = {name: name for name in DeepSpeed.__dataclass_fields__ if name not in PINNED} | {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
    "persistence_threshold": "stage3_param_persistence_threshold",
}
"""Keys of ``parallel.deepspeed`` -> those of ``zero_optimization``."""
ABSENT = {f"parallel.deepspeed.{name}": getattr(DeepSpeed(), name) for name in DeepSpeed.__dataclass_fields__} | {
    "offload.optimizer_states": "none",
    "offload.weights": "none",
    "compute_dtype": "fp32",
}
"""Keys of a training config -> what they are where the file does not say."""
SAID = ("parallel.zero_stage", "micro_batch_size", "gradient_accumulation_steps", "clip_gradients", *ABSENT)
"""Keys of a training config that the file says."""


def emit_deepspeed(options: JobOptions) -> str:
    """Return DeepSpeed's JSON for a training config, read back as ``memplan import`` reads it.

    What it does not say, the trainer does: the model, its length and its optimizer.

    Raises:
        CannotAnswerError: The config shards in no way that DeepSpeed has.
    """
    inputs = job_inputs("emit", None, options)
    config = read_config(inputs.config or DEFAULT_CONFIG, inputs.overrides(inputs.gpus), inputs.catalog)
    if config.parallel.engine != DEEPSPEED:
        raise CannotAnswerError(
            f"parallel.engine: {config.parallel.engine} is not what DeepSpeed's file starts; set parallel.engine: deepspeed"
        )
    text = json.dumps(_keys(config), indent=2) + "\n"
    job = trainer_job("ds_config.json", content=text)
    for key in SAID:
        wanted: Any = reduce(getattr, key.split("."), config)
        said = job.value(f"training.{key}")
        said = ABSENT.get(key) if said is None else said
        if said != wanted and wanted is not None:
            raise CannotAnswerError(
                f"this config cannot be said in DeepSpeed's keys: {key} {wanted} reads back as {said}"
            )
    return text


def _keys(config: TrainingConfig) -> dict[str, Any]:
    """Return a config in DeepSpeed's keys (runtime/config.py and runtime/zero/config.py, 0.19.8)."""
    zero: dict[str, Any] = {"stage": config.parallel.zero_stage}
    given = asdict(config.parallel.deepspeed)
    for name, place in (
        ("pinned_optimizer", config.offload.optimizer_states),
        ("pinned_weights", config.offload.weights),
    ):
        if place != "none":
            zero[PINNED[name]] = {"device": place, "pin_memory": given[name]}
    zero |= {key: given[name] for name, key in OWN.items() if given[name] != ABSENT[f"parallel.deepspeed.{name}"]}
    clips = "auto" if config.clip_gradients is None else 1.0 if config.clip_gradients else 0.0
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": clips,
        "bf16": {"enabled": config.compute_dtype == "bf16"},
        "fp16": {"enabled": config.compute_dtype == "fp16"},
        "zero_optimization": zero,
    }
