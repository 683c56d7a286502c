"""Changes of a training config that save memory, the cheapest first, each with what it costs."""

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from memplan.catalog.training_config import ALL_TRAIN, Adapter, CheckpointedLayers, TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.step.states.parallel_shards import is_sharded
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

SHORTEST_CONTEXT = 512
"""Contexts are not suggested to be shorter."""
Setting = tuple[str, Any]
"""A key of a training config, with dots, and its value."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a training config as the settings that make it, and what it costs besides memory."""

    cost: str
    settings: tuple[Setting, ...]

    @property
    def name(self) -> str:
        """The settings as ``--set`` takes them."""
        return " ".join(f"{key}={str(value).lower()}" for key, value in self.settings)

    @property
    def takes_host_memory(self) -> bool:
        """Whether something is moved to host memory, which is slower than what stays on the device."""
        return any(key.startswith("offload.") for key, _ in self.settings)

    def apply(self, config: TrainingConfig) -> TrainingConfig:
        """Return a config with the settings made."""
        adapts = config.adapter is None
        for key, value in self.settings:
            config = _assigned(config, key.split("."), value)
        if config.adapter is not None:
            config = replace(config, freeze=ALL_TRAIN)  # all but the adapters is
        if adapts and config.adapter is not None and config.method.reference_model == "resident":
            config = replace(config, method=replace(config.method, reference_model=None))  # the model without adapters
        return config


def _assigned(target: Any, path: list[str], value: Any) -> Any:
    """Return ``target`` with the value at ``path`` replaced, as ``--set`` does it."""
    head, *rest = path
    inner = target.get(head) if isinstance(target, Mapping) else getattr(target, head)
    if rest:
        value = _assigned(Adapter() if head == "adapter" and inner is None else inner, rest, value)
    elif head == "optimizer" and is_dataclass(target) and hasattr(target, "weights"):
        value = {"default": value}
    if isinstance(target, Mapping):
        return {**target, head: value}
    return replace(target, **{head: value})


def changes(config: TrainingConfig, setup: TrainingSetup) -> Iterator[Change]:
    """Yield the changes that make sense for a config and the kernels and stack of a setup, the cheapest first."""
    profile = setup.profile
    if config.parallel.data > 1 and config.parallel.zero_stage == 0:
        yield Change("weights are gathered from the other GPUs twice in every step", (("parallel.zero_stage", 3),))
    if _leaves_codes_whole(config, setup):
        yield Change(
            "quantised weights too are gathered from the other GPUs in every step", (("parallel.engine", "fsdp1"),)
        )
    if config.allocator == "native":
        yield Change(
            "only an environment variable: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            (("allocator", "expandable"),),
        )
    if setup.captures_step:
        yield Change("kernels are launched one by one, without a CUDA graph", (("zero_gradients", "free"),))
    if profile.optimizer != "fused" and config.adapter is None:
        yield Change("no more compute: one kernel makes the same update", (("kernels.optimizer", "fused"),))
    if config.parallel.staged_codes and profile.fused_adapters:
        yield Change("weights are decoded once more in backward", (("kernels.adapters", "composite"),))
    if profile.loss in ("bf16", "fp32") and "chunked" in setup.stack.runs.get("loss", ()):
        yield Change("the head's matrix product is recomputed in backward", (("kernels.loss", "chunked"),))
    if config.gradients.lifetime == "step" and config.adapter is None and config.gradient_accumulation_steps == 1:
        yield Change("no gradient accumulation and no clipping by the global norm", _released(config))
    yield from _cached(config)
    fewer = ", and each anchor is compared with fewer texts" if _compares_all(config) else ""
    for smaller in halvings(config.micro_batch_size, 1):
        cost = f"{accumulation_cost(config.micro_batch_size, smaller)}{fewer}"
        yield Change(cost, (("micro_batch_size", smaller),))
    if config.activation_checkpointing == "none":
        yield Change(
            "norms and elementwise operations are recomputed in backward", (("activation_checkpointing", "selective"),)
        )
    if config.activation_checkpointing != "full":
        cost = "every layer's forward is recomputed in backward, about a third more compute"
        yield Change(cost, (("activation_checkpointing", "full"),))
    elif settings := of_every_layer(config):
        yield Change("the forward of the other layers is recomputed in backward too", settings)
    offloads = setup.stack.checkpointing.offloads != "none" and config.parallel.gpus == 1
    yield from _costly_changes(config, offloads=offloads)


def _compares_all(config: TrainingConfig) -> bool:
    """Tell whether what a step learns depends on how many rows a micro-batch has."""
    texts = config.method.embedding
    return texts is not None and texts.loss == "in-batch-negatives"


def _cached(config: TrainingConfig) -> Iterator[Change]:
    """Yield smaller mini-batches of a cached loss, which compares as many texts as before."""
    texts = config.method.embedding
    if texts is None or not _compares_all(config):
        return
    cost = (
        "a cached loss, which embeds every text twice" if texts.mini_batch_size is None else "more forwards for a batch"
    )
    for smaller in halvings(texts.mini_batch_size or config.micro_batch_size, 1):
        yield Change(cost, (("method.embedding.mini_batch_size", smaller),))


def _leaves_codes_whole(config: TrainingConfig, setup: TrainingSetup) -> bool:
    """Tell whether quantised weights beside adapters are whole on every GPU while all else is sharded."""
    coded = config.adapter is not None and setup.format_names["hidden_matrix"] not in FLOAT_BYTES
    return coded and is_sharded(config.parallel) and config.parallel.engine == "torch"


