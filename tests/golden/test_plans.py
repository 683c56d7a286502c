"""Every figure of many plans, to the byte: a change of the formula that moves any of them is seen here, and reviewed.

The jobs are those of a survey (tests/survey, tests/survey/stacks) that between them run the formula's branches;
that the figures are right is held by traces and records elsewhere. ``pytest tests/golden --update-golden`` rewrites them.
"""

import json
from dataclasses import astuple, replace
from hashlib import sha256
from pathlib import Path

import pytest

from memplan.catalog.training_config import TrainingConfig
from memplan.documents.loading import Document
from memplan.documents.schemas import validate
from memplan.model.families import model_spec
from memplan.model.model import Model
from memplan.model.readers.given_shapes import model_from_flags
from memplan.plan.memory_plan import Device, MemoryPlan
from memplan.plan.planner import CompiledPlan
from memplan.plan.reserve.simulation import events_of, shares_reason, simulated
from memplan.plan.reserve.step_timeline import step_timeline
from memplan.training.resolution.resolve_config import resolve

FILE = Path(__file__).with_name("plans.json")
PLANS = json.loads(FILE.read_text(encoding="utf-8"))
GPU = "h100-sxm-80gb"
SIMULATED_EVERY = 4
"""Of so many plans one is played through the simulated allocator too, and drawn as a timeline, which takes as long as ten plans."""
TOTALS = ("requested", "allocated", "reserved", "device", "upper", "least", "lower", "persistent", "host", "rounding")


def planned(job: dict[str, object], catalog) -> MemoryPlan:
    """Return the plan of a job of a survey."""
    config = validate(TrainingConfig, Document("job", job["training"], {}))
    setup = resolve(config, catalog, "job")
    checkpointing = replace(setup.stack.checkpointing, reentrant=job["reentrant"])
    setup = replace(setup, stack=replace(setup.stack, checkpointing=checkpointing))
    card = replace(catalog.gpus[job.get("gpu", GPU)], compute_capability=job["card"])
    if "window_pattern" in job["model"]:
        model = model_from_flags(job["model"], "drawn", "job")
    else:
        model = Model.from_spec(model_spec(job["model"], "drawn", "job"), "job")
    return CompiledPlan(model, setup).evaluate(Device(card, GPU))


def totals(plan: MemoryPlan) -> dict[str, object]:
    """Return the sums of a plan."""
    return {name: getattr(plan, f"{name}_bytes") for name in TOTALS}


def figures(plan: MemoryPlan, *, played: bool, told: bool = True) -> dict[str, object]:
    """Return what a plan says in numbers, and a digest of its run's events where these are told."""
    found = totals(plan)
    found |= {"instants": dict(plan.instants), "components": {line.name: line.bytes for line in plan.components}}
    if played:
        tight = replace(plan, usable_bytes=plan.device_bytes)
        timeline = sha256(repr(astuple(step_timeline(plan))).encode()).hexdigest()[:16]
        found |= {"played": totals(simulated(plan)), "verdict": simulated(tight).verdict, "timeline": timeline}
    if told and not shares_reason(plan):
        events = events_of(plan, steps=1)
        found["events"] = sha256(f"{list(events.sizes)} {list(events.codes)}".encode()).hexdigest()[:16]
    return found


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_a_plan_has_the_figures_that_were_reviewed(number, catalog, request):
    plan = PLANS[number]
    found = figures(planned(plan["job"], catalog), played=not number % SIMULATED_EVERY)
    if request.config.getoption("--update-golden"):
        plan["figures"] = found
        FILE.write_text("\n".join(["[", ",\n".join(json.dumps(one) for one in PLANS), "]", ""]), encoding="utf-8")
    assert found == plan["figures"]
