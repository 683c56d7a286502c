"""Every optimizer of the catalog, drawn with everything that decides its states and its update: formula against trace.

The default run takes a few jobs of each optimizer. Ten times as many, and others with another seed::

    MEMPLAN_SURVEY_SEED=1 pytest -m slow tests/lab/test_optimizers.py
"""

import os
import random
from dataclasses import replace
from typing import get_args

import pytest

from memplan.catalog.entries import Form, StateSlot
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter, Gradients, Offload, TrainingConfig
from memplan.catalog.update_classes import STACKED, UPDATE_CLASSES
from memplan.errors import CannotAnswerError, MemplanError
from memplan.model.families import model_spec
from memplan.model.model import Model
from memplan.muon.weights.weight_codecs import WEIGHT_FORMATS
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.step.states.update_algorithms import RULES
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

pytestmark = pytest.mark.thorough

ENTRIES = shipped_catalog().optimizers.entries
OPTIMIZERS = tuple(
    name for name, entry in ENTRIES.items() if entry.implementation != STACKED
)  # which nanochat alone runs
DRAWN_FOR_EACH = 3
SEED = int(os.environ.get("MEMPLAN_SURVEY_SEED", "0"))

ODD = {"hidden_size": 97, "intermediate_size": 151, "vocab_size": 499}
BLOCKS = {"hidden_size": 288, "intermediate_size": 512, "vocab_size": 1031}
LARGE = {"hidden_size": 1280, "intermediate_size": 2600, "vocab_size": 3001}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 72}
SHAPES = {
    "odd, tied": ("llama-3.2-1b", ODD),
    "odd, with biases": ("qwen2.5-0.5b", {**ODD, "tie_word_embeddings": False}),
    "odd, with experts": ("qwen3-30b-a3b", {**ODD, **EXPERTS, "hidden_size": 104}),
    "blocks": ("llama-3.1-8b", BLOCKS),
    "blocks, with experts": ("qwen3-30b-a3b", {**BLOCKS, **EXPERTS}),
    "beyond a chunk": ("llama-3.2-1b", LARGE),
}

WEIGHTS = (
    ({"default": "bf16"}, "bf16"),
    ({"default": "fp32"}, "fp32"),
    ({"default": "fp32"}, "bf16"),
    ({"default": "fp16"}, "fp16"),
    ({"default": "bf16", "norm": "fp32"}, "bf16"),
    ({"hidden_matrix": "q4-0", "default": "bf16"}, "bf16"),
    ({"hidden_matrix": "q8-0", "default": "q8-0", "norm": "fp32"}, "bf16"),
    ({"hidden_matrix": "iq2-xxs", "default": "bf16"}, "fp32"),
)


CODED = {"weights": {"hidden_matrix": "q8-0", "default": "bf16"}}


def shaped(name, catalog):
    of, keys = SHAPES[name]
    entry = catalog.models[of]
    return Model.from_spec(
        model_spec({**entry.config, **HEADS, **keys, "model_type": entry.architecture}, name, "test"), "test"
    )


def drawn(rng, optimizer):
    """Return a shape and a config, drawn by ``rng``; what nothing updates is refused."""
    name = rng.choice(tuple(SHAPES))
    weights, compute = rng.choice([item for item in WEIGHTS if item[1] == "bf16" or "experts" not in name])
    gradient = rng.choice((None, None, None, "fp32", "bf16", "fp8-e4m3"))
    lifetime = rng.choice(("step", "step", "step", "layer"))
    return name, TrainingConfig(
        "drawn at random",
        weights=weights,
        compute_dtype=compute,
        master_weights=rng.choice(("none", "none", "fp32", "bf16")),
        gradients=Gradients(dtype=gradient, lifetime=lifetime),
        gradient_accumulation_steps=rng.choice((1, 1, 2)) if lifetime == "step" else 1,
        optimizer={"default": optimizer},
        offload=Offload(optimizer_states=rng.choice(("none", "none", "none", "cpu"))),
        adapter=Adapter(rank=3) if rng.randrange(8) == 0 else None,
        kernels=Kernels(
            optimizer=rng.choice(("foreach", "fused", "for-loop")), newton_schulz=rng.choice(("min", "fast", "torch"))
        ),
        sequence_length=16,
    )


