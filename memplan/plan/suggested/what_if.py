"""A plan beside others that differ from it in one thing: what each change would do to the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memplan.catalog.catalog import Catalog
from memplan.catalog.training_config import TrainingConfig
from memplan.plan.memory_plan import MemoryPlan, Verdict
from memplan.plan.suggested.config_changes import Change, changes, last_resorts, of_every_layer
from memplan.plan.suggested.suggestions import Trial
from memplan.training.own_settings import is_settable


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
        yield Change("nothing is computed twice: about a quarter less compute", settings)
