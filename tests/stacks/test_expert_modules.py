"""Experts that are modules of their own, as transformers had them before 5.0: what they are, what a step takes, what is refused.

Peaks and what persists are those of the trace of transformers' own code at these versions, which records hold many more of.
"""

from random import Random

import pytest

from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share
from memplan.model.inventory import active_parameter_count, parameter_count
from memplan.plan.reserve.simulation import shares_reason
from memplan.step.feed_forwards import expert_modules
from memplan.step.layers.decoder_layer import layer_section
from tests.survey.drawn_jobs import Job
from tests.survey.stacks.drawn_stack_jobs import StackJob, drawn_stack_job
from tests.survey.stacks.judged_stack_jobs import planned
from tests.survey.stacks.varied_stack_jobs import MODULES, at_version, modular_job

QLORA = {"config": "qlora", "gpu": "h100", "stack": "transformers@4.57"}


def drawn(catalog, seed, number, family, stack="transformers", version="4.57"):
    job = drawn_stack_job(seed, number, catalog, (stack,), version=version)
    return at_version(modular_job(job, seed, number, (family,)), version)


def test_each_expert_has_linear_layers_under_the_names_of_its_family():
    names = {tensor.name: tensor.shape for tensor in plan_by_share("mixtral-8x7b", **QLORA).memory.model.inventory}
    expert = "model.layers.{}.block_sparse_moe.experts.7"
    assert names[f"{expert}.w1.weight"] == names[f"{expert}.w3.weight"] == (14336, 4096)
    assert names[f"{expert}.w2.weight"] == (4096, 14336)
    assert names["model.layers.{}.block_sparse_moe.gate.weight"] == (8, 4096)
    names = [tensor.name for tensor in plan_by_share("qwen3-30b-a3b", **QLORA).memory.model.inventory]
    assert [name for name in names if ".experts.127." in name] == [
        f"model.layers.{{}}.mlp.experts.127.{part}_proj.weight" for part in ("gate", "up", "down")
    ]


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b-0924", "qwen1.5-moe-a2.7b"])
def test_parameters_are_as_many_as_stacked_ones_and_as_many_take_part(model):
    apart, stacked = (
        plan_by_share(model, config="bf16-adamw", gpu="h100", stack=stack).memory.model.inventory
        for stack in ("transformers@4.57", "transformers")
    )
    assert parameter_count(apart) == parameter_count(stacked)
    rounded = sum(tensor.count for tensor in apart if tensor.alternatives)  # a share of each, rounded down
    assert 0 <= active_parameter_count(stacked) - active_parameter_count(apart) < rounded


def test_experts_are_quantised_and_adapted():
    older, newer = (
        plan_by_share("mixtral-8x7b", **{**QLORA, "stack": stack}) for stack in ("transformers@4.57", "transformers")
    )
    assert older.memory.persistent_bytes < newer.memory.persistent_bytes / 3
    assert any(
        "8 modules that run one after another" in text and "512 rows" in text for text in older.memory.assumptions
    )


@pytest.mark.parametrize("number", range(8))
def test_moments_of_experts_between_others_are_never_the_fullest(catalog, monkeypatch, number):
    job = drawn(catalog, 2611, number, MODULES[number % 4])
    model = {**job.job.model, "num_local_experts": 16, "num_experts": 16}
    weights = {role: name.replace("fp16", "bf16") for role, name in job.job.training["weights"].items()}
    training = {**job.job.training, "weights": weights, "compute_dtype": "bf16", "loss_scaling": False}
    job = StackJob(Job(model, training), job.card, job.reentrant)
    layer_section.cache_clear()
    told = planned(job, catalog)
    monkeypatch.setattr(expert_modules, "TOLD_LAST", 16)
    layer_section.cache_clear()
    every = planned(job, catalog)
    layer_section.cache_clear()
    assert told.instants == every.instants
    assert told.persistent_bytes == every.persistent_bytes


@pytest.mark.parametrize("family", MODULES)
def test_more_experts_that_take_part_or_wider_ones_need_no_less(catalog, family):
    rng = Random(family)
    job = drawn(catalog, 7, 3, family)
    weights = {role: name.replace("fp16", "bf16") for role, name in job.job.training["weights"].items()}
    training = {**job.job.training, "weights": weights, "compute_dtype": "bf16", "loss_scaling": False}
    width = "intermediate_size" if family in ("mixtral", "olmoe") else "moe_intermediate_size"
    inner = rng.randint(2, 40)
    peaks = [
        planned(
            StackJob(
                Job({**job.job.model, width: 8 * inner * more, "num_experts_per_tok": more}, training),
                "9.0",
                reentrant=False,
            ),
            catalog,
        ).requested_bytes
        for more in (1, 2, 3)
    ]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gpus": 2}, "over several GPUs or in host memory are not modelled"),
        ({"set": {"kernels.activation": "in-place"}}, "in fused kernels or compiled are not modelled"),
        ({"stack": "transformers@4.49", "model": "glm-4.5-air"}, "models of family glm4_moe are not modelled"),
    ],
)
def test_what_nobody_has_followed_is_refused(options, text):
    asked = {**QLORA, "model": "mixtral-8x7b", **options}
    with pytest.raises(CannotAnswerError, match=text):
        plan_by_share(asked.pop("model"), **asked)


def test_heads_of_their_own_width_are_refused_where_the_code_had_none(catalog):
    model = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    model |= {
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 320,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    training = {"description": "", "compute_dtype": "bf16", "weights": {"default": "bf16"}, "sequence_length": 64}
    training |= {"optimizer": {"default": "adamw-bf16"}, "micro_batch_size": 1, "stack": "transformers@4.46"}
    with pytest.raises(CannotAnswerError, match=r"whatever head_dim says, before 4\.48"):
        planned(StackJob(Job(model, training), "9.0", reentrant=False), catalog)
    planned(StackJob(Job(model, {**training, "stack": "transformers@4.48"}), "9.0", reentrant=False), catalog)


def test_a_loop_of_too_many_experts_is_not_played():
    plan = plan_by_share("qwen3-30b-a3b", **QLORA)
    assert "layers, their experts one by one, times micro-steps are too many" in shares_reason(plan.memory)
