"""What to change when a job does not fit: cheap changes first, each with what it saves and costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import ALL_TRAIN, Adapter, CheckpointedLayers, TrainingConfig
from memplan.errors import MemplanError
from memplan.plan.memory_plan import MemoryPlan, Suggestion
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import simulated
from memplan.step.kernels.on_card import emulated_dtype
from memplan.training.own_settings import is_settable, own_settings
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.training.rules.half_precision import fp16_settings

Setting = tuple[str, Any]
"""A key of a training config, with dots, and its value."""

LEAST_SHARE = 200
"""Changes that save less than one part in this many of the device bytes are not worth a line."""


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
    if config.allocator == "native":
        yield Change("nothing: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", (("allocator", "expandable"),))
    if profile.optimizer != "fused" and config.adapter is None:
        yield Change("nothing: the same update in one kernel", (("kernels.optimizer", "fused"),))
    if profile.loss in ("bf16", "fp32"):
        yield Change("the head's matrix product is recomputed in backward", (("kernels.loss", "chunked"),))
    if config.gradients.lifetime == "step" and config.adapter is None and config.gradient_accumulation_steps == 1:
        yield Change("no gradient accumulation and no clipping by the global norm", _released(config))
    if config.micro_batch_size > 1:
        half = config.micro_batch_size // 2
        yield Change(accumulation_cost(config.micro_batch_size, half), (("micro_batch_size", half),))
    if config.activation_checkpointing == "none":
        yield Change(
            "norms and elementwise operations are recomputed in backward", (("activation_checkpointing", "selective"),)
        )
    if config.activation_checkpointing != "full":
        cost = "every layer's forward is recomputed in backward, about a third more compute"
        yield Change(cost, (("activation_checkpointing", "full"),))
    elif settings := of_every_layer(config):
        yield Change("the forward of the other layers is recomputed in backward too", settings)
    yield from _costly_changes(config, offloads=setup.stack.checkpointing.offloads)


def of_every_layer(config: TrainingConfig) -> tuple[Setting, ...]:
    """Return the settings by which what is said of checkpointing is said of every layer; none where it is."""
    layers, whole = config.checkpointed_layers, CheckpointedLayers()
    names = [name for name in ("every", "first") if getattr(layers, name) != getattr(whole, name)]
    return tuple((f"checkpointed_layers.{name}", getattr(whole, name)) for name in names)


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
        yield Change("host memory for what layers are given, copied out and in", (("offload.activations", "cpu"),))
    yield from _offloaded_engine(config)
    if config.sequence_length >= 1024:
        yield Change("half the context", (("sequence_length", config.sequence_length // 2),))


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
        yield Change("nothing else fits: base weights in 4 bits (QLoRA)", tuple(four_bits.items()))
        return
    adapters = _adapters(config)
    yield Change("nothing else fits: only adapters are trained (LoRA), not all weights", adapters)
    yield Change(
        "nothing else fits: only adapters are trained, on 4-bit weights (QLoRA)", (*adapters, *four_bits.items())
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


def with_suggestions(plan: MemoryPlan, catalog: Catalog, most: int = 6) -> MemoryPlan:
    """Return a plan that carries its suggestions; one that is sure to fit has none.

    Where its reserve is simulated, changes are sought with shares, and those that are shown are simulated.
    """
    if plan.verdict == "fits":
        return plan
    if plan.by_share is None:
        found = suggestions(plan, catalog, most)
    else:
        found = suggestions(plan.by_share, catalog, most, plan)
    if plan.exceeds_host:  # what saves the device's memory alone is no start
        found = tuple([item for item in found if item.flips_verdict])
    return replace(plan, suggestions=found)


def suggestions(
    plan: MemoryPlan, catalog: Catalog, most: int = 6, final: MemoryPlan | None = None
) -> tuple[Suggestion, ...]:
    """Return changes to a plan that is not sure to fit, those that flip the verdict first.

    They keep what is trained: adapters where adapters were, weights as wide, all weights where all were. Only where
    nothing else makes the job fit is that changed, and said. When no single change does, or only one that takes host
    memory, the cheapest combination that does without is put first, if there is one. On a card that only emulates bf16 all of them are in fp16.
    """
    trial = Trial(plan, catalog, _at(plan))
    fp16 = _in_fp16(trial)
    config = trial.config if fp16 is None else fp16.apply(trial.config)
    results = _tried(trial, fp16, changes(config, plan.setup))
    if not any(item.flips_verdict for item in results):
        resorts = _tried(trial, fp16, last_resorts(config), (*changes(config, plan.setup),))
        results = [*(item for item in resorts if item.flips_verdict), *results]
    return tuple(results[:most]) if final is None else _simulated(trial, results[:most], final)


def _simulated(trial: Trial, results: Sequence[Suggestion], final: MemoryPlan) -> tuple[Suggestion, ...]:
    """Return what was found with shares, each simulated as the plan that is shown is; those that flip its verdict first."""
    shown = []
    for item in results:
        plan = simulated(trial.tried[item.change], least=False)
        saves, flips = final.device_bytes - plan.device_bytes, plan.verdict == "fits"
        shown.append(replace(item, saves_bytes=saves, flips_verdict=flips, device_bytes=plan.device_bytes))
    return tuple(sorted((item for item in shown if item.saves_bytes > 0), key=lambda item: not item.flips_verdict))


def _in_fp16(trial: Trial) -> Change | None:
    """Return the change to fp16 where a card only emulates bf16, or None."""
    if not emulated_dtype(trial.plan.setup, trial.plan.device.gpu):
        return None
    return Change("fp16 and a loss scale: the card only emulates bf16", fp16_settings(trial.config, trial.catalog))


def _tried(
    trial: Trial, fp16: Change | None, tried: Iterable[Change], besides: Sequence[Change] = ()
) -> list[Suggestion]:
    """Return changes that save something, those that flip the verdict first, or before them a combination that does.

    Args:
        fp16: What goes with every change, or nothing.
        besides: Others that each of them may be combined with.
    """
    stack, floor = trial.plan.setup.stack, trial.plan.device_bytes // LEAST_SHARE
    options = [change if fp16 is None else _joined([fp16, change]) for change in tried]
    changed = [
        (change, other)
        for change in (options if fp16 is None or besides else [fp16, *options])
        if is_settable(stack, change.settings) and (other := trial.plan_with(change)) is not None
    ]
    single = [trial.suggestion(change, other) for change, other in changed]
    results = sorted((s for s in single if s.saves_bytes > floor), key=lambda item: not item.flips_verdict)
    on_device = [change for change, _ in changed if not change.takes_host_memory]
    if any(item.flips_verdict for item in results):
        faster = not any(other.verdict == "fits" for change, other in changed if change in on_device)
        return [*(_combination(trial, on_device) if faster else ()), *results]
    if not besides:
        return [*(_combination(trial, on_device) or _combination(trial, [c for c, _ in changed])), *results]
    able = [change for change in besides if is_settable(stack, change.settings)]
    return [*(found for change, _ in changed for found in _combination(trial, [change, *able])[:1]), *results]


def _at(plan: MemoryPlan) -> TrainingConfig:
    return replace(plan.setup.config, micro_batch_size=plan.micro_batch_size, sequence_length=plan.sequence_length)


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan, and its config to try changes on."""

    plan: MemoryPlan
    catalog: Catalog
    config: TrainingConfig
    tried: dict[str, MemoryPlan] = field(default_factory=dict)

    def plan_with(self, change: Change) -> MemoryPlan | None:
        """Return the plan with a change made, or None where the config does not allow it."""
        try:
            setup = resolve(change.apply(self.config), self.catalog, self.plan.setup.name)
            setup = replace(setup, untied_ends=self.plan.setup.untied_ends)  # of the model, which is built already
            return CompiledPlan(self.plan.model, setup).evaluate(self.plan.device)
        except MemplanError:
            return None

    def suggestion(self, change: Change, changed: MemoryPlan) -> Suggestion:
        """Return a change with what it saves."""
        self.tried[change.name] = changed
        saves = self.plan.device_bytes - changed.device_bytes
        own = own_settings(self.plan.setup.stack, change.settings)
        if self.plan.ranks and any(key == "micro_batch_size" for key, _ in change.settings):
            own = ()  # a pipeline's micro-batches have another key
        return Suggestion(change.name, saves, changed.verdict == "fits", change.cost, changed.device_bytes, own)


