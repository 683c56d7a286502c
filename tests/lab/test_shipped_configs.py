"""Every shipped config traces on every family, and the formula says what the trace says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch")

from memplan.architectures import families  # noqa: E402
from memplan.lab.agreement import cut_model  # noqa: E402
from memplan.lab.tracer import trace_training  # noqa: E402
from memplan.model.model import Model  # noqa: E402
from memplan.model.spec import LayerRun, MixtureOfExperts  # noqa: E402
from memplan.planner import CompiledPlan, Device  # noqa: E402
from memplan.setup import resolve  # noqa: E402

from .conftest import few_experts, shipped_catalog, shrunk_layer  # noqa: E402

CATALOG = shipped_catalog()
CONFIGS = list(CATALOG.configs.entries)
LAYERS, TOKENS = 2, 64

TOLERANCE = 0.001
"""Of the requested peak: scores of sinks under adapters, and lengths that do not divide."""

IQ3_EXPERTS = "the update of experts in IQ3_XXS takes more than the formula has: "

DISAGREEMENTS = {
    ("deepseek_v2", "tier3"): f"{IQ3_EXPERTS}-1.186 %",
    ("deepseek_v3", "tier3"): f"{IQ3_EXPERTS}-1.186 %",
    ("gpt_oss", "tier3"): f"{IQ3_EXPERTS}-1.179 %",
    ("mixtral", "tier3"): f"{IQ3_EXPERTS}-1.167 %",
    ("qwen2_moe", "tier3"): f"{IQ3_EXPERTS}-1.156 %",
    ("qwen3_moe", "tier3"): f"{IQ3_EXPERTS}-1.168 %",
}
"""What is known to disagree, with the difference of formula and trace; an entry that agrees fails its test."""

FP16_MUON = "the optimizer step of Muon on FP16 matrices takes more than the formula has: "
MIXTRAL_EXPERTS = "the update of stacked experts in codes, from FP8 gradients, takes more than the formula has: "

WIDE_DISAGREEMENTS = {
    ("deepseek_v2", "fp16-muon"): f"{FP16_MUON}-1.401 %",
    ("deepseek_v3", "fp16-muon"): f"{FP16_MUON}-1.229 %",
    ("gpt_neox", "fp16-muon"): f"{FP16_MUON}-0.448 %",
    ("gpt_oss", "fp16-muon"): f"{FP16_MUON}-1.491 %",
    ("mistral", "fp16-muon"): f"{FP16_MUON}-1.728 %",
    ("mixtral", "fp16-muon"): f"{FP16_MUON}-6.643 %",
    ("mixtral", "iq2-fp8-muon-int4"): f"{MIXTRAL_EXPERTS}-1.857 %",
    ("mixtral", "q4-fp8-muon-int8"): f"{MIXTRAL_EXPERTS}-1.443 %",
    ("mixtral", "q8-fp8-muon-int8"): f"{MIXTRAL_EXPERTS}-1.268 %",
    ("mixtral", "tier2"): f"{MIXTRAL_EXPERTS}-1.675 %",
    ("mixtral", "tier3"): f"{MIXTRAL_EXPERTS}-1.797 %",
    ("olmo2", "fp16-muon"): f"{FP16_MUON}-0.681 %",
    ("phi", "fp16-muon"): f"{FP16_MUON}-0.996 %",
    ("phi3", "fp16-muon"): f"{FP16_MUON}-2.340 %",
    ("qwen2_moe", "fp16-muon"): f"{FP16_MUON}-0.971 %",
    ("qwen3_moe", "fp16-muon"): f"{FP16_MUON}-0.547 %",
    ("stablelm", "fp16-muon"): f"{FP16_MUON}-0.398 %",
}
"""The same at the full width of released models."""


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
    config = replace(CATALOG.configs[name], micro_batch_size=1, sequence_length=TOKENS)
    setup = resolve(config, CATALOG, name)
    trace = trace_training(model, setup)
    plan = CompiledPlan(model, setup).evaluate(Device(CATALOG.gpus["h100-sxm-80gb"], "h100"))
    assert abs(plan.requested_bytes - trace.peak_bytes) <= TOLERANCE * trace.peak_bytes
    assert plan.persistent_bytes == trace.persistent_bytes


def cases(disagreements):
    for family in families():
        for name in CONFIGS:
            reason = disagreements.get((family, name))
            marks = [pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError)] if reason else []
            yield pytest.param(family, name, marks=marks, id=f"{family}-{name}")


def test_every_pair_that_disagrees_is_a_pair():
    pairs = {(family, name) for family in families() for name in CONFIGS}
    assert (DISAGREEMENTS | WIDE_DISAGREEMENTS).keys() <= pairs


@pytest.mark.parametrize(("family", "name"), list(cases(DISAGREEMENTS)))
def test_every_config_traces_on_every_family(family, name):
    check(narrow_model(family), name)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), list(cases(WIDE_DISAGREEMENTS)))
def test_every_config_traces_on_every_family_at_its_full_width(family, name):
    check(wide_model(family), name)
