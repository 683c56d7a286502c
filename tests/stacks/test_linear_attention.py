"""Gated delta networks and state space layers: transformers' own code traced, beside the formula, on small models of every kind."""

from importlib.util import find_spec

import pytest

pytest.importorskip("peft")

from memplan.errors import CannotAnswerError
from tests.survey.drawn_jobs import Job, compared
from tests.survey.stacks.drawn_stack_jobs import StackJob
from tests.survey.stacks.judged_stack_jobs import planned, traced

pytestmark = pytest.mark.thorough

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "tie_word_embeddings": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 32,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
TRAINING = {
    "description": "test",
    "stack": "plain-loop",
    "weights": {"default": "bf16"},
    "compute_dtype": "bf16",
    "optimizer": {"default": "adamw-bf16"},
    "activation_checkpointing": "none",
    "sequence_length": 392,
    "micro_batch_size": 2,
}
AUTOCAST = {"stack": "transformers", "weights": {"default": "fp32"}, "optimizer": {"default": "adamw-fp32"}}
ADAPTED = {
    "activation_checkpointing": "full",
    "weights": {"default": "bf16", "hidden_matrix": "nf4"},
    "optimizer": {"default": "adamw-fp32"},
    "adapter": {"kind": "lora", "rank": 4, "dtype": "fp32", "targets": ["in_proj_qkvz", "out_proj", "q_proj"]},
}
FLA = {"kernels": {"linear_attention": "fla"}}
JOBS = {
    "dense": ("qwen3_5_text", {"vocab_size": 1000}, {}),
    "experts-autocast": ("qwen3_5_moe_text", EXPERTS, AUTOCAST),
    "joined-adapted": ("qwen3_next", EXPERTS, ADAPTED),
    "one-chunk-cached": ("qwen3_5_text", {"vocab_size": 1000}, {"sequence_length": 64}),
    "in-fp32-as-it-lies": (
        "qwen3_next",
        EXPERTS,
        {**ADAPTED, "activation_checkpointing": "none", "sequence_length": 384},
    ),
}


