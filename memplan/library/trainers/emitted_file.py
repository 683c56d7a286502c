"""A training config as a starting file for a trainer, which reads back to the same bytes: ``memplan.emit``."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import reduce
from typing import Any, Unpack

from memplan.catalog.config_keys.parallel_keys import DeepSpeed
from memplan.catalog.training_config import TrainingConfig
from memplan.errors import CannotAnswerError, MemplanError, normalised_name, unknown_name
from memplan.library.answers.planned_job import Plan
from memplan.library.answers.planned_job import plan as planned
from memplan.library.argument_kinds import checked
from memplan.library.job_options import DEFAULT_CONFIG, JobOptions, ModelGiven, catalog_of, job_inputs, settings_of
from memplan.library.lookup.config_lookup import read_config
from memplan.library.lookup.trainer_files import GivenFiles, trainer_job, trainer_mappings, training_document
from memplan.library.trainers.spliced_text import toml_value
from memplan.step.kernels.refused_row_masks import unpadded
from memplan.training.adapters import projections
from memplan.training.own_settings import own_settings, with_words

ALL_LINEAR = "all-linear"


@checked
def emit(model: ModelGiven = None, trainer: str = "", **options: Unpack[JobOptions]) -> str:
    """Return a starting file for a trainer, as YAML or TOML text; its data set is a placeholder.

    The text is read back as :func:`memplan.import_file` reads it, and refused where its plan would need other bytes, but for padding: a
    trainer that does not pack rows pads them.

    Args:
        model: As :func:`memplan.plan` takes it.
        trainer: ``axolotl``, ``trl``, ``llama-factory`` or ``torchtitan``; or ``deepspeed``, whose JSON goes beside a trainer's file.
        options: Keywords of :class:`memplan.JobOptions`; the config is run by that trainer's stack, whatever it names.

    Raises:
        UnknownNameError: No starting file is written for that trainer.
        CannotAnswerError: The config cannot be said in that trainer's keys.

    Example:
        >>> import memplan
        >>> print(memplan.emit("llama-3.2-1b", "trl", config="lora", gpu="rtx4090").splitlines()[0])
        model_name_or_path: meta-llama/Llama-3.2-1B
    """
    mappings = trainer_mappings()
    writable = {mappings.body(name).stack: name for name in mappings.names() if mappings.body(name).writes}
    spellings = {normalised_name(name): name for name in (*writable, DEEPSPEED)}
    trainer = spellings.get(normalised_name(trainer), trainer)
    if trainer == DEEPSPEED:
        return emit_deepspeed(options)
    if trainer not in writable:
        raise unknown_name("trainer to write for", trainer, [*writable, DEEPSPEED])
    writes = mappings.body(writable[trainer]).writes
    catalog = catalog_of(options.get("catalog"))
    wanted: dict[str, Any] = {**options, "catalog": catalog, "stack": trainer}
    plan = planned(model, **wanted)
    if beside := plan.memory.setup.beside:
        stage, named = plan.memory.setup.config.method.stage, " and ".join(f"method.{role}" for role in beside)
        raise CannotAnswerError(
            f"method.stage: {stage} is not written to starting files yet, with {named}; plan it with fit"
        )
    toml = writes.get("form") == "toml"
    name = f"emitted.{'toml' if toml else 'yaml'}"
    text = _text(_keys(plan, str(model), writes), toml=toml)
    data = _read(text, name, plan, wanted)
    told = list(_read_besides(data, plan))
    if data["stack"] != plan.training["stack"] or told:  # an older version is what reads such a file
        wanted["stack"] = data["stack"]
        wanted["set"] = [*settings_of(options.get("set")), *told]
        plan = planned(model, **wanted)
        text = _text(_keys(plan, str(model), writes), toml=toml)
        data = _read(text, name, plan, wanted)
    _compare(data, plan, wanted)
    return text


def _toml(keys: Mapping[str, str]) -> str:
    """Return keys with dots as tables."""
    tables: dict[str, list[str]] = {}
    for path, value in keys.items():
        table, _, key = path.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {toml_value(str(value))}\n")
    return "\n".join(f"[{table}]\n{''.join(lines)}" for table, lines in tables.items())


def _model_keys(plan: Plan, given: str, writes: Mapping[str, Any]) -> Mapping[str, str]:
    """Return what names a model: its id, or what a trainer that has models of its own calls it."""
    source = plan.memory.model.source
    known = source.removeprefix("catalog:")
    if "models" in writes:
        if known not in writes["models"]:
            raise CannotAnswerError(f"{known}: {plan.memory.setup.stack.name} has {', '.join(writes['models'])}")
        own: Mapping[str, str] = writes["models"][known]
        return own
    return {writes["model"]: plan.catalog.models.entries[known].hf_id if source != known else given}


def _keys(plan: Plan, given: str, writes: Mapping[str, Any]) -> dict[str, str]:
    """Return a plan's config in a trainer's keys, each with its value as YAML writes it."""
    setup = plan.memory.setup
    keys = {**_model_keys(plan, given, writes), **writes["fixed"]}
    for own in own_settings(with_words(setup.stack, writes), _settings(setup.config, writes)):
        if own.own_key is not None and own.own_value is not None:
            keys[own.own_key] = own.own_value
    adapter = setup.config.adapter
    if adapter is not None:
        named = [target for target in adapter.targets if target != ALL_LINEAR]
        if ALL_LINEAR in adapter.targets and named:  # the linear layers of an embedding or head besides, by their names
            named = [*projections(plan.memory.model), *named]
        keys |= {writes["targets"]: f"[{', '.join(named)}]"} if named else writes["all_linear"]
        if adapter.modules_to_save:
            keys[writes["saved"]] = f"[{', '.join(adapter.modules_to_save)}]"
        keys[writes["dropout"]] = str(adapter.dropout or 0.0)
    if setup.config.evaluation and "evaluation" in writes:
        rows = setup.config.evaluation_batch_size or setup.config.micro_batch_size
        keys |= {**writes["evaluation"], writes["evaluation_rows"]: str(rows)}
    return keys


def _read_besides(data: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Yield the settings of a text as it is read that its plan leaves to the stack: a loss, what becomes of gradients, padding."""
    setup = plan.memory.setup
    loss = data.get("kernels", {}).get("loss", setup.profile.loss)
    if loss != setup.profile.loss and setup.config.kernels.loss is None:
        yield f"kernels.loss={loss}"
    gradients = data.get("zero_gradients", plan.training["zero_gradients"])
    if gradients != plan.training["zero_gradients"]:
        yield f"zero_gradients={gradients}"
    padded = data.get("padded_rows")
    rows = setup.config.micro_batch_size * setup.rows_per_sample
    if setup.config.padded_rows is False and (padded == "multiple" or (padded and rows > 1)) and not unpadded(setup):
        raise CannotAnswerError(
            f"padded_rows: false: {setup.stack.name} pads rows that its file does not pack; leave it out"
        )
    if padded and not (setup.config.padded_rows or unpadded(setup)):
        yield f"padded_rows={padded}".lower()


