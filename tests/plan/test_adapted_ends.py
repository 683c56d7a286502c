"""What trains of embedding, head and norms beside adapters: how many bytes, of tied models too, and what is refused."""

import pytest

import memplan
from memplan.library.answers.planned_job import plan_by_share
from memplan.plan.suggested.config_changes import Change
from memplan.plan.suggested.suggestions import Trial

TABLE = 128256 * 2048
"""Elements of Llama-3.2-1B's embedding, which is its head."""
WIDTH, LAYERS = 2048, 16


def component(name: str, config: str = "lora", **settings) -> int:
    plan = plan_by_share("llama-3.2-1b", gpu="h100", config=config, stack="plain-loop", set=settings)
    return next(entry.bytes for entry in plan.memory.components if entry.name == name)


def added(name: str, **settings) -> int:
    """Return by how much what trains beside adapters changes a component."""
    return component(name, **settings) - component(name)


@pytest.mark.parametrize(
    ("modules", "tables"), [("embed_tokens", 1), ("lm_head", 1), ("embed_tokens lm_head", 2), ("model.embed_tokens", 1)]
)
def test_copies_of_a_tied_table_are_tensors_of_their_own_beside_the_one_that_both_had(modules, tables):
    settings = {"adapter.modules_to_save": modules.split()}
    assert added("weights", **settings) == 2 * tables * TABLE
    assert added("optimizer_states", **settings) == 2 * 2 * tables * TABLE


def test_norms_are_copied_whose_names_end_so():
    every = 2 * (2 * LAYERS + 1) * WIDTH
    assert added("weights", **{"adapter.modules_to_save": ["norm"]}) == every
    assert added("weights", **{"adapter.modules_to_save": ["model.norm"]}) == 2 * WIDTH
    assert added("optimizer_states", **{"adapter.modules_to_save": ["input_layernorm"]}) == 2 * 2 * LAYERS * WIDTH


def test_adapters_on_ends_are_a_pair_of_matrices_each():
    rank, both = 16, ["all-linear", "embed_tokens", "lm_head"]
    assert added("weights", **{"adapter.targets": both}) == 4 * 2 * rank * (128256 + WIDTH)


@pytest.mark.parametrize(
    ("stack", "settings", "told"),
    [
        ("trl", {"adapter.targets": ["lm_head"]}, "never trained with kernels.loss: fused-head"),
        ("plain-loop", {"adapter.targets": ["embed_tokens"], "adapter.kind": "dora"}, "not modelled by dora; use lora"),
        ("plain-loop", {"adapter.modules_to_save": ["q_proj"]}, "is no embedding, head or norm; known: embed_tokens"),
        ("plain-loop", {"adapter.modules_to_save": ["norm"], "adapter.kind": "dora"}, "magnitudes; use lora"),
        ("litgpt", {"adapter.modules_to_save": ["lm_head"]}, "copies no modules; use a stack that runs PEFT"),
        (
            "trl",
            {
                "adapter.modules_to_save": ["lm_head"],
                "compute_dtype": "fp16",
                "weights.default": "fp16",
                "loss_scaling": True,
            },
            "modules_to_save: .* whole in fp16 by 'Attempting to unscale",
        ),
        (
            "transformers",
            {
                "method": {"stage": "classification", "labels": 2},
                "compute_dtype": "fp16",
                "weights.default": "fp16",
                "loss_scaling": True,
            },
            "method.stage: .* whole in fp16 by 'Attempting to unscale",
        ),
    ],
    ids=["trl", "dora", "matrix", "dora norm", "litgpt", "fp16", "fp16 scores"],
)
def test_what_is_not_planned_says_what_is(stack, settings, told):
    with pytest.raises(memplan.MemplanError, match=told):
        plan_by_share("llama-3.2-1b", gpu="h100", config="lora", stack=stack, set=settings)


def test_dora_with_dropout_over_transposed_weights_is_refused_where_peft_runs_it():
    job = {"gpu": "h100", "config": "lora", "set": {"adapter.kind": "dora", "adapter.dropout": 0.1}}
    with pytest.raises(memplan.MemplanError, match="new parameters of the weights of GPT-2"):
        plan_by_share("gpt2", stack="transformers", **job)
    assert memplan.plan("gpt2", stack="bundled", **job).verdict == "fits"
    assert memplan.plan("llama-3.2-1b", stack="transformers", **job).verdict == "fits"


def test_a_tower_that_images_pass_through_stays_beside_copies_of_tied_ends():
    settings = {"images.per_row": 1, "sequence_length": 512, "kernels.attention": "flash"}
    copies = {"adapter.modules_to_save": ["embed_tokens"]}
    plain, copied = (
        plan_by_share("gemma-3-4b", gpu="h200", config="lora", stack="trl", set=settings | more)
        for more in ({}, copies)
    )
    assert all(tensor.used for tensor in copied.memory.model.inventory)
    assert copied.expected_bytes > plain.expected_bytes


def test_a_suggested_change_counts_copies_of_tied_ends_once():
    settings = {"adapter.modules_to_save": ["embed_tokens"], "activation_checkpointing": "none"}
    plan = plan_by_share("llama-3.2-1b", gpu="h100", config="lora", stack="trl", set=settings)
    trial = Trial(plan.memory, plan.catalog, plan.memory.setup.config)
    changed = trial.plan_with(Change("", (("activation_checkpointing", "full"),)))
    weights = [
        next(entry.bytes for entry in one.components if entry.name == "weights") for one in (plan.memory, changed)
    ]
    assert weights[0] == weights[1]
