"""Coded weights in training: decoded, updated and coded again by the bundled library, formula against trace."""

from dataclasses import replace

import pytest
import torch

from memplan.catalog.training_config import Gradients
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.trace.jobs.bundled_optimizer import BundledUpdate
from memplan.trace.jobs.reference_job import Session
from memplan.trace.tracer import trace_training
from memplan.training.resolution.resolve_config import resolve
from memplan.training.resolved import FLOAT_BYTES
from tests.survey.agreement import cut_model
from tests.survey.drawn_jobs import Job, verdict

CODED = ("tier1", "tier2", "tier3", "q4-adam", "q4-muon-int8", "iq3-muon-int4", "iq2-fp8-muon-int4")
FAST = ("tier1", "tier3", "q4-adam")


def cases():
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CODED]


def setup_of(name, catalog, **keys):
    return resolve(replace(catalog.configs[name], **keys), catalog, name)


@pytest.mark.parametrize("config", cases())
def test_the_peak_and_the_step_of_a_coded_config_are_what_the_formula_says(config, catalog):
    model, setup = cut_model("llama-3.2-1b", catalog), setup_of(config, catalog, sequence_length=512)
    plan = CompiledPlan(model, setup).evaluate(Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb"))
    trace = trace_training(model, setup)
    assert trace.notes == ()
    assert plan.requested_bytes == trace.peak_bytes
    assert dict(plan.instants)["optimizer step"] == trace.instant_bytes["optimizer step"]


def test_a_float_weight_beside_codes_whose_gradients_are_fp32_has_a_store_as_they_have(catalog):
    """Further gradients are added to a store in two chunks of fp32, which are more than a short sequence's logits."""
    keys = {"compute_dtype": "fp32", "optimizer": {"default": "adamw-fp32"}, "sequence_length": 1}
    keys |= {"weights": {"default": "fp32", "hidden_matrix": "q6-b64"}, "gradients": Gradients(dtype="fp32")}
    setup = setup_of("tier1", catalog, **keys, activation_checkpointing="none", gradient_accumulation_steps=2)
    model = cut_model("pythia-1b", catalog)
    plan = CompiledPlan(model, setup).evaluate(Device(catalog.gpus["h100-sxm-80gb"], "h100-sxm-80gb"))
    assert dict(plan.instants).items() >= trace_training(model, setup).instant_bytes.items()


@pytest.mark.parametrize(("family", "rows", "length"), [("llama", 300, 1), ("llama", 300, 700), ("gpt2", 4096, 17)])
def test_of_a_coded_table_the_rows_that_are_looked_up_are_decoded(family, rows, length, catalog):
    """Some at a time: fewer of a short sequence than of a whole table, and more of a long one than a small table has."""
    shape = {
        "hidden_size": 768,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1024,
    }
    if family == "gpt2":
        shape = {"n_embd": 512, "n_head": 8, "n_layer": 1, "n_positions": 64}
    keys = {
        "weights": {"default": "bf16", "embedding": "iq2-s"},
        "optimizer": {"default": "muon-bf16"},
        "description": "",
    }
    model = {"model_type": family, "vocab_size": rows, **shape}
    drawn = verdict(Job(model, {**keys, "sequence_length": length, "evaluation": True}), catalog)
    assert (drawn.outcome, drawn.reason, drawn.peak_share, dict(drawn.differences)) == ("agrees", "", 0.0, {})
    assert abs(drawn.reserve_share) < 0.015  # one of 84 segments


def test_the_bundled_optimizer_steps_every_weight_of_a_tier(catalog):
    setup = setup_of("tier1", catalog)
    session = Session(cut_model("llama-3.2-1b", catalog).spec, setup)
    assert all(isinstance(update, BundledUpdate) for _, update in session.updates)
    assert [setup.optimizers[items[0].role].algorithm for items, _ in session.updates] == ["muon", "adamw"]


def test_codes_change_in_a_real_step_and_stay_as_large(make_model, catalog):
    setup = setup_of("tier1", catalog, micro_batch_size=1, sequence_length=16)
    torch.manual_seed(0)
    session = Session(make_model("tiny").spec, setup, device="cpu", target="cpu")

    class Nobody:
        def __getattr__(self, name):
            return lambda *_, **__: None

    coded = [item for item in session.trained if item.weight is not None]
    before = [item.tensor.clone() for item in coded]
    session.watch(Nobody())
    session.step(Nobody())
    assert coded
    assert all(setup.format_names[item.role] not in FLOAT_BYTES for item in coded)
    changed = [not torch.equal(old, item.tensor) for old, item in zip(before, coded, strict=True)]
    assert sum(changed) >= len(coded) // 2
    assert all(old.nbytes == item.tensor.nbytes for old, item in zip(before, coded, strict=True))
