"""What transformers 5.24 does otherwise than 5.23: keys and values that stay, the dtype of a cache, GPT-J's attention."""

import pytest

from memplan.library.answers.planned_job import plan_by_share
from memplan.plan.reserve.simulation import events_of
from memplan.step.kernels.family_code import family_code
from tests.jobs import shipped_catalog

TOKENS = 2 * 512


def plan(model: str, version: str, stack: str = "plain-loop", length: int = 512, **keys):
    return plan_by_share(
        model,
        gpu="a100-80gb",
        config="bf16-adamw",
        stack=f"{stack}@{version}",
        micro_batch_size=2,
        sequence_length=length,
        set={"kernels.attention": "eager", **keys},
    ).memory


SHARED = {"parallel.data": 8, "parallel.zero_stage": 3}
ENGINE = {"parallel.engine": "deepspeed", "master_weights": "fp32", "optimizer.default": "adamw-fp32"}


@pytest.mark.parametrize(
    ("stack", "keys"),
    [
        ("plain-loop", {}),
        ("transformers", {}),
        ("transformers", SHARED),
        ("transformers", {**SHARED, **ENGINE}),
    ],
)
def test_the_last_layer_of_each_kind_leaves_keys_and_values_although_none_reads_them(stack, keys):
    now, before = (
        dict(plan("gemma-4-31b", version, stack, activation_checkpointing="full", **keys).instants)
        for version in ("5.24", "5.23")
    )
    spec = plan("gemma-4-31b", "5.24").model.spec
    parts = {run.layer.attention.head_dim: run.layer.attention for run in spec.runs}
    # keys and values in bf16, of the last layer within a window and of the last without
    least = sum(2 * 2 * part.num_key_value_heads * head_dim for head_dim, part in parts.items()) * TOKENS
    assert len(parts) == 2
    assert now["loss backward"] - before["loss backward"] >= least
    assert now["optimizer step"] == before["optimizer step"]


def test_a_cache_has_values_in_their_own_dtype():
    wide = {"weights.default": "fp32", "compute_dtype": "bf16"}
    now, before = (plan("llama-3.2-1b", version, **wide) for version in ("5.24", "5.23"))
    part = now.model.spec.runs[0].layer.attention
    values = now.model.spec.num_hidden_layers * TOKENS * part.num_key_value_heads * part.head_dim
    # keys are in fp32, turned by tables in fp32, and had values beside them in fp32; the loop keeps both until the next forward
    assert dict(before.instants)["optimizer step"] - dict(now.instants)["optimizer step"] == 2 * values


def test_gpt_j_has_torchs_attention_and_one_table_for_all_layers():
    catalog = shipped_catalog()
    now, before = (family_code(catalog.stack(f"transformers@{version}"), "gptj") for version in ("5.24", "5.23"))
    assert not now.steps_alone
    assert before.steps_alone
    spec = plan("gpt-j-6b", "5.24").model.spec
    sizes = [plan("gpt-j-6b", version).buffer_bytes for version in ("5.24", "5.23")]
    assert sizes[1] - sizes[0] == (spec.num_hidden_layers - 1) * sum(spec.buffers)


def test_older_stacks_have_the_models_of_their_time():
    catalog = shipped_catalog()
    for name in ("axolotl", "llama-factory", "ms-swift"):
        assert family_code(catalog.stack(name), "gptj").steps_alone
    assert family_code(catalog.stack("transformers@4.57"), "gptj").interleaved == "looked-up"


@pytest.mark.parametrize(("name", "masks"), [("gpt-neo-1.3b", 24), ("starcoderbase-1b", 1), ("gpt-j-6b", 0)])
def test_a_mask_of_all_positions_is_a_tensor_of_its_layer_or_of_the_model(name, masks):
    answer = plan(name, "5.24", length=500)
    square = answer.own.spec.max_position_embeddings**2
    sizes = events_of(answer, 1).sizes
    assert sizes.count(square) == masks
