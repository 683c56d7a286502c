"""What a stack fills into a training config, and what of a stack the formula cannot follow yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal, cast

from memplan.catalog.catalog import Catalog
from memplan.catalog.entries import StorageFormat
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import Checkpointing, Method, Parallel, ReferenceModel, Rollout, TrainingConfig
from memplan.errors import CannotAnswerError, MemplanError
from memplan.model.inventory import Role

Path = tuple[str, ...]
Floats = Literal["fp32", "bf16", "fp16"]
FLOATS = ("fp32", "bf16", "fp16")
REFERRED = frozenset(("dpo", "kto"))
"""Stages whose loss compares log-probabilities with those of a reference model."""
GENERATING = frozenset(("grpo",))
"""Stages that learn from completions which the model generates, and may stay near a reference model."""


def stack_problems(config: TrainingConfig, catalog: Catalog) -> Iterator[tuple[Path, str]]:
    """Yield why there is no stack as a config names it; a version that was not read is refused elsewhere."""
    try:
        catalog.stack(config.stack)
    except CannotAnswerError:
        return
    except MemplanError as error:
        yield ("stack",), str(error).removeprefix("stack: ")


def with_stack_defaults(config: TrainingConfig, stack: Stack, hidden: str) -> TrainingConfig:
    """Return a config in which what it leaves to its stack is filled in.

    Args:
        config: The config.
        stack: Its stack.
        hidden: Weight format of the hidden matrices.
    """
    adapter = config.adapter
    if adapter is not None and adapter.dtype is None:
        adapter = replace(adapter, dtype=adapter_dtype(config, stack, hidden))
    if adapter is not None and hidden in FLOATS and casts_trained(config, stack):
        adapter = replace(adapter, dtype="fp32")
    if adapter is not None and adapter.vision is None:
        adapter = replace(adapter, vision=stack.vision == "as-language")
    # disable_dropout is true (trl/trainer/dpo_config.py and others, 1.16.0)
    if config.method.stage not in ("sft", *GENERATING):
        adapter = adapter and replace(adapter, dropout=0.0)
        config = replace(config, dropout=0.0)
    return replace(
        config,
        method=with_reference(config),
        activation_checkpointing=config.activation_checkpointing or default_checkpointing(config, stack, hidden),
        clip_gradients=stack.clip_gradients if config.clip_gradients is None else config.clip_gradients,
        adapter=adapter,
    )


def with_reference(config: TrainingConfig) -> Method:
    """Return a config's method with its reference model filled in: the model itself where adapters can be switched off.

    Source:
        trl/trainer/dpo_trainer.py (1.16.0), lines 913 to 940.
    """
    method = config.method
    if method.stage in GENERATING and method.rollout is None:
        method = replace(method, rollout=Rollout())
    if method.reference_model is not None:
        return method
    own: ReferenceModel = "resident" if config.adapter is None else "adapter-off"
    return replace(method, reference_model=own if method.stage in REFERRED else "none")


def with_method(config: TrainingConfig, stack: Stack, profile: KernelProfile) -> KernelProfile:
    """Return the kernels of a config; a loss that compares log-probabilities may form these of whole logits."""
    whole = config.method.stage in REFERRED | GENERATING and stack.loop.metrics != "none"
    return replace(profile, loss="log-probabilities") if whole else profile


def with_method_keys(config: TrainingConfig, stack: Stack) -> Stack:
    """Return a stack without its keys that a config's method has not: no key says how long a prompt and its completion are."""
    if config.method.stage not in GENERATING:
        return stack
    return replace(stack, keys={key: own for key, own in stack.keys.items() if key != "sequence_length"})


def method_problems(config: TrainingConfig) -> Iterator[tuple[Path, str]]:
    """Yield what a config, filled in, says of its method that cannot be."""
    method = config.method
    path = ("method", "reference_model")
    if method.stage not in REFERRED | GENERATING and method.reference_model != "none":
        yield path, f"{method.stage} has no reference model; leave it out"
    if method.rollout is not None:
        yield from _rollout_problems(config, method.rollout)
    if method.stage in REFERRED and method.reference_model == "none":
        yield path, f"{method.stage} compares with a reference model: resident, adapter-off or precomputed"
    if method.reference_model == "adapter-off" and config.adapter is None:
        yield path, "there are no adapters to switch off; use resident or precomputed"
    if method.stage == "kto" and config.micro_batch_size == 1:
        yield (
            ("micro_batch_size",),
            "kto compares answers of one micro-batch with each other, of which it takes at least 2",
        )


