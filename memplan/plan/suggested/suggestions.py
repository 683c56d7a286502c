"""What to change when a job does not fit: cheap changes first, each with what it saves and costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import TrainingConfig
from memplan.documents.frozen_values import dataclass
from memplan.errors import MemplanError
from memplan.plan.memory_plan import SEARCHED, MemoryPlan, Suggestion, Verdict
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import simulated
from memplan.plan.suggested.config_changes import Change, changes, last_resorts, of_every_layer
from memplan.step.kernels.card_support import emulated_dtype
from memplan.training.own_settings import is_settable, own_settings
from memplan.training.resolution.resolve_config import resolve
from memplan.training.rules.half_precision import fp16_settings

LEAST_SHARE = 200
"""Changes that save less than one part in this many of the device bytes are not worth a line."""
MOST = 6
"""Suggestions that are shown, at most."""
MOST_SIMULATED = 8
"""Suggestions that are simulated, at most, of which some turn out to be more or less than enough."""


def with_suggestions(plan: MemoryPlan, catalog: Catalog) -> MemoryPlan:
    """Return a plan that carries its suggestions; one that is sure to fit has none.

    Changes are sought with shares; those that are shown are simulated where they can be, but for a search's plan.
    """
    if plan.verdict == "fits":
        return plan
    result = suggestions(plan, catalog)
    if plan.exceeds_host:  # what saves the device's memory alone is no start
        result = tuple([item for item in result if item.flips_verdict])
    return replace(plan, suggestions=result)


def suggestions(plan: MemoryPlan, catalog: Catalog) -> tuple[Suggestion, ...]:
    """Return changes to a plan that is not sure to fit, those that flip the verdict first.

    They keep what is trained: adapters where adapters were, weights as wide, all weights where all were. Only where
    nothing else makes the job fit is that changed, and said. When no single change does, or only one that takes host
    memory, the cheapest combination that does without is put first, if there is one. On a card that only emulates bf16 all of them are in fp16.
    """
    at = replace(plan.setup.config, micro_batch_size=plan.micro_batch_size, sequence_length=plan.sequence_length)
    trial = Trial(plan.by_share or plan, catalog, at)
    fp16 = _in_fp16(trial)
    config = trial.config if fp16 is None else fp16.apply(trial.config)
    results = _tried(trial, fp16, changes(config, plan.setup))
    if not any(item.flips_verdict for item in results):
        resorts = _tried(trial, fp16, last_resorts(config), (*changes(config, plan.setup),))
        results = [*(item for item in resorts if item.flips_verdict), *results]
    if plan.reserve_by_share == SEARCHED:
        return tuple(_one_of_each_kind(results)[:MOST])
    shown = _simulated(trial, _at_the_edge(results)[:MOST_SIMULATED], plan)
    return tuple(_one_of_each_kind(shown)[:MOST])


def _simulated(trial: Trial, results: Sequence[Suggestion], final: MemoryPlan) -> tuple[Suggestion, ...]:
    """Return what was found with shares, each simulated as the plan that is shown is; those that flip its verdict first, none of which has another in it."""
    shown = []
    for item in results:
        plan = simulated(trial.tried[item.change], least=False)
        saves, flips = final.device_bytes - plan.device_bytes, plan.verdict == "fits"
        needed = plan.needed_bytes
        if plan.verdict != "no" and plan.upper_bytes > plan.usable_bytes:
            needed = simulated(trial.tried[item.change]).needed_bytes
        taken = plan.device_bytes
        shown.append(replace(item, saves_bytes=saves, flips_verdict=flips, device_bytes=taken, needed_bytes=needed))
    enough = [set(item.change.split(" ")) for item in shown if item.flips_verdict]
    needed_ones = (item for item in shown if not any(one < set(item.change.split(" ")) for one in enough))
    return tuple(
        sorted((item for item in needed_ones if item.saves_bytes > 0), key=lambda item: not item.flips_verdict)
    )


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
    return [*(result for change, _ in changed for result in _combination(trial, [change, *able])[:1]), *results]


def _kind(item: Suggestion) -> tuple[str, ...]:
    """Return the keys that a suggestion sets."""
    return tuple(setting.partition("=")[0] for setting in item.change.split(" "))


def _one_of_each_kind(results: Sequence[Suggestion]) -> list[Suggestion]:
    """Return of suggestions of the same keys the first that flips the verdict, that which saves most where none does."""
    chosen: dict[tuple[str, ...], Suggestion] = {}
    for item in results:
        other = chosen.setdefault(_kind(item), item)
        if not other.flips_verdict and (item.flips_verdict or item.saves_bytes > other.saves_bytes):
            chosen[_kind(item)] = item
    return list(chosen.values())


def _at_the_edge(results: Sequence[Suggestion]) -> list[Suggestion]:
    """Return of suggestions of the same keys the first that flips the verdict and the last that does not: with shares
    as reserves, that may fit, too.
    """
    short = {_kind(item): item for item in results if not item.flips_verdict}
    return [one for item in _one_of_each_kind(results) for one in dict.fromkeys((short.get(_kind(item), item), item))]


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan, and its config to try changes on."""

    plan: MemoryPlan
    catalog: Catalog
    config: TrainingConfig
    tried: dict[str, MemoryPlan] = field(default_factory=dict)

    def plan_with(self, change: Change) -> MemoryPlan | None:
        """Return the plan with a change made, or None where the config does not allow it."""
        own, config = self.plan.setup, self.config
        rows = {key: getattr(config, key) for key in ("micro_batch_size", "sequence_length", "method")}
        given = replace(own.given or config, **rows)  # a stack fills it in anew
        try:
            setup = resolve(change.apply(given), self.catalog, own.name, beside=own.beside)
            setup = replace(setup, untied_ends=own.untied_ends)  # of the model, which is built already
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
        sizes = changed.device_bytes, changed.needed_bytes
        return Suggestion(change.name, saves, changed.verdict == "fits", change.cost, *sizes, own)