def _combination(trial: Trial, options: Sequence[Change]) -> list[Suggestion]:
    """Return the cheapest combination that makes the job fit, or none.

    Where a change goes with those before it in no combination, one is also sought without what it does not go with.
    """
    found, refused = _grown(trial, options)
    for change in refused if found is None else ():
        friends = [c for c in options if c is change or trial.plan_with(_joined([c, change])) is not None]
        found, _ = _grown(trial, friends)
        if found is not None:
            break
    return [] if found is None else [trial.suggestion(*found)]


def _grown(trial: Trial, options: Sequence[Change]) -> tuple[tuple[Change, MemoryPlan] | None, list[Change]]:
    """Return a combination that fits, grown from the cheap end, then thinned; and the changes that none took."""
    chosen: list[Change] = []
    refused: list[Change] = []
    best: MemoryPlan | None = None
    for change in options:
        changed = trial.plan_with(_joined([*chosen, change]))
        if changed is None:
            refused.append(change)
        elif best is None or changed.device_bytes < best.device_bytes:
            chosen, best = [*chosen, change], changed
            if changed.verdict == "fits":
                break
    if best is None or best.verdict != "fits":
        return None, refused
    for change in chosen[:-1]:
        fewer = [other for other in chosen if other is not change]
        changed = trial.plan_with(_joined(fewer))
        if changed is not None and changed.verdict == "fits":
            chosen, best = fewer, changed
    return (_joined(chosen), best), refused


def _joined(parts: list[Change]) -> Change:
    """Return several changes as one; of two settings of one key, the later stands."""
    settings = {key: value for part in parts for key, value in part.settings}
    return Change("; ".join(dict.fromkeys(part.cost for part in parts)), tuple(settings.items()))