def _rollout_problems(config: TrainingConfig, rollout: Rollout) -> Iterator[tuple[Path, str]]:
    """Yield what a config says of generated completions that cannot be."""
    path, stage = ("method", "rollout"), config.method.stage
    if stage not in GENERATING:
        yield path, f"{stage} generates nothing; leave it out"
    if config.method.reference_model == "precomputed":
        yield ("method", "reference_model"), f"what {stage} compares is generated as it trains; use resident"
    if not 0 < rollout.completion_length < config.sequence_length:
        yield (*path, "completion_length"), f"expected 1 to sequence_length less one, {config.sequence_length - 1}"
    if rollout.iterations < 1 or (rollout.micro_batches is not None and rollout.micro_batches < 1):
        yield path, "expected at least one micro-batch and iteration"
    if not 0 < rollout.engine_fraction <= 1:
        yield (*path, "engine_fraction"), "expected a share of the GPU, more than 0 and at most 1"
    micro_batches = rollout.micro_batches or config.gradient_accumulation_steps
    if config.micro_batch_size * micro_batches * config.parallel.data < 2:
        yield ("micro_batch_size",), f"{stage} compares completions of one prompt, of which it takes at least 2"


def method_refusals(config: TrainingConfig, stack: Stack, catalog: Catalog, hidden: str) -> Iterator[tuple[Path, str]]:
    """Yield what of a config's method the formula does not follow.

    Args:
        config: The config, filled in.
        stack: Its stack.
        catalog: Where other stacks are looked up.
        hidden: Weight format of the hidden matrices.

    Source:
        Trainers of stacks that train transformers' models are made of TRL's: ``AxolotlDPOTrainer`` in
        axolotl/core/trainers/dpo/trainer.py (0.21.0).
    """
    stage, full = config.method.stage, config.adapter is None
    whole = stage in REFERRED | GENERATING and stack.loop.metrics != "none"
    narrow = stack.magnitudes == "cast" or whole
    if narrow and config.adapter and config.adapter.kind == "dora" and beside_codes(config, hidden):
        text = f"{stack.label} casts DoRA's magnitudes on quantised weights to bf16, which is not modelled; use lora"
        yield ("adapter", "kind"), text
    if stage not in stack.stages:
        way = ""
        if stack.model_code == "transformers" and stage in catalog.stack("trl").stages:
            who = "as its newest version runs it" if stack.name == "trl" else "as TRL's own trainer runs it"
            way = f"; {who}: --stack trl"
        planned = f"planned of it are {', '.join(stack.stages)}"
        yield ("method", "stage"), f"{stage} as {stack.label} runs it is not modelled; {planned}{way}"
    elif whole and config.kernels.loss is not None:
        yield (
            ("kernels", "loss"),
            f"{config.kernels.loss} is not what {stack.label} compares preferences by; leave it out",
        )
    elif whole and stack.loop.metrics == "accuracy" and config.method.reference_model == "precomputed" and full:
        text = f"{stack.label} keeps the reference model though its log-probabilities are known; use resident"
        yield ("method", "reference_model"), text  # trl/trainer/dpo_trainer.py, lines 689 to 702 (0.29.0)
    elif whole and config.method.rollout is not None and config.method.rollout.engine == "transformers":
        text = f"generation by the model itself is not modelled of {stack.label}; use vllm or server, or --stack trl"
        yield ("method", "rollout", "engine"), text
    elif stage in GENERATING and config.evaluation:
        yield ("evaluation",), f"{stage} generates to evaluate, which is not modelled; use evaluation: false"
    elif stage != "sft" and replace(config.parallel, data=config.parallel.data if whole else 1) != Parallel():
        text = f"{stage} over several GPUs that share a model is not modelled; plan replicas, parallel.zero_stage: 0"
        if replace(config.parallel, data=1) == Parallel():
            text = f"{stage} on several GPUs as {stack.label} runs it is not modelled; as TRL's newest version does: --stack trl"
        yield ("method", "stage"), text


