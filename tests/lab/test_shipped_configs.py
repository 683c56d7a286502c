"""Every shipped config traces on every family, and the formula says what the trace says.

The trace is of memplan's own loop, and so is the formula: what a config says of its stack is left out.

The default run takes a sample in which each config and each family comes four times. All pairs, and
all at the full width of released models::

    pytest -m "slow or not slow" tests/lab/test_shipped_configs.py
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from memplan.model.families import with_towers
from memplan.model.model import Model
from memplan.model.spec import LayerRun, MixtureOfExperts
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import few_experts, shipped_catalog, shrunk_layer
from tests.survey.agreement import cut_model
from tests.survey.drawn_models import NOT_BUNDLED

pytestmark = pytest.mark.thorough

CATALOG = shipped_catalog()
CONFIGS = list(CATALOG.configs.entries)
LAYERS, TOKENS = 2, 64
FAMILIES = sorted({entry.architecture for entry in CATALOG.models.entries.values()} - {*NOT_BUNDLED, *with_towers()})
"""Those that memplan's own models run, and that are released alone."""

TOLERANCE = 0.001
"""Of the requested peak: scores of sinks under adapters, and lengths that do not divide."""

SAMPLED = 2
"""Configs that the default run takes for each family."""


@cache
def smallest(family: str) -> str:
    """Return the name of the smallest model of a family."""
    sizes = {n: e.expected_parameters for n, e in CATALOG.models.entries.items() if e.architecture == family}
    return min(sizes, key=lambda name: sizes[name])


def two_layers(family: str, *, wide: bool) -> Model:
    """The smallest model of a family with two layers, one of each kind where there are several."""
    spec = cut_model(smallest(family), CATALOG).spec
    kinds = spec.runs[:LAYERS]
    count = LAYERS // len(kinds)
    layers = [with_eight_experts(run.layer) if wide else shrunk_layer(run.layer) for run in kinds]
    runs = tuple(LayerRun(layer, count, index * count) for index, layer in enumerate(layers))
    narrow = {} if wide else {"vocab_size": 16000, "hidden_size": 256}
    return Model.from_spec(replace(spec, runs=runs, **narrow), "test")


def with_eight_experts(layer):
    part = layer.feed_forward
    if not isinstance(part, MixtureOfExperts):
        return layer
    return replace(layer, feed_forward=replace(part, **few_experts(part)))


@cache
def narrow_model(family: str) -> Model:
    return two_layers(family, wide=False)


@cache
def wide_model(family: str) -> Model:
    return two_layers(family, wide=True)


def check(model: Model, name: str) -> None:
    config = replace(CATALOG.configs[name], micro_batch_size=1, sequence_length=TOKENS, stack="bundled")
    setup = resolve(config, CATALOG, name)
    trace = trace_training(model, setup)
    plan = CompiledPlan(model, setup).evaluate(Device(CATALOG.gpus["h100-sxm-80gb"], "h100"))
    assert abs(plan.requested_bytes - trace.peak_bytes) <= TOLERANCE * trace.peak_bytes
    assert plan.persistent_bytes == trace.persistent_bytes


def pairs() -> Iterator[pytest.param]:
    """Yield every family with every config; what is left out of the default run is slow.

    Each family has the configs that follow the ones of the family before, so that each config comes as often too.
    """
    for (row, family), (column, name) in product(enumerate(FAMILIES), enumerate(CONFIGS)):
        marks = [] if (column - row) % len(CONFIGS) < SAMPLED else [pytest.mark.slow]
        yield pytest.param(family, name, marks=marks, id=f"{family}-{name}")


@pytest.mark.parametrize(("family", "name"), list(pairs()))
def test_every_config_traces_on_every_family(family, name):
    check(narrow_model(family), name)


def test_the_sample_has_every_family_and_every_config_as_often_as_it_says():
    sample = [pair.values for pair in pairs() if not pair.marks]
    for place, names in enumerate((FAMILIES, CONFIGS)):
        counts = Counter(pair[place] for pair in sample)
        assert all(counts[name] >= SAMPLED for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_config_traces_on_every_family_at_its_full_width(family, name):
    check(wide_model(family), name)