def _settings(config: TrainingConfig, writes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config that starting files say, later ones over those before."""
    unmixed = config.autocast is False and config.compute_dtype != "fp32"
    if not unmixed or config.compute_dtype == "bf16":  # the key of fp16 turns mixed precision on
        yield "compute_dtype", config.compute_dtype
    if unmixed:
        yield "autocast", False
    yield "micro_batch_size", config.micro_batch_size
    yield "gradient_accumulation_steps", config.gradient_accumulation_steps
    yield "sequence_length", config.sequence_length
    yield "activation_checkpointing", config.activation_checkpointing
    if config.offload.activations != "none":
        yield "offload.activations", config.offload.activations
    if config.joined_rows:
        yield "joined_rows", True
    if config.padded_rows:
        yield "padded_rows", config.padded_rows
    if config.reentrant_checkpointing is not None:
        yield "reentrant_checkpointing", config.reentrant_checkpointing
    if config.kernels.attention is not None:
        yield "kernels.attention", config.kernels.attention
    weights = _of_all(config.weights) or config.compute_dtype
    said = writes.get("plain_weights")
    if (said == "always" or (said and config.adapter is None)) and weights in ("bf16", "fp16", "fp32"):
        yield "weights.default", weights
    if config.adapter is not None:
        yield "adapter.kind", config.adapter.kind
        yield "adapter.rank", config.adapter.rank
    coded = config.weights.get("hidden_matrix", weights)
    if coded not in ("bf16", "fp16", "fp32"):
        yield "weights.hidden_matrix", coded
    optimizer = _of_all(config.optimizer)
    if optimizer is not None:
        yield "optimizer", optimizer
    elif config.kernels.optimizer is not None:
        yield "kernels.optimizer", config.kernels.optimizer
    if "models" in writes:
        yield "parallel.zero_stage", config.parallel.zero_stage
        if not config.parallel.reshard_after_forward:
            yield "parallel.reshard_after_forward", False
        if config.parallel.tensor > 1:
            yield "parallel.tensor", config.parallel.tensor
        if config.parallel.context > 1:
            yield "parallel.context", config.parallel.context
        if config.parallel.expert > 1:
            yield "parallel.expert", config.parallel.expert
    if config.clip_gradients is not None:
        yield "clip_gradients", config.clip_gradients


def _of_all(by_role: Mapping[str, str]) -> str | None:
    """Return what is the default of all roles, or of each of them, as a config that was saved says it."""
    named = set(by_role.values())
    return by_role.get("default", named.pop() if len(named) == 1 else None)


def _text(keys: Mapping[str, str], *, toml: bool) -> str:
    """Return keys and values as the text of a file."""
    return _toml(keys) if toml else "".join(f"{key}: {value}\n" for key, value in keys.items())


def _read(text: str, name: str, plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training config that a text is read as."""
    try:
        data: dict[str, Any] = training_document(
            GivenFiles(name, content=text), options.get("gpus"), options["catalog"]
        ).data
        return data
    except MemplanError as error:
        raise _inexpressible(plan, str(error)) from None


def _compare(data: Mapping[str, Any], plan: Plan, options: Mapping[str, Any]) -> None:
    """Refuse a text whose job, as it is read, would need other bytes, compute in another precision, or not evaluate."""
    retained = {key: options.get(key) for key in ("gpu", "gpu_memory", "catalog")}
    given: dict[str, Any] = {**dict.fromkeys(options), **retained, "config": data}
    try:
        again = planned(plan.memory.model, **given)
    except MemplanError as error:
        raise _inexpressible(plan, str(error)) from None
    setups = [one.memory.setup for one in (plan, again)]
    said = [(one.config.compute_dtype, one.autocast, one.config.evaluation) for one in setups]
    if again.memory.device_bytes != plan.memory.device_bytes or said[0] != said[1]:
        before, after = plan.training, again.training
        other = sorted(
            key for key in before if before[key] != after.get(key) and key not in ("description", "evidence", "status")
        )
        raise _inexpressible(plan, f"read back, it differs in {', '.join(other)}")


def _inexpressible(plan: Plan, why: str) -> CannotAnswerError:
    return CannotAnswerError(f"this config cannot be said in {plan.memory.setup.stack.name}'s keys: {why}")


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
    text = json.dumps(_deepspeed_keys(config), indent=2) + "\n"
    job = trainer_job(GivenFiles("ds_config.json", content=text))
    for key in SAID:
        wanted: Any = reduce(getattr, key.split("."), config)
        said = job.value(f"training.{key}")
        said = ABSENT.get(key) if said is None else said
        if said != wanted and wanted is not None:
            raise CannotAnswerError(
                f"this config cannot be said in DeepSpeed's keys: {key} {wanted} reads back as {said}"
            )
    return text


def _deepspeed_keys(config: TrainingConfig) -> dict[str, Any]:
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