def default_checkpointing(config: TrainingConfig, stack: Stack, hidden: str) -> Checkpointing:
    """Return how a stack checkpoints activations where a config does not say."""
    rules = stack.checkpointing
    return rules.default_quantised if beside_codes(config, hidden) else rules.default


def adapter_dtype(config: TrainingConfig, stack: Stack, hidden: str) -> Floats:
    """Return the dtype of adapters that a stack makes where a config does not say."""
    rule = stack.adapter_dtype if hidden in FLOATS else stack.adapter_dtype_quantised
    if hidden not in FLOATS and config.method.stage in REFERRED:
        rule = "bf16"  # TRL's trainers make the adapters then (trl/trainer/dpo_trainer.py, 1.14.1 and 1.16.0)
    if rule == "weights":
        rule = cast("Floats", hidden if hidden in FLOATS else config.compute_dtype)  # type: ignore[assignment]
    return cast("Floats", rule)


def kernel_profile(config: TrainingConfig, catalog: Catalog) -> KernelProfile:
    """Return the kernels of a config: its own choices over those of its stack."""
    return config.kernels.over(catalog.stack(config.stack).kernels)


def with_adapters(config: TrainingConfig, profile: KernelProfile, stack: Stack, hidden: StorageFormat) -> KernelProfile:
    """Return the kernels of a config: a stack's own loss where there are adapters, and no fused ones where codes are multiplied as integers.

    Source:
        ``lora_kernels_auto_enable`` in axolotl/utils/schemas/validation.py (0.21.0): not with ``load_in_8bit``, nor with ``rl``.
    """
    if config.adapter is not None and config.kernels.loss is None and stack.adapted_loss is not None:
        profile = replace(profile, loss=stack.adapted_loss)
    unfit = hidden.product == "integers" or config.method.stage != "sft"
    alone = unfit and config.kernels.adapters is None
    return replace(profile, adapters="composite") if alone else profile


def runs_autocast(stack: Stack, hidden: str, compute_dtype: str) -> bool:
    """Tell whether a stack runs the model under autocast.

    Args:
        stack: The stack.
        hidden: Weight format of the hidden matrices.
        compute_dtype: Dtype of matrix products.
    """
    narrow = compute_dtype != "fp32"
    return narrow and (stack.autocast == "always" or (stack.autocast == "fp32-weights" and hidden == "fp32"))


def beside_codes(config: TrainingConfig, hidden: str) -> bool:
    """Tell whether weights stand beside quantised matrices that are frozen."""
    return config.adapter is not None and hidden not in FLOATS


def kbit_formats(config: TrainingConfig, stack: Stack, names: Mapping[Role, str]) -> dict[Role, str]:
    """Return the weight formats of a config, with those cast that its stack casts beside quantised matrices.

    Stacked experts are parameters, not linear layers, which alone are quantised: ``replace_with_bnb_linear`` in
    transformers/integrations/bitsandbytes.py (5.23.0).

    Source:
        ``prepare_model_for_kbit_training`` in peft/utils/other.py (0.21.2): all parameters in 16 bits but the quantised
        ones.
    """
    if not beside_codes(config, names["hidden_matrix"]):
        return _full_formats(config, stack, names)
    if stack.model_code != "own" and "expert_matrix" not in config.weights:
        names = {**names, "expert_matrix": names["embedding"]}
    if stack.kbit_floats == "as-is" or _casts_back(config):
        return dict(names)
    if stack.kbit_floats == "stable-embedding":
        return {**names, "head": names["hidden_matrix"]}
    if stack.kbit_floats == "fp32-but-ends":
        fused = (config.kernels.adapters or stack.kernels.adapters) == "fused"
        wide: tuple[Role, ...] = ("router", "expert_matrix", *(("bias",) if fused else ()))
        return {role: "fp32" if role in wide and name in FLOATS else name for role, name in names.items()}
    return {role: "fp32" if name in FLOATS else name for role, name in names.items()}


