"""What dtypes and kernels a stack makes of a training config, and what of a stack the formula cannot follow yet."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from memplan.catalog.catalog import Catalog
from memplan.catalog.config_keys.method_keys import SCORED
from memplan.catalog.entries import StorageFormat
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import ALL_TRAIN, Offload, TrainingConfig
from memplan.errors import CannotAnswerError, MemplanError
from memplan.model.inventory import Role

Path = tuple[str, ...]
Floats = Literal["fp32", "bf16", "fp16"]
FLOATS = ("fp32", "bf16", "fp16")

CUT = "cut-cross-entropy"
"""The loss whose own library has the model's ends cast back, and refuses others."""


def stack_problems(config: TrainingConfig, catalog: Catalog) -> Iterator[tuple[Path, str]]:
    """Yield why there is no stack as a config names it; a version that was not read is refused elsewhere."""
    try:
        catalog.stack(config.stack)
    except CannotAnswerError:
        return
    except MemplanError as error:
        yield ("stack",), str(error).removeprefix("stack: ")


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
    unfit = hidden.product == "integers" or config.method.stage not in ("sft", "reward")
    alone = unfit and config.kernels.adapters is None
    return replace(profile, adapters="composite") if alone else profile


def runs_autocast(config: TrainingConfig, stack: Stack, hidden: str) -> bool:
    """Tell whether a stack runs the model of a config under autocast."""
    if config.compute_dtype == "fp32" or config.autocast is not None:
        return config.compute_dtype != "fp32" and bool(config.autocast)
    return stack.autocast == "always" or (stack.autocast == "fp32-weights" and hidden == "fp32")


def _autocast_problems(config: TrainingConfig, stack: Stack, hidden: str) -> Iterator[tuple[Path, str]]:
    """Yield why a stack cannot be told whether it runs a config's model under autocast."""
    key, narrow = ("autocast",), config.compute_dtype
    if config.autocast is None:
        return
    if "autocast" not in stack.keys:
        yield key, f"{stack.name} has no key that switches it; leave it out"
    elif config.autocast and (narrow == "fp32" or config.parallel.engine == "deepspeed"):
        why = "products in fp32 run without it" if narrow == "fp32" else "DeepSpeed's engine casts the weights itself"
        yield key, f"{why}; leave it out"
    elif not config.autocast and hidden == "fp32" != narrow:
        yield key, f"fp32 weights compute in fp32 without it; use compute_dtype: fp32, or weights: {narrow}"
    elif not config.autocast and config.parallel.zero_stage and not _shards_as_stored(config, stack):
        yield key, "16-bit weights without mixed precision are not modelled in this engine, or offloaded; leave it out"
    elif not config.autocast and config.loss_scaling:
        yield key, "a loss scale comes with autocast in fp16; leave one of them out"


