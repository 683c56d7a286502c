"""nanochat's own model as it is compiled, and its optimizer: recorded traces, laws, refusals and (slow) its own code, where a checkout is there."""

import json
from pathlib import Path

import pytest

from memplan.catalog.training_config import TrainingConfig
from memplan.documents.loading import Document
from memplan.documents.schemas import validate
from memplan.errors import CannotAnswerError
from memplan.model.inventory import parameter_count
from memplan.model.readers.given_shapes import model_from_flags
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.training.resolution.resolve_config import resolve
from tests.jobs import shipped_catalog

CATALOG = shipped_catalog()
CARDS = {"9.0": "h100-sxm-80gb", "8.0": "a100-sxm-80gb", "7.0": "v100-sxm2-16gb"}

# Drawn by ``python -m tests.survey.stacks --stack nanochat --seed 1128 --jobs 12``, and traced with a checkout of nanochat on PYTHONPATH.
STEPS = json.loads(Path(__file__).with_name("nanochat_steps.json").read_text(encoding="utf-8"))["steps"]

# Requested peaks of nanochat's own code (92d63d4e, torch 2.13.0): layers, micro-batch, length, words, width of a head, heads,
# pattern of windows, micro-steps, GPUs, compute capability -> bytes.
PEAKS = {
    (1, 4, 1024, 32768, 64, 4, "L", 1, 1, "9.0"): 559_207_076,
    (2, 1, 200, 32768, 128, 1, "SL", 3, 8, "9.0"): 131_660_244,
    (2, 2, 512, 1000, 64, 3, "L", 2, 1, "9.0"): 41_847_736,
    (3, 1, 128, 4096, 128, 4, "L", 1, 1, "9.0"): 260_453_656,
}


def given(layers, batch, length, words, width, heads, pattern="L", steps=1, ranks=1, capability="9.0", **more):
    flags = {
        "hidden_size": width * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": width,
        "intermediate_size": 4 * width * heads,
        "vocab_size": words,
        "sequence_length": length,
        "window_pattern": pattern,
    }
    keys = {
        "description": "nanochat",
        "stack": "nanochat",
        "weights": {"default": "fp32", "embedding": "bf16", "head": "fp32"},
        "compute_dtype": "bf16",
        "optimizer": {"hidden_matrix": "nanochat-muon", "default": "nanochat-adamw"},
        "micro_batch_size": batch,
        "sequence_length": length,
        "gradient_accumulation_steps": steps,
        "compile": "model",
        "parallel": {"data": ranks, "zero_stage": int(ranks > 1)},
    }
    config = validate(TrainingConfig, Document("job", keys | more, {}))
    return model_from_flags(flags, "nanochat", "job"), resolve(config, CATALOG, "job"), CARDS[capability]


def planned(*job, **more):
    model, setup, card = given(*job, **more)
    return CompiledPlan(model, setup).evaluate(Device(CATALOG.gpus[card], card))


@pytest.mark.parametrize("job", PEAKS)
def test_peaks_are_those_of_its_own_code(job):
    assert planned(*job).requested_bytes == pytest.approx(PEAKS[job], rel=0.001)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step["instants"]["forward"]))
def test_every_instant_is_that_of_its_own_code(step):
    job = json.loads(step["job"])
    config = validate(TrainingConfig, Document("job", job["training"], {}))
    compiled = CompiledPlan(model_from_flags(job["model"], "drawn", "job"), resolve(config, CATALOG, "job"))
    plan = compiled.evaluate(Device(CATALOG.gpus[CARDS[job["card"]]], "card"))
    assert dict(plan.instants) == pytest.approx(step["instants"], rel=0.001)
    assert plan.persistent_bytes == step["persistent"]


def test_parameters_are_counted_one_by_one():
    # a layer: 4 projections of the width, 2 of four times as much; every second layer a gate and an embedding of values
    width, words = 256, 32768
    model, _, _ = given(4, 1, 512, words, 64, 4)
    layers = 4 * 12 * width**2 + 2 * (12 * 4 + words * width)
    assert parameter_count(model.inventory) == layers + 2 * words * width + 2 * 4 + 24 + 2


def test_gpus_share_states_and_stack_all_gradients():
    plans = [planned(4, 2, 256, 4096, 64, 4, ranks=ranks) for ranks in (1, 2, 8)]
    states = [plan.states.state_bytes for plan in plans]
    assert states[0] < 2 * states[1] < 1.01 * states[0]
    assert states[0] < 8 * states[2] < 4 * states[1]  # 4 matrices of a shape leave half of 8 GPUs none
    weights = {plan.states.weight_bytes for plan in plans}
    assert len(weights) == 1
    matrices = 4 * 4 * 12 * 256**2
    assert dict(plans[2].instants)["optimizer step"] > plans[2].persistent_bytes + matrices


def test_a_padded_vocabulary_forms_the_gradient_of_logits_in_32_bits():
    even, odd = (planned(2, 4, 512, words, 64, 4) for words in (4096, 4095))
    assert odd.requested_bytes - even.requested_bytes > 4 * 2048 * 4095 - 2 * 4096 * 256
    assert odd.states.weight_bytes == even.states.weight_bytes


@pytest.mark.parametrize(
    ("job", "more", "said"),
    [
        ((2, 1, 512, 1000, 64, 4), {"compile": "none"}, "compile: none is not modelled for nanochat"),
        ((2, 1, 512, 1000, 64, 4), {"weights": {"default": "fp32"}}, "embeddings in bf16"),
        ((2, 1, 512, 1000, 64, 4), {"clip_gradients": True}, "clipping"),
        ((2, 1, 512, 1000, 64, 4), {"optimizer": {"default": "adamw-fp32"}}, "nanochat steps by its own"),
        ((2, 1, 512, 1000, 64, 4), {"parallel": {"data": 2}}, "parallel.zero_stage"),
        ((2, 1, 512, 1000, 64, 4), {"stack": "bundled"}, "use --stack nanochat"),
        ((2, 1, 512, 1000, 64, 4, "SL", 1, 1, "8.0"), {}, "use --window-pattern L"),
        ((2, 1, 512, 1000, 64, 4, "L", 1, 1, "7.0"), {}, "fp32 on cards without bf16"),
        ((2, 1, 512, 1000, 64, 4, "L", 1, 3), {}, "do not share the"),
    ],
)
def test_what_its_scripts_do_not_run_is_refused(job, more, said):
    with pytest.raises(CannotAnswerError, match=said):
        planned(*job, **more)


@pytest.mark.slow
@pytest.mark.parametrize("job", PEAKS)
def test_its_own_code_runs_without_a_gpu(job):
    pytest.importorskip("nanochat")
    from memplan.trace.stacks.registry import StackInputs, trace_stack

    plan = planned(*job)
    trace, _ = trace_stack("nanochat", StackInputs(plan.model, {}, plan.setup, job[-1]), workspaces=False)
    assert trace.peak.bytes == PEAKS[job]
