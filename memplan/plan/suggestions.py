"""What to change when a job does not fit: cheap changes first, each with what it saves and costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.training_config import Adapter, TrainingConfig
from memplan.errors import MemplanError
from memplan.plan.memory_plan import MemoryPlan, Suggestion
from memplan.plan.planner import CompiledPlan
from memplan.training.own_settings import is_settable, own_settings
from memplan.training.resolved import FLOAT_BYTES, resolve

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

    def apply(self, config: TrainingConfig) -> TrainingConfig:
        """Return a config with the settings made."""
        for key, value in self.settings:
            config = _assigned(config, key.split("."), value)
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


def changes(config: TrainingConfig, profile: KernelProfile) -> Iterator[Change]:
    """Yield the changes that make sense for a config, the cheapest first."""
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
        yield Change("twice the accumulation steps for the same batch", (("micro_batch_size", half),))
    if config.activation_checkpointing == "none":
        yield Change(
            "norms and elementwise operations are recomputed in backward", (("activation_checkpointing", "selective"),)
        )
    if config.activation_checkpointing != "full":
        cost = "every layer's forward is recomputed in backward, about a third more compute"
        yield Change(cost, (("activation_checkpointing", "full"),))
    yield from _costly_changes(config)


def _released(config: TrainingConfig) -> tuple[Setting, ...]:
    """Return the settings that release gradients inside backward, and undo what does not go with it."""
    settings: list[Setting] = [("gradients.lifetime", "layer")]
    if config.clip_gradients:
        settings.append(("clip_gradients", False))
    if config.zero_gradients == "fill":
        settings.append(("zero_gradients", "free"))
    return tuple(settings)


def _costly_changes(config: TrainingConfig) -> Iterator[Change]:
    """Yield the changes that alter what is trained, or how."""
    if config.offload.optimizer_states == "none" and config.adapter is None and config.master_weights == "none":
        cost = "host memory for the optimizer states, which every step copies in and out"
        yield Change(cost, (("offload.optimizer_states", "cpu"),))
    plain = config.weights.get("hidden_matrix", config.weights.get("default", "bf16")) in FLOAT_BYTES
    if config.adapter is None and plain:
        cost = "8-bit optimizer states, which need bitsandbytes"
        yield Change(cost, (("optimizer", "adamw-8bit-bnb"),))
    if config.sequence_length >= 1024:
        yield Change("half the context", (("sequence_length", config.sequence_length // 2),))
    if config.adapter is None and plain:
        adapters = _adapters(config)
        yield Change("only adapters are trained", adapters)
        narrow = tuple(
            (f"weights.{role}", config.compute_dtype) for role, name in config.weights.items() if name == "fp32"
        )
        four_bits = {**dict(narrow), "weights.hidden_matrix": "nf4-dq"}
        yield Change("only adapters are trained, on 4-bit weights", (*adapters, *four_bits.items()))


def _adapters(config: TrainingConfig) -> tuple[Setting, ...]:
    """Return the settings that train adapters alone."""
    master: tuple[Setting, ...] = () if config.master_weights == "none" else (("master_weights", "none"),)
    return (*master, ("adapter.kind", "lora"), ("adapter.rank", Adapter().rank))


def with_suggestions(plan: MemoryPlan, catalog: Catalog, most: int = 6) -> MemoryPlan:
    """Return a plan that carries its suggestions; one that is sure to fit has none."""
    return plan if plan.verdict == "fits" else replace(plan, suggestions=suggestions(plan, catalog, most))


def suggestions(plan: MemoryPlan, catalog: Catalog, most: int = 6) -> tuple[Suggestion, ...]:
    """Return changes to a plan that is not sure to fit, those that flip the verdict first.

    When no single change does, the cheapest combination that does is put first, if there is one.
    """
    trial = Trial(plan, catalog, _at(plan))
    tried = [c for c in changes(trial.config, plan.setup.profile) if is_settable(plan.setup.stack, c.settings)]
    changed = [(change, other) for change in tried if (other := trial.plan_with(change)) is not None]
    floor = plan.device_bytes // LEAST_SHARE
    single = [trial.suggestion(change, other) for change, other in changed]
    results = sorted((s for s in single if s.saves_bytes > floor), key=lambda item: not item.flips_verdict)
    if not any(item.flips_verdict for item in results):
        results = [*_combination(trial, [change for change, _ in changed]), *results]
    return tuple(results[:most])


def _at(plan: MemoryPlan) -> TrainingConfig:
    return replace(plan.setup.config, micro_batch_size=plan.micro_batch_size, sequence_length=plan.sequence_length)


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan, and its config to try changes on."""

    plan: MemoryPlan
    catalog: Catalog
    config: TrainingConfig

    def plan_with(self, change: Change) -> MemoryPlan | None:
        """Return the plan with a change made, or None where the config does not allow it."""
        try:
            setup = resolve(change.apply(self.config), self.catalog, self.plan.setup.name)
            return CompiledPlan(self.plan.model, setup).evaluate(self.plan.device)
        except MemplanError:
            return None

    def suggestion(self, change: Change, changed: MemoryPlan) -> Suggestion:
        """Return a change with what it saves."""
        saves = self.plan.device_bytes - changed.device_bytes
        own = own_settings(self.plan.setup.stack, change.settings)
        return Suggestion(change.name, saves, changed.verdict == "fits", change.cost, changed.device_bytes, own)


def _combination(trial: Trial, options: list[Change]) -> list[Suggestion]:
    """Return the cheapest combination that makes the job fit: grown from the cheap end, then thinned."""
    chosen: list[Change] = []
    best: MemoryPlan | None = None
    for change in options:
        changed = trial.plan_with(_joined([*chosen, change]))
        if changed is None or (best and changed.device_bytes >= best.device_bytes):
            continue
        chosen, best = [*chosen, change], changed
        if changed.verdict == "fits":
            break
    if best is None or best.verdict != "fits":
        return []
    for change in list(chosen[:-1]):
        fewer = [other for other in chosen if other is not change]
        changed = trial.plan_with(_joined(fewer))
        if changed is not None and changed.verdict == "fits":
            chosen, best = fewer, changed
    return [trial.suggestion(_joined(chosen), best)]


def _joined(parts: list[Change]) -> Change:
    """Return several changes as one; of two settings of one key, the later stands."""
    settings = {key: value for part in parts for key, value in part.settings}
    return Change("; ".join(dict.fromkeys(part.cost for part in parts)), tuple(settings.items()))