def _shards_as_stored(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether shards of 16-bit weights are gathered and reduced as they are stored: accelerate's FSDP without mixed precision."""
    # Source: ``fsdp2_prepare_model`` in accelerate/utils/fsdp_utils.py and ``Accelerator.prepare_model`` in
    # accelerate/accelerator.py (1.15.0): no policy, and nothing cast to fp32, where ``mixed_precision`` is ``no``.
    wraps = stack.sharded_units == "accelerate" and config.parallel.engine in ("torch", "fsdp1")
    return wraps and config.offload == Offload()


def _checkpointing_problems(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield why a stack cannot be told by which kind of checkpointing layers run again."""
    # Source: ``checkpoint`` in torch/utils/checkpoint.py (v2.13.0): ``context_fn`` needs ``use_reentrant=False``.
    if config.reentrant_checkpointing is not None and "reentrant_checkpointing" not in stack.keys:
        yield ("reentrant_checkpointing",), f"{stack.name} has no key that switches it; leave it out"
    elif config.reentrant_checkpointing and config.activation_checkpointing == "selective":
        text = "torch's older checkpointing computes all of a layer again; use activation_checkpointing: full, or leave it out"
        yield ("reentrant_checkpointing",), text


def _balance_problems(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield why no loss of unbalanced experts is added."""
    if config.method.balances and stack.model_code != "transformers":
        text = f"{stack.label} adds no loss of unbalanced experts; leave it out, or use a stack of transformers, such as trl"
        yield ("method", "balances"), text


def _outputs_problems(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield why a config cannot say how long a loop has a name for what the model returns."""
    if config.outputs_until is not None and "outputs_until" not in stack.keys:
        yield ("outputs_until",), f"{stack.name} has a loop of its own, which settles that; leave it out"
    elif config.outputs_until is not None and config.parallel.gpus > 1:
        yield ("outputs_until",), "is planned on one GPU; leave it out over several"


def _evaluation_problems(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield why a stack evaluates no other number of rows than a config trains on."""
    if stack.evaluates_alike and config.evaluation_batch_size not in (None, config.micro_batch_size):
        yield ("evaluation_batch_size",), f"{stack.name} evaluates as many rows as it trains on; leave it out"


def _optimizer_problems(config: TrainingConfig, stack: Stack, hidden: str) -> Iterator[tuple[Path, str]]:
    """Yield why a stack steps adapters over quantised weights by no other class than its own."""
    own, coded = stack.quantised_optimizer, config.adapter is not None and hidden in (stack.quantised_formats or ())
    if own and coded and (others := {*config.optimizer.values()} - {own}):
        text = f"{stack.name} steps adapters over {hidden} by {own} alone, and not by {', '.join(sorted(others))}; leave it out"
        yield ("optimizer",), text


CODED_HEADS = ("coded-head", "stable-embedding")
"""What is done to weights beside codes where heads are quantised too."""


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
    if not stack.own_models and "expert_matrix" not in config.weights:
        names = {**names, "expert_matrix": names["embedding"]}
    if stack.kbit_floats == "as-is" or _casts_back(config):
        return dict(names)
    if stack.kbit_floats in CODED_HEADS:
        return {**names, "head": names["hidden_matrix"]}
    if stack.kbit_floats == "fp32-norms":
        own: tuple[Role, ...] = ("embedding", "head")
        return {role: name if name not in FLOATS else "bf16" if role in own else "fp32" for role, name in names.items()}
    if stack.kbit_floats == "fp32-but-ends":
        fused = config.kernels.over(stack.kernels).fused_adapters
        wide: tuple[Role, ...] = ("router", "expert_matrix", *(("bias",) if fused else ()))
        if config.parallel.zero_stage == 3:  # should_convert_embedding_dtypes in loaders/model.py
            wide = ("embedding", "norm", "head", "router")
        return {role: "fp32" if role in wide and name in FLOATS else name for role, name in names.items()}
    return {role: "fp32" if name in FLOATS else name for role, name in names.items()}


def _casts_back(config: TrainingConfig) -> bool:
    """Tell whether all that is not quantised stays in, or is cast back to, the compute dtype: FSDP1's flat tensors have one dtype."""
    # Source: ``_validate_tensors_to_flatten`` in torch/distributed/fsdp/_flat_param.py (v2.13.0).
    return config.parallel.engine != "torch" and config.parallel.zero_stage > 0


def casts_trained(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether accelerate casts what is trained of a config's model to fp32, as it does where FSDP has mixed precision.

    Source:
        ``fsdp2_prepare_model`` in accelerate/utils/fsdp_utils.py and ``Accelerator.prepare_model`` in accelerate/accelerator.py
        (1.15.0), where FSDP1's flat tensors are cast once they are made, unless they have no memory, as in a trace.
    """
    parallel = config.parallel
    sharded = parallel.zero_stage == 3 and parallel.data > 1 and parallel.engine == "torch"
    accelerates = stack.sharded_units == "accelerate" and sharded
    flattened = is_flattened(config) and stack.sharded_units != "lightning"
    return (accelerates or flattened) and config.compute_dtype != "fp32" and config.autocast is not False


def is_flattened(config: TrainingConfig) -> bool:
    """Tell whether ranks hold flat tensors of FSDP1, of codes too."""
    return config.parallel.engine == "fsdp1" and config.parallel.gpus > 1


def casts_floats(config: TrainingConfig, stack: Stack) -> bool:
    """Tell whether a stack may cast weights that are all trained, and not only those beside adapters."""
    return (stack.full_floats != "as-is" and not _casts_back(config)) or casts_trained(config, stack)


def _full_formats(config: TrainingConfig, stack: Stack, names: Mapping[Role, str]) -> dict[Role, str]:
    """Return the weight formats of a config without quantised weights, with those cast that its stack casts where all are trained."""
    if config.adapter is None and casts_trained(config, stack):
        return {role: "fp32" if name in FLOATS else name for role, name in names.items()}
    flash = (config.kernels.attention or stack.kernels.attention) == "flash" or config.kernels.loss == CUT
    sharded = config.parallel.zero_stage == 3  # FSDP takes weights of one dtype
    if stack.full_floats == "as-is" or config.adapter is not None or flash or sharded or _casts_back(config):
        return dict(names)
    ends = (
        "embedding",
        "norm",
        *(() if config.method.stage in SCORED else ("head",)),
    )  # a head that scores has no such name
    return {role: "fp32" if role in ends and name in FLOATS else name for role, name in names.items()}


def never_run(config: TrainingConfig, stack: Stack, hidden: str) -> Iterator[tuple[Path, str]]:
    """Yield what a config says that its stack never does."""
    yield from _autocast_problems(config, stack, hidden)
    yield from _checkpointing_problems(config, stack)
    yield from _balance_problems(config, stack)
    yield from _outputs_problems(config, stack)
    yield from _evaluation_problems(config, stack)
    yield from _optimizer_problems(config, stack, hidden)
    alone = stack.sharded_units == "own-root" and not (config.parallel.zero_stage and config.parallel.data > 1)
    if (stack.autocast == "never" or alone) and hidden == "fp32" and config.compute_dtype != "fp32":
        narrow = config.compute_dtype
        text = f"{narrow} on fp32 weights is autocast, which {stack.name} does not run; use weights: {narrow}"
        yield ("compute_dtype",), text
    if config.kernels.loss == "log-probabilities" and config.method.stage in ("sft", *SCORED):
        yield ("kernels", "loss"), "log-probabilities is the loss of preference methods; leave it out"
    if config.kernels.loss == "fused-linear" and stack.kernels.loss == "fused-head":
        yield ("kernels", "loss"), f"{stack.name} keeps its own fused head and refuses Liger's loss; use fused-head"
    if config.kernels.loss == CUT and config.compute_dtype == "fp32":
        text = f"{CUT} takes rows and a head in 16 bits; use compute_dtype: bf16, or fp32 as the loss"
        yield ("kernels", "loss"), text


def kernel_refusals(config: TrainingConfig, stack: Stack) -> Iterator[tuple[Path, str]]:
    """Yield kernels that nothing of a stack runs, or whose part in it was not followed."""
    for key in ("attention", "norm", "rotary", "activation", "loss", "adapters"):
        given, able = getattr(config.kernels, key), {getattr(stack.kernels, key), *stack.runs.get(key, ())}
        if given is not None and given not in able:
            text = f"{given} is not modelled for {stack.label}; leave it out, or use one of {', '.join(sorted(able))}"
            yield ("kernels", key), text


def _left_in_floats(stack: Stack) -> tuple[Role, ...]:
    """Return what libraries quantise nothing of: they replace linear layers, and of these all but the head.

    Source: ``get_keys_to_not_convert`` and ``replace_with_bnb_linear`` in transformers (5.23.0); ``BitsandbytesPrecision`` of
    lightning/fabric/plugins/precision/bitsandbytes.py (2.6), which LitGPT takes, replaces heads too.
    """
    experts: tuple[Role, ...] = () if stack.own_models else ("expert_matrix", "router")
    return ("embedding", *experts) if stack.kbit_floats in CODED_HEADS else ("embedding", "head", *experts)


def unmodelled(
    stack: Stack, profile: KernelProfile, formats: Mapping[Role, str], catalog: Catalog
) -> Iterator[tuple[Path, str]]:
    """Yield what of a job the formula does not follow; whoever teaches it a mechanism takes the line away.

    Args:
        formats: Name of the weight format of each role.
    """
    name, resident = stack.name, stack.quantised_formats
    if stack.not_modelled:
        yield ("stack",), f"{name}: {stack.not_modelled[0]}"
    for role, own in formats.items():
        if resident is None and catalog.formats[own].product == "integers":
            yield ("weights", role), f"{own} is a layer of bitsandbytes, which {name} does not have; use stack: trl"
            break
        if resident is not None and own not in (*FLOATS, *resident):
            able = f"use one of {', '.join(resident)} there" if resident else "it has none but floats"
            yield ("weights", role), f"{name} does not train over weights in {own}; {able}, or stack: bundled"
            break
        if resident is not None and own not in FLOATS and role in _left_in_floats(stack):
            text = f"{name} quantises the matrices of layers alone, so that nothing else is in {own}; set weights.hidden_matrix"
            yield ("weights", role), text
            break
    if profile.loss == "in-place":
        yield ("kernels", "loss"), f"{profile.loss} is not modelled yet; leave it out"


def activation_refusals(
    config: TrainingConfig, stack: Stack, profile: KernelProfile, hidden: StorageFormat
) -> Iterator[tuple[Path, str]]:
    """Yield why activations in host memory are not modelled."""
    rules = stack.checkpointing
    whole = config.freeze == ALL_TRAIN and not config.images.per_row
    own = profile.loss == "fused-head" and config.method.stage == "sft"
    reasons = {
        f": how {stack.library} keeps activations there is not modelled yet": rules.offloads == "none",
        " without full checkpointing: every tensor that is saved is copied then, which is not modelled; use "
        "activation_checkpointing: full": config.activation_checkpointing != "full",
        " on several GPUs": config.parallel.gpus > 1,
        " over codes that are multiplied as integers, whose function keeps tensors of its own": hidden.product
        == "integers",
        " with parts that are frozen, or with images, of which hooks copy other tensors": rules.hooked and not whole,
        " with reentrant checkpointing, in whose backward hooks copy too; use reentrant_checkpointing: false": rules.hooked
        and rules.reentrant,
        " with this loss, whose tensors are copied too; that of sft and kernels.loss: fused-head is modelled": rules.offloads
        == "hooks-once"
        and not own,
    }
    if config.offload.activations != "none":
        for reason in [text for text, applies in reasons.items() if applies]:
            yield ("offload", "activations"), f"{config.offload.activations} is not supported{reason}"
