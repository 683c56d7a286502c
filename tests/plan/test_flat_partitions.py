"""DeepSpeed's flat partitions and buckets: laws of the layout, and answers of its own engine (deepspeed 0.19.8, traced)."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.catalog.config_keys.parallel_keys import DeepSpeed, Parallel
from memplan.catalog.training_config import Adapter, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share
from memplan.step.engines.reduced_gradients import Buckets, WholeGradients
from memplan.step.states.flat_partitions import FlatGroup, RankShare
from memplan.step.states.model_states import model_states
from memplan.step.states.partitioned_weights import partitions
from memplan.training.adapters import adapter_tensors
from memplan.training.resolution.resolve_config import resolve
from memplan.training.stack_models import built_by

GROUPS = st.builds(
    lambda sizes, ranks: FlatGroup(tuple(map(str, range(len(sizes)))), tuple(sizes), ranks),
    st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    st.integers(1, 40),
)
ZERO = {"parallel.engine": "deepspeed", "master_weights": "fp32", "optimizer.default": "adamw-fp32"}


@given(GROUPS)
def test_pieces_cover_every_parameter_once_and_ranks_are_equal(group):
    assert group.partition * group.ranks == group.padded
    assert 0 <= group.padded - sum(group.sizes) < 2 * group.ranks
    owned: dict[int, set[int]] = {rank: set() for rank in range(group.ranks)}
    filled = dict.fromkeys(range(group.ranks), 0)
    for place, size in enumerate(group.sizes):
        pieces = group.pieces(place)
        assert sum(elements for _, elements in pieces) == size
        for rank, elements in pieces:
            owned[rank].add(place)
            filled[rank] += elements
    assert max(filled.values()) <= group.partition
    assert all(set(group.places(rank)) == places for rank, places in owned.items())


@given(GROUPS, st.integers(1, 1500), st.sampled_from((1, 2)), st.booleans())
def test_every_gradient_leaves_and_each_rank_ends_with_its_own(group, size, count, lingers):
    shares = [
        RankShare(2 * sum(group.sizes[place] for place in group.places(rank)), frozenset(), 0)
        for rank in range(group.ranks)
    ]
    buckets = Buckets([group], shares, size=size, count=count, width=2, lingers=lingers, copies=True)
    bucket_bytes = 2 * size * count
    for name in reversed(group.names):
        assert bucket_bytes <= buckets.arrive(name).communication <= bucket_bytes + 2 * max(size, *group.sizes)
    buckets.end()
    assert buckets.resident.communication == 0
    if not lingers:
        assert buckets.resident.gradients == max(share.gradient_bytes for share in shares)


def test_whole_gradients_stay_and_are_not_there_twice():
    first = WholeGradients({"a": 10, "b": 20}, 100, again=False)
    assert (first.resident.bytes, first.arrive("a").communication, first.resident.gradients) == (0, 100, 10)
    again = WholeGradients({"a": 10, "b": 20}, 100, again=True)
    assert (again.arrive("a").gradients, again.resident.gradients) == (30, 30)


@pytest.mark.parametrize(("stage", "states"), [(1, 12), (2, 12)])
def test_states_of_a_rank_are_two_bytes_and_twelve_divided(stage, states):
    changed = {**ZERO, "parallel.zero_stage": stage}
    plan = plan_by_share("llama-8b", gpu="h100", gpus=8, config="bf16-adamw", stack="trl", set=changed)
    data = plan.document().data
    parts = {component["name"]: component["bytes"] for component in data["components"]}
    elements = data["model"]["parameters"]
    assert 0 <= parts["weights"] - 2 * elements < 2 * 2 * 8 * 2
    assert 0 <= 8 * (parts["master_weights"] + parts["optimizer_states"]) - states * elements < 1000


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {
                "parallel": Parallel(8, 3, engine="deepspeed"),
                "weights": {"default": "bf16", "hidden_matrix": "nf4"},
                "adapter": Adapter(dtype="bf16"),
                "master_weights": "none",
            },
            "quantised weights under DeepSpeed's stage 3",
        ),
        ({"master_weights": "none"}, "not how DeepSpeed trains"),
        ({"optimizer": {"default": "adamw-8bit-bnb"}}, "which steps flat fp32 weights"),
        ({"adapter": Adapter(dtype="fp32"), "master_weights": "none"}, "casts all weights, those of adapters too"),
        ({"stack": "litgpt"}, "not under litgpt"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_deepspeed_is_not_modelled_with_is_refused(catalog, keys, reason):
    config = {"parallel": Parallel(8, 2, engine="deepspeed"), "stack": "trl", "master_weights": "fp32"}
    with pytest.raises(CannotAnswerError, match=reason):
        resolve(TrainingConfig("", **{**config, **keys}), catalog, "test")


RECORD = Path(__file__).parent / "deepspeed_stage3.json"
"""What ranks of drawn jobs keep under stage 3 between steps, as deepspeed 0.19.8 does inside Trainer, by component."""


@pytest.mark.parametrize("row", json.loads(RECORD.read_text(encoding="utf-8")), ids=lambda row: row["job"][:60])
def test_stage_3_keeps_what_its_own_engine_keeps(catalog, row):
    pytest.importorskip("torch")
    from tests.survey.stacks.drawn_stack_jobs import StackJob
    from tests.survey.stacks.judged_stack_jobs import stack_setup

    model, setup = stack_setup(StackJob.read(row["job"]), catalog)
    model = built_by(model, setup)
    whole = model_states(setup, model.inventory, adapter_tensors(model, setup))
    states = partitions(setup, whole, model.spec.hidden_size)
    assert row["bytes"] == {
        "weights": states.weight_bytes,
        "master_weights": states.master_bytes,
        "gradients": states.gradient_bytes,
        "optimizer_states": states.state_bytes,
        "communication": states.bucket * states.width,
    }


FROZEN = {
    "card": "9.0", "reentrant": False,
    "model": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
        "num_hidden_layers": 2, "vocab_size": 50304, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "training": {
        "description": "", "stack": "transformers", "weights": {"default": "bf16"}, "compute_dtype": "bf16", "optimizer": {"default": "adamw-fp32"},
        "activation_checkpointing": "full", "adapter": {"kind": "lora", "rank": 16, "dtype": "bf16"}, "clip_gradients": False,
        "micro_batch_size": 1, "sequence_length": 64, "kernels": {"attention": "eager"},
        "parallel": {"data": 2, "zero_stage": 3, "engine": "deepspeed", "deepspeed": {
            "max_live_parameters": 300000, "max_reuse_distance": 0, "overlap_comm": False, "persistence_threshold": "auto",
            "prefetch_bucket_size": 0, "reduce_bucket_size": 20000000, "sub_group_size": 50000,
        }},
    },
}  # fmt: skip
TRACED = 1_299_533_409
"""Requested bytes of its second layer's backward, as deepspeed 0.19.8 has it inside Trainer."""