def _casts_back(config: TrainingConfig) -> bool:
    """Tell whether an engine casts all that is not quantised to the compute dtype, whatever a stack has cast before."""
    return config.parallel.engine == "deepspeed" and config.parallel.zero_stage > 0


def casts_trained(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether accelerate casts what is trained of a config's model to fp32 before it shards it."""
    sharded = config.parallel.zero_stage == 3 and config.parallel.data > 1 and config.parallel.engine == "torch"
    return stack.sharded_units == "accelerate" and sharded and config.compute_dtype != "fp32"


def casts_floats(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether a stack may cast weights that are all trained, and not only those beside adapters."""
    return (stack.full_floats != "as-is" and not _casts_back(config)) or casts_trained(config, stack)


def _full_formats(config: TrainingConfig, stack: Stack, names: Mapping[Role, str]) -> dict[Role, str]:
    """Return the weight formats of a config without quantised weights, with those cast that its stack casts where all are trained.

    Source:
        ``fsdp2_prepare_model`` in accelerate/utils/fsdp_utils.py (1.15.0), which casts trained parameters to fp32 where the
        compute dtype is narrower.
    """
    if config.adapter is None and casts_trained(config, stack):
        return {role: "fp32" if name in FLOATS else name for role, name in names.items()}
    flash = (config.kernels.attention or stack.kernels.attention) == "flash"
    sharded = config.parallel.zero_stage == 3  # FSDP takes weights of one dtype
    if stack.full_floats == "as-is" or config.adapter is not None or flash or sharded or _casts_back(config):
        return dict(names)
    ends = ("embedding", "head", "norm")
    return {role: "fp32" if role in ends and name in FLOATS else name for role, name in names.items()}


def never_run(config: TrainingConfig, stack: Stack, hidden: str) -> Iterator[tuple[Path, str]]:
    """Yield what a config says that its stack never does.

    Args:
        config: The config, filled in.
        stack: Its stack.
        hidden: Weight format of the hidden matrices.
    """
    if stack.autocast == "never" and hidden == "fp32" and config.compute_dtype != "fp32":
        narrow = config.compute_dtype
        text = f"{narrow} on fp32 weights is autocast, which {stack.name} does not run; use weights: {narrow}"
        yield ("compute_dtype",), text
    if config.kernels.loss == "log-probabilities":
        yield ("kernels", "loss"), "log-probabilities is the loss of preference methods; leave it out"
    if config.kernels.loss == "fused-linear" and stack.kernels.loss == "fused-head":
        yield ("kernels", "loss"), f"{stack.name} keeps its own fused head and refuses Liger's loss; use fused-head"


def unmodelled(
    stack: Stack, profile: KernelProfile, formats: Mapping[Role, str], catalog: Catalog
) -> Iterator[tuple[Path, str]]:
    """Yield what of a job the formula does not follow; whoever teaches it a mechanism takes the line away.

    Args:
        stack: Whose loop it is.
        profile: Its kernels.
        formats: Name of the weight format of each role.
        catalog: Where the formats are.
    """
    name, held = stack.name, stack.quantised_formats
    if stack.not_modelled:
        yield ("stack",), f"{name}: {stack.not_modelled[0]}: not modelled yet"
    for role, own in formats.items():
        if held is None and catalog.formats[own].product == "integers":
            yield ("weights", role), f"{own} is a layer of bitsandbytes, which {name} does not have; use stack: trl"
            break
        if held is not None and own not in (*FLOATS, *held):
            able = f"use one of {', '.join(held)} there" if held else "it has none but floats"
            yield ("weights", role), f"{name} does not train over weights in {own}; {able}, or stack: bundled"
            break
    if profile.attention == "eager" and stack.model_code != "transformers":
        yield ("kernels", "attention"), f"eager is not how the models of {name} run; use flash, efficient or math"
    if profile.loss == "in-place":
        yield ("kernels", "loss"), f"{profile.loss} is not modelled yet; use bf16, fp32 or chunked"