def differences(plan, catalog):
    """Return (formula, trace) of what differs in states, host memory and the update."""
    found = plan.evaluate(Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb"))
    trace = trace_training(plan.model, plan.setup)
    told = dict(found.instants)
    pairs = {
        "persistent": (found.persistent_bytes, trace.persistent_bytes),
        "host": (found.host_bytes, trace.host_bytes),
        **{name: (told[name], size) for name, size in trace.instant_bytes.items() if name == "optimizer step"},
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def survey(optimizer, seed, count, catalog):
    """Compare ``count`` jobs of an optimizer that are not refused."""
    rng = random.Random(f"{optimizer} {seed}")
    compared = 0
    for _ in range(30 * count):
        name, config = drawn(rng, optimizer)
        try:
            plan = CompiledPlan(shaped(name, catalog), resolve(config, catalog, "drawn"))
        except MemplanError:
            continue
        assert differences(plan, catalog) == {}, (name, config)
        compared += 1
        if compared == count:
            return
    raise AssertionError(f"{optimizer}: {compared} of {count} drawn jobs were planned")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.one_in(4)
def test_states_and_update_of_every_optimizer_are_traced_to_the_byte(optimizer, catalog):
    survey(optimizer, 0, DRAWN_FOR_EACH, catalog)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_and_update_are_traced_to_the_byte_wherever_one_looks(optimizer, catalog):
    survey(optimizer, SEED, 10 * DRAWN_FOR_EACH, catalog)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("lion does not take weights in q8-0", {**CODED, "optimizer": {"default": "lion"}}),
        ("sgd-momentum does not take weights in q8-0", {**CODED, "optimizer": {"default": "sgd-momentum"}}),
        ("beside coded weights", {**CODED, "master_weights": "fp32"}),
        (
            "lion does not take gradients in fp32",
            {"gradients": Gradients(dtype="fp32"), "optimizer": {"default": "lion"}},
        ),
        ("fp16 are not supported", {"gradients": Gradients(dtype="fp16")}),
        ("torch.optim.Muon", {"optimizer": {"default": "muon-int8"}, "kernels": Kernels(newton_schulz="torch")}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_formula_and_trace_refuse_what_nothing_updates_in_the_same_words(words, keys, catalog):
    model = shaped("blocks", catalog)
    setup = resolve(TrainingConfig("refused", **keys, sequence_length=16), catalog, "refused")
    with pytest.raises(CannotAnswerError, match=words) as planned:
        CompiledPlan(model, setup)
    with pytest.raises(CannotAnswerError) as traced:
        trace_training(model, setup)
    assert str(planned.value) == str(traced.value)


def test_every_form_has_a_rule_and_every_codec_an_entry(catalog):
    assert set(get_args(Form)) == set(RULES) | {"chunks", "copies", "stacked"}
    assert {known.form for known in UPDATE_CLASSES.values()} == set(RULES) - {"untraced"} | {"chunks", "stacked"}
    assert {entry.codec for entry in catalog.formats.entries.values() if entry.codec} == set(WEIGHT_FORMATS)


@pytest.mark.parametrize("format_name", ["iq1-s", "nf4", "q4-k"])
def test_a_format_without_a_codec_cannot_be_trained(format_name, catalog):
    config = TrainingConfig("refused", weights={"hidden_matrix": format_name, "default": "bf16"})
    with pytest.raises(CannotAnswerError, match=f"weights.hidden_matrix: weights in {format_name} cannot be trained"):
        resolve(config, catalog, "refused")


@pytest.mark.parametrize("format_name", ["iq1-s", "nf4", "q4-k"])
def test_a_format_without_a_codec_can_be_frozen_beside_adapters(format_name, catalog):
    keys = {"weights": {"hidden_matrix": format_name, "default": "bf16"}, "adapter": Adapter(rank=4)}
    setup = resolve(TrainingConfig("frozen", **keys, sequence_length=16), catalog, "frozen")
    assert differences(CompiledPlan(shaped("blocks", catalog), setup), catalog) == {}


def changed(catalog, name, **keys):
    """Return a setup whose optimizer has another entry."""
    setup = resolve(TrainingConfig("changed", optimizer={"default": name}, sequence_length=16), catalog, "changed")
    entries = {role: replace(entry, **keys) for role, entry in setup.optimizers.items()}
    return replace(setup, optimizers=entries)


def test_an_optimizer_of_a_class_that_is_none_is_refused(catalog):
    with pytest.raises(CannotAnswerError, match=r"no class is called 'lion'; did you mean 'lion_pytorch\.Lion'"):
        CompiledPlan(shaped("blocks", catalog), changed(catalog, "lion", implementation="lion"))


def test_an_optimizer_with_slots_that_its_implementation_does_not_keep_is_refused(catalog):
    slots = tuple(StateSlot(name, as_parameter=True) for name in ("exp_avg", "second", "third"))
    with pytest.raises(CannotAnswerError, match=r"keeps second, third, which lion_pytorch\.Lion does not"):
        CompiledPlan(shaped("blocks", catalog), changed(catalog, "lion", slots=slots))


def test_an_untraced_optimizer_is_named_in_the_answer(catalog):
    model = shaped("blocks", catalog)
    setup = resolve(TrainingConfig("t", optimizer={"default": "adamw-4bit"}, sequence_length=16), catalog, "t")
    plan = CompiledPlan(model, setup).evaluate(Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb"))
    assert any("adamw-4bit-torchao" in line for line in plan.not_modelled)
    assert any("adamw-4bit-torchao" in note for note in trace_training(model, setup).notes)
