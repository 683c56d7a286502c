"""What a search may choose from and how long it says that a step takes, for settings drawn at random: each as a digest.

That a search finds the best of it is held by trying everything, elsewhere. ``pytest tests/solver/test_drawn_searches.py --update-golden``
rewrites the digests.
"""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from memplan.documents.escaping import json_text
from memplan.errors import MemplanError
from memplan.library.lookup import Overrides, catalog_model, find_setup
from memplan.plan.planner import CompiledPlan
from memplan.solver.layouts.degrees import LayoutSpace, layouts
from memplan.solver.layouts.layout_search import layout_name
from memplan.solver.layouts.step_time import StepClock, saved_share
from memplan.solver.search.axes import AXES, full_space, with_fixed_axes
from memplan.solver.search.cluster import cluster_of
from memplan.solver.search.space import as_meant, without_bf16
from memplan.solver.search.suggested_settings import under_layout
from memplan.solver.search.timing import micro_batch_picoseconds, rates_of, update_picoseconds, update_work, work_of
from memplan.step.collectives.gathered_units import sent_by_group
from tests.golden.test_drawn_settings import DRAWN
from tests.golden.test_recorded_jobs import digest

FILE = Path(__file__).with_name("drawn_searches.json")
PLANNED = [one for one in DRAWN if not one["answer"].startswith("refused")]
CARDS = ("rtx4090", "h100-sxm-80gb", "gh200-96gb", "mi300x")
PARTS = 4


def times(plan, catalog, card):
    """Return what a micro-batch, an update and a step of several GPUs are said to take."""
    setup, states, gpu = plan.setup, plan.states, catalog.gpus[card]
    rates = rates_of(card, gpu, catalog.tables.links)
    work = update_work(setup, states)
    micro = [
        micro_batch_picoseconds(
            replace(work_of(plan.own, setup, states), sent_bytes=sent),
            rates,
            batch,
            300,
            checkpointing=setup.checkpointing,
            loss=setup.profile.loss,
            accumulates=batch > 2,
        )
        for sent, batch in ((0, 2), (10**9, 3))
    ]
    found = [micro, update_picoseconds(10**9, 10**8, work, rates), work]
    found.append(sent_by_group(setup, plan.own.inventory, states.gradient_bytes))
    found += [saved_share(plan.own.spec, 4, sequence=sequence) for sequence in (False, True)]
    cluster = cluster_of(gpu, catalog.tables.networks, per_node=2)
    with suppress(MemplanError):  # without a link
        found.append(StepClock(plan, cluster, rates).step(2, 300, 3))
    return found


def choices(config, catalog, number):
    """Return what is left open, all of it and with some axes fixed, and how GPUs may share it."""
    whole = full_space(config, catalog, (1, 2, 8), step_batch=number % 12)
    shared = replace(config.parallel, data=4, zero_stage=3 * (number % 2))
    fixed = [*AXES, "kernels"][number % (len(AXES) + 1)]
    spaces = [whole, as_meant(whole), without_bf16(whole), under_layout(whole, shared)]
    with suppress(MemplanError):
        spaces.append(with_fixed_axes(whole, [fixed], catalog))
    found = [(space.base, space.size, space.axes) for space in spaces]
    found += [repr(one) for one in islice(spaces[-1].states(catalog), number % 7, None, 41)]
    space = LayoutSpace(8, 4, experts=number % 3 * 8, own_precision=number % 2 == 0)
    with suppress(MemplanError):
        alone = replace(config, parallel=replace(config.parallel, data=1, zero_stage=0, tensor=1))
        found += [layout_name(one) for one in layouts(alone, catalog.stack(config.stack), space)]
    return found


def answers_to(drawn, number, catalog):
    """Return the digests of a job's times and choices, which its number varies; nothing where it cannot be planned."""
    overrides = Overrides(
        settings=tuple(drawn["set"]), gpus=drawn["gpus"], counted=drawn["gpus"] > 1, stack=drawn["stack"]
    )
    model = catalog_model(drawn["model"], catalog)
    setup = find_setup(drawn["config"], overrides, catalog, model)
    try:
        plan = CompiledPlan(model, setup)
    except MemplanError:
        return []
    card = CARDS[number % len(CARDS)]
    return [digest(repr(times(plan, catalog, card))), digest(repr(choices(setup.config, catalog, number)))]


@pytest.mark.parametrize("part", range(PARTS))
def test_choices_and_times_are_what_they_were(part, catalog, request):
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for drawn in PLANNED[part::PARTS]:
        key = digest({name: value for name, value in drawn.items() if name != "answer"})
        found = answers_to(drawn, int(key, 16), catalog)
        if request.config.getoption("--update-golden"):
            known[key] = found
        assert found == known.get(key), drawn
    if request.config.getoption("--update-golden"):
        FILE.write_text(json_text(known, indent=0), encoding="utf-8")