SCAN = {key: SHAPE[key] for key in SHAPE if not key.startswith("linear") and key != "full_attention_interval"} | {
    "mamba_n_heads": 6,
    "mamba_d_head": 32,
    "mamba_d_ssm": 192,  # twice the width, as Granite 4 has it
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 64,
    "mamba_norm_before_gate": False,
}
ONE = {"micro_batch_size": 1, "sequence_length": 64}
"""One sequence of one chunk, whose heads lie as products of matrices want them."""
BESIDE = {**ADAPTED, "adapter": {**ADAPTED["adapter"], "targets": ["in_proj", "q_proj", "down_proj"]}}
APART = {**ADAPTED, "adapter": {**ADAPTED["adapter"], "targets": ["in_proj", "out_proj", "q_proj"]}}
GRANITE = {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 72, "num_experts_per_tok": 2}
ALONE = {
    key: SHAPE[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
} | {
    "vocab_size": 1000,
    "head_dim": 32,
    "mamba_num_heads": 6,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 64,
    "use_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
}
"""Layers of one part, two of them state space layers with biases."""
EAGER = {"kernels": {"attention": "eager"}, "sequence_length": 200, "stack": "transformers"}
EIGHTS = {"mamba_n_heads": 8, "mamba_d_head": 24}
ON_INPUT = {"adapter": {**ADAPTED["adapter"], "targets": ["in_proj"]}, "optimizer": {"default": "adamw-fp32"}}
SCANS = {
    "beside": ("falcon_h1", {}, {}),
    "beside-norm-autocast": ("falcon_h1", {"mamba_rms_norm": True, "mamba_proj_bias": True}, AUTOCAST),
    "beside-adapted": ("falcon_h1", {"mamba_conv_bias": False}, BESIDE),
    "beside-one-chunk": ("falcon_h1", {}, ONE),
    "in-place": ("granitemoehybrid", {**GRANITE, "num_local_experts": 0}, {}),
    "in-place-experts-autocast": ("granitemoehybrid", {**GRANITE, "num_local_experts": 4}, AUTOCAST),
    "alone": ("nemotron_h", {"hybrid_override_pattern": "M-*M"}, {}),
    "alone-experts-autocast": ("nemotron_h", {"hybrid_override_pattern": "ME*", "moe_latent_size": 24}, AUTOCAST),
    "alone-adapted-eager": ("nemotron_h", {"hybrid_override_pattern": "MEM*"}, {**BESIDE, **EAGER}),
    "in-place-adapted": ("granitemoehybrid", {**GRANITE, "num_local_experts": 0, "mamba_proj_bias": True}, APART),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCANS)
def test_formula_and_trace_of_state_space_layers_agree(name, catalog):
    family, sizes, training = SCANS[name]
    own = ("mamba_d_ssm", "mamba_norm_before_gate")
    shape = {key: value for key, value in SCAN.items() if family == "falcon_h1" or key not in own}
    shape = ALONE if family == "nemotron_h" else shape
    job = StackJob(Job({"model_type": family, **shape, **sizes}, {**TRAINING, **training}), "8.0", reentrant=False)
    verdict = compared(job.job, planned(job, catalog), traced(job, catalog))
    assert verdict.outcome == "agrees", dict(verdict.differences)
    assert verdict.peak_share < 5e-4


@pytest.mark.parametrize(
    ("sizes", "training", "message"),
    [
        ({}, {"stack": "bundled"}, "use a stack of transformers"),
        ({}, {"adapter": {"kind": "lora", "rank": 4}}, "PEFT puts no adapter on out_proj of falcon_h1"),
        ({}, {"activation_checkpointing": "selective"}, "selective is not modelled for state space layers"),
        ({}, {"kernels": {"linear_attention": "fla"}}, "fla has no kernels for state space layers"),
        (
            {},
            {**AUTOCAST, "compute_dtype": "fp32", "parallel": {"data": 4, "zero_stage": 2, "engine": "deepspeed"}},
            "data parallelism and torch's fully_shard alone",
        ),
        ({"mamba_n_heads": 1, "mamba_d_head": 192, "mamba_n_groups": 1}, {}, "with one head"),
    ],
)
def test_state_space_layers_that_are_not_modelled_are_refused(sizes, training, message, catalog):
    job = StackJob(Job({"model_type": "falcon_h1", **SCAN, **sizes}, {**TRAINING, **training}), "8.0", reentrant=False)
    with pytest.raises(CannotAnswerError, match=message):
        planned(job, catalog)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", JOBS)
def test_formula_and_trace_agree(name, catalog):
    family, sizes, training = JOBS[name]
    job = StackJob(Job({"model_type": family, **SHAPE, **sizes}, {**TRAINING, **training}), "8.0", reentrant=False)
    verdict = compared(job.job, planned(job, catalog), traced(job, catalog))
    assert verdict.outcome == "agrees", dict(verdict.differences)
    assert verdict.peak_share < 2e-4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_kernels_save_and_allocate_what_their_libraries_say(family, catalog):
    pytest.importorskip("fla", reason="needs fla-core and causal-conv1d")
    job = StackJob(Job({"model_type": family, **SHAPE, **EXPERTS}, {**TRAINING, **FLA}), "8.0", reentrant=False)
    verdict = compared(job.job, planned(job, catalog), traced(job, catalog))
    assert verdict.outcome == "agrees", dict(verdict.differences)


SCAN_KERNELS = {"kernels": {"linear_attention": "mamba"}, "activation_checkpointing": "full"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("mamba_ssm") is None, reason="needs mamba-ssm, causal-conv1d and einops")
@pytest.mark.parametrize(
    ("family", "sizes", "length"),
    [
        ("falcon_h1", {"mamba_rms_norm": True}, 392),
        ("falcon_h1", {"mamba_conv_bias": False}, 40),
        ("granitemoehybrid", {**GRANITE, "num_local_experts": 0}, 300),
    ],
)
def test_kernels_of_state_space_layers_save_and_allocate_what_mamba_ssm_says(family, sizes, length, catalog):
    own = ("mamba_d_ssm", "mamba_norm_before_gate")
    shape = {key: value for key, value in SCAN.items() if family == "falcon_h1" or key not in own} | EIGHTS
    job = Job({"model_type": family, **shape, **sizes}, {**TRAINING, **SCAN_KERNELS, "sequence_length": length})
    verdict = compared(job, *(run(StackJob(job, "8.0", reentrant=False), catalog) for run in (planned, traced)))
    assert verdict.outcome == "agrees", dict(verdict.differences)


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        ({}, {"activation_checkpointing": "none"}, "a model that fills a cache"),
        ({}, {"weights": {"default": "bf16", "hidden_matrix": "nf4"}, **ON_INPUT}, "codes as weights"),
        ({}, {**AUTOCAST}, "weights in fp32 under autocast"),
        ({"mamba_d_conv": 5}, {}, "other than 2 to 4 tokens"),
        ({"mamba_n_heads": 6}, {}, "no multiple of 8"),
    ],
)
def test_what_kernels_of_state_space_layers_do_not_take_is_refused(model, training, message, catalog):
    shape = {"model_type": "falcon_h1", **SCAN, **EIGHTS, **model}
    shape["mamba_d_head"] = 192 // shape["mamba_n_heads"]
    job = StackJob(Job(shape, {**TRAINING, **SCAN_KERNELS, **training}), "8.0", reentrant=False)
    with pytest.raises(CannotAnswerError, match=message):
        planned(job, catalog)


def test_kernels_of_state_space_layers_need_less_and_are_named(catalog):
    model = {"model_type": "falcon_h1", **SCAN, **EIGHTS}
    full = {"activation_checkpointing": "full"}
    plain, kernels = (
        planned(StackJob(Job(model, {**TRAINING, **chosen}), "8.0", reentrant=False), catalog)
        for chosen in (full, SCAN_KERNELS)
    )
    assert kernels.requested_bytes < plain.requested_bytes
    assert any("linear attention mamba" in text for text in kernels.assumptions)
    assert any("runs state space layers" in text for text in plain.assumptions)


def test_kernels_need_less_and_are_named(catalog):
    model = {"model_type": "qwen3_5_text", **SHAPE}
    plain, kernels = (
        planned(StackJob(Job(model, {**TRAINING, **chosen}), "8.0", reentrant=False), catalog) for chosen in ({}, FLA)
    )
    assert kernels.requested_bytes < plain.requested_bytes
    assert any("linear attention fla" in text for text in kernels.assumptions)
    assert any("linear attention torch" in text for text in plain.assumptions)


def test_shapes_that_kernels_do_not_take_are_refused(catalog):
    wide = {"model_type": "qwen3_5_text", **SHAPE, "linear_key_head_dim": 320}
    with pytest.raises(CannotAnswerError, match="wider than 256"):
        planned(StackJob(Job(wide, {**TRAINING, **FLA}), "8.0", reentrant=False), catalog)