def test_checkpointing_holds_no_frozen_weights_that_stage_3_has_let_go_of(catalog):
    pytest.importorskip("torch")
    from tests.survey.stacks.drawn_stack_jobs import StackJob
    from tests.survey.stacks.judged_stack_jobs import planned

    plan = planned(StackJob.read(json.dumps(FROZEN)), catalog)
    assert dict(plan.instants)["layer 2 backward"] == pytest.approx(TRACED, rel=1e-5)


def test_stage_3_gathers_no_more_than_it_is_told():
    changed = {**ZERO, "parallel.zero_stage": 3}
    few = {**changed, "parallel.deepspeed.max_live_parameters": 100_000_000, "parallel.deepspeed.max_reuse_distance": 0}
    plans = [
        plan_by_share("llama-8b", gpu="h100", gpus=8, config="bf16-adamw", stack="trl", set=s) for s in (changed, few)
    ]
    most, least = (dict(plan.memory.instants)["layer 32 backward"] for plan in plans)
    assert 1e8 < most - least < 2e9  # at most 1e9 elements of 2 bytes are gathered ahead by default


def test_evaluation_under_stage_3_gathers_too():
    keys = {**ZERO, "evaluation": True, "parallel.zero_stage": 3}
    plans = [
        plan_by_share("llama-3.2-1b", gpu="h100", gpus=8, config="bf16-adamw", stack="trl", set=s)
        for s in (keys, {**keys, "parallel.deepspeed.max_live_parameters": 0})
    ]
    most, least = (dict(plan.memory.instants)["evaluation"] for plan in plans)
    assert most - least > 2 * 8192 * 2048  # a matrix at least, in bf16


def test_a_mixture_under_stage_3_is_refused_with_what_is_kept():
    changed = {**ZERO, "parallel.zero_stage": 3}
    with pytest.raises(CannotAnswerError, match=r"a mixture of experts .* each of 8 ranks keeps .* GiB between steps"):
        plan_by_share("qwen3-30b-a3b", gpu="h100", gpus=8, config="bf16-adamw", stack="trl", set=changed)


def test_gradients_wait_in_host_memory_under_stage_2_with_accumulation_alone():
    def host(stage, steps):
        offload = {
            "offload.optimizer_states": "cpu",
            "gradient_accumulation_steps": steps,
            "parallel.zero_stage": stage,
        }
        changed = {**ZERO, **offload}
        plan = plan_by_share("llama-3.2-1b", gpu="h100", gpus=2, config="bf16-adamw", stack="trl", set=changed)
        return plan.memory.host_bytes

    assert host(1, 1) == host(1, 2) == host(2, 1)
    assert (
        0.9e9 < host(2, 2) - host(2, 1) < 1.7e9
    )  # half of 1.24e9 parameters, of 2 bytes, and one that both ranks have


def test_a_bucket_of_nothing_is_refused(catalog):
    parallel = Parallel(8, 2, engine="deepspeed", deepspeed=DeepSpeed(reduce_bucket_size=0))
    with pytest.raises(InvalidFileError, match="a positive number of elements"):
        resolve(TrainingConfig("", parallel=parallel), catalog, "test")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 4])
def test_fp16_takes_what_bf16_does_and_its_scale_nothing(stage, steps):
    """DeepSpeed's scale is a number, and 0.19.8 looks for overflow by two scalars (``has_inf_or_nan`` in runtime/utils.py)."""
    keys = {**ZERO, "parallel.zero_stage": stage, "gradient_accumulation_steps": steps}
    half = {"weights.default": "fp16", "compute_dtype": "fp16", "loss_scaling": True}
    narrow, scaled = (
        plan_by_share(
            "llama-3.2-1b", gpu="h100", gpus=8, config="bf16-adamw", stack="trl", set={**keys, **other}
        ).memory
        for other in ({"weights.default": "bf16"}, half)
    )
    assert narrow.instants == scaled.instants
    assert narrow.requested_bytes == scaled.requested_bytes