def of_every_layer(config: TrainingConfig) -> tuple[Setting, ...]:
    """Return the settings by which what is said of checkpointing is said of every layer; none where it is."""
    layers, whole = config.checkpointed_layers, CheckpointedLayers()
    names = [name for name in ("every", "first") if getattr(layers, name) != getattr(whole, name)]
    return tuple((f"checkpointed_layers.{name}", getattr(whole, name)) for name in names)


def halvings(size: int, least: int) -> Iterator[int]:
    """Yield a size halved once, twice and so on, down to the least.

    Example:
        >>> list(halvings(12, 1)), list(halvings(4096, 1024))
        ([6, 3, 1], [2048, 1024])
    """
    while size // 2 >= least:
        size //= 2
        yield size


def accumulation_cost(before: int, after: int) -> str:
    """Return what a smaller micro-batch costs.

    Example:
        >>> accumulation_cost(4, 2)
        'twice the accumulation steps for the same batch'
        >>> accumulation_cost(16, 1)
        '16 times the accumulation steps for the same batch'
    """
    times = {2: "twice", 3: "three times", 4: "four times"}.get(before // after, f"{before // after} times")
    return f"{'more than ' if before % after else ''}{times} the accumulation steps for the same batch"


def _released(config: TrainingConfig) -> tuple[Setting, ...]:
    """Return the settings that release gradients inside backward, and undo what does not go with it."""
    settings: list[Setting] = [("gradients.lifetime", "layer")]
    if config.clip_gradients:
        settings.append(("clip_gradients", False))
    if config.zero_gradients == "fill":
        settings.append(("zero_gradients", "free"))
    return tuple(settings)


def _costly_changes(config: TrainingConfig, *, offloads: bool) -> Iterator[Change]:
    """Yield the changes that alter how a job trains: on the device first, then in host memory, then shorter sequences.

    Args:
        offloads: Whether the stack's checkpoints can be there.
    """
    if (teacher := config.method.teacher) is not None and teacher.weights is None:
        yield Change("the student learns from a teacher in 4 bits", (("method.teacher.weights", "nf4-dq"),))
    if config.adapter is None and _is_plain(config):
        cost = "8-bit optimizer states, which need bitsandbytes"
        yield Change(cost, (("optimizer", "adamw-8bit-bnb"),))
    narrow = _narrow(config)
    if config.adapter is None and config.master_weights == "none" and narrow:
        cost = f"weights and gradients in {config.compute_dtype}: small updates are rounded away"
        yield Change(cost, narrow)
    if config.offload.optimizer_states == "none" and config.adapter is None and config.master_weights == "none":
        cost = "host memory for the optimizer states, which every step copies in and out"
        yield Change(cost, (("offload.optimizer_states", "cpu"),))
    if offloads and config.activation_checkpointing == "full" and config.offload.activations == "none":
        yield Change("host memory for the input of each layer, copied out and back", (("offload.activations", "cpu"),))
    yield from _offloaded_engine(config)
    for part, shorter in enumerate(halvings(config.sequence_length, SHORTEST_CONTEXT), 1):
        share = "half the context" if part == 1 else f"1/{2**part} of the context"
        yield Change(share, (("sequence_length", shorter),))


def _offloaded_engine(config: TrainingConfig) -> Iterator[Change]:
    """Yield what DeepSpeed can keep in host memory."""
    parallel, offload = config.parallel, config.offload
    if parallel.engine != "deepspeed" or not parallel.zero_stage:
        return
    states = (("offload.optimizer_states", "cpu"),)
    if offload.optimizer_states == "none":
        yield Change("host memory for fp32 weights, gradients and states, which the CPU steps", states)
    if offload.weights == "none" and parallel.zero_stage == 3:
        yield Change(
            "host memory for all that ranks keep, which every gather copies", (*states, ("offload.weights", "cpu"))
        )


def last_resorts(config: TrainingConfig) -> Iterator[Change]:
    """Yield changes of what is trained, for jobs that nothing else makes fit: adapters in place of all weights, 4 bits
    in place of 16; a job that is as small as that already has none.
    """
    if not _is_plain(config):
        return
    four_bits = {**dict(_narrow(config)), "weights.hidden_matrix": "nf4-dq"}
    if config.adapter is not None:
        yield Change("base weights in 4 bits (QLoRA), since nothing else fits", tuple(four_bits.items()))
        return
    adapters = _adapters(config)
    yield Change("only adapters are trained (LoRA), since nothing else fits", adapters)
    yield Change(
        "only adapters are trained, on 4-bit weights (QLoRA), since nothing else fits", (*adapters, *four_bits.items())
    )


def _narrow(config: TrainingConfig) -> tuple[Setting, ...]:
    """Return the settings that put fp32 weights into the dtype of products, where that has 16 bits."""
    roles = [role for role, name in config.weights.items() if name == "fp32"] if config.compute_dtype != "fp32" else []
    return tuple((f"weights.{role}", config.compute_dtype) for role in roles)


def _is_plain(config: TrainingConfig) -> bool:
    return config.weights.get("hidden_matrix", config.weights.get("default", "bf16")) in FLOAT_BYTES


def _adapters(config: TrainingConfig) -> tuple[Setting, ...]:
    """Return the settings that train adapters alone."""
    master: tuple[Setting, ...] = () if config.master_weights == "none" else (("master_weights", "none"),)
    return (*master, ("adapter.kind", "lora"), ("adapter.rank", Adapter().rank))