def _combination(trial: Trial, options: Sequence[Change]) -> list[Suggestion]:
    """Return the cheapest combination that makes the job fit, or none.

    Where a change goes with those before it in no combination, one is also sought without what it does not go with.
    """
    result, refused = _grown(trial, options)
    for change in refused if result is None else ():
        friends = [c for c in options if c is change or trial.plan_with(_joined([c, change])) is not None]
        result, _ = _grown(trial, friends)
        if result is not None:
            break
    return [] if result is None else [trial.suggestion(*result)]


def _grown(trial: Trial, options: Sequence[Change]) -> tuple[tuple[Change, MemoryPlan] | None, list[Change]]:
    """Return a combination that fits, grown from the cheap end, the dearest that it can do without left out; and the
    changes that none took.
    """
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
    for change in chosen[-2::-1]:
        fewer = [other for other in chosen if other is not change]
        changed = trial.plan_with(_joined(fewer))
        if changed is not None and changed.verdict == "fits":
            chosen, best = fewer, changed
    return (_joined(chosen), best), refused


def _joined(parts: list[Change]) -> Change:
    """Return several changes as one; of two settings of one key, the later stands."""
    settings = {key: value for part in parts for key, value in part.settings}
    return Change("; ".join(dict.fromkeys(part.cost for part in parts)), tuple(settings.items()))


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change, planned with a share as its reserve, beside the plan planned likewise."""

    change: str  # What is changed, as settings that ``--set`` takes
    cost: str  # What it costs or gives besides memory
    verdict: Verdict  # Whether the job fits then
    device_bytes: int  # What the device needs then
    adds_bytes: int  # How much more that is; less, where it is below 0


def what_if(plan: MemoryPlan, catalog: Catalog) -> tuple[WhatIf, ...]:
    """Return what changes of a plan would do, those first that add; one that changes nothing, or cannot be, is left out."""
    base = plan.by_share or plan
    config = replace(base.setup.config, micro_batch_size=base.micro_batch_size, sequence_length=base.sequence_length)
    trial = Trial(base, catalog, config)
    rows: dict[str, WhatIf] = {}
    for change in (*_larger(config), *changes(config, base.setup), *last_resorts(config)):
        changed = trial.plan_with(change) if is_settable(base.setup.stack, change.settings) else None
        if changed is not None and changed.device_bytes != base.device_bytes:
            adds = changed.device_bytes - base.device_bytes
            rows.setdefault(change.name, WhatIf(change.name, change.cost, changed.verdict, changed.device_bytes, adds))
    return tuple(rows.values())


def _larger(config: TrainingConfig) -> Iterator[Change]:
    """Yield what people want more of: tokens in a step, context, and layers that are not computed twice."""
    batch, length = config.micro_batch_size, config.sequence_length
    yield Change("twice the sequences in a step", (("micro_batch_size", 2 * batch),))
    yield Change("four times the sequences in a step", (("micro_batch_size", 4 * batch),))
    yield Change("twice the context", (("sequence_length", 2 * length),))
    if config.activation_checkpointing != "none":
        settings = (("activation_checkpointing", "none"), *of_every_layer(config))
        yield Change("no layer is computed twice: about a quarter less compute", settings)
