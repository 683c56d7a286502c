"""Plans of steps on preferences whose GPUs share a model."""

import pytest

from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share

PARAMETERS, GPUS, BF16_BYTES = 1_235_814_400, 4, 2


def plan(reference, **keys):
    settings = {"parallel.zero_stage": 3, "method.stage": "dpo", "method.reference_model": reference, **keys}
    return plan_by_share("llama-3.2-1b", gpu="h100", gpus=GPUS, config="bf16-adamw", stack="trl", set=settings)


def test_trl_gathers_a_reference_model_at_once_and_copies_it_out_of_its_buffer():
    alone, beside = plan("precomputed"), plan("resident")
    shards = PARAMETERS * BF16_BYTES // GPUS  # as it was loaded, where what trains is cast to fp32
    assert beside.components["weights"] - alone.components["weights"] == shards
    ends = 128_256 * 2048 * BF16_BYTES  # and norm, which stay gathered from forward on
    assert beside.memory.peak.name == "forward"
    assert 0 <= beside.components["communication"] - 2 * PARAMETERS * BF16_BYTES - ends < 2**20


def test_deepspeed_keeps_a_whole_reference_model_on_each_rank_up_to_stage_2():
    engine = {"parallel.engine": "deepspeed", "master_weights": "fp32", "optimizer": "adamw-fp32"}
    alone, beside = (plan(kind, **{**engine, "parallel.zero_stage": 2}) for kind in ("precomputed", "resident"))
    assert beside.components["weights"] - alone.components["weights"] == PARAMETERS * BF16_BYTES


def test_an_engine_of_its_own_gathers_a_reference_model_at_stage_3():
    engine = {"parallel.engine": "deepspeed", "master_weights": "fp32", "optimizer": "adamw-fp32"}
    alone, beside = (plan(kind, **engine) for kind in ("precomputed", "resident"))
    norms = (2 * 16 + 1) * 2048  # smaller than what DeepSpeed keeps gathered where nobody says what
    pieces = PARAMETERS // GPUS + norms
    assert beside.components["weights"] - alone.components["weights"] == pieces * BF16_BYTES
    assert (
        dict(alone.memory.instants)["forward"] + PARAMETERS * BF16_BYTES // 2 < dict(beside.memory.instants)["forward"]
    )
    for keys in (
        {"evaluation": True},
        {"offload.optimizer_states": "cpu"},
        {"method.stage": "kto", "micro_batch_size": 2},
    ):
        with pytest.raises(CannotAnswerError, match="stage 3: dpo and reward"):
            plan("resident", **engine, **keys)


def test_fsdp1_leaves_the_root_of_a_reference_model_gathered_for_good():
    alone, beside = (plan(kind, **{"parallel.engine": "fsdp1"}) for kind in ("precomputed", "resident"))
    assert beside.components["weights"] - alone.components["weights"] == PARAMETERS * BF16_BYTES // GPUS
    root = (128_256 + 1) * 2048 * BF16_BYTES  # embedding, which is the head, and norm
    own, before = dict(beside.memory.instants), dict(alone.memory.instants)
    shards = PARAMETERS * BF16_BYTES // GPUS
    assert {own[name] - before[name] for name in ("loss backward", "end of backward", "optimizer step")} == {
        root + shards
    }


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_deepspeeds_stage_3_has_backward_of_no_layer_end_that_ran_without_adapters(checkpointing):
    settings = {
        "parallel.engine": "deepspeed",
        "parallel.zero_stage": 3,
        "method.stage": "dpo",
        "adapter.dtype": "bf16",
    }
    alone, off = (
        plan_by_share(
            "llama-3.2-1b",
            gpu="h100",
            gpus=GPUS,
            config="lora",
            stack="trl",
            activation_checkpointing=checkpointing,
            set={**settings, "method.reference_model": kind},
        )
        for kind in ("precomputed", "adapter-off")
    )
    more = dict(off.memory.instants)["end of backward"] - dict(alone.memory.instants)["end of backward"]
    layers = (PARAMETERS - 128_256 * 2048) * BF16_BYTES
    first = layers // 16 if checkpointing == "full" else 0  # runs again, and so is there without, too
    assert 0 <= layers - first - more < 2**24  # buffers in flight, which the records of this engine's own code compare


def test_trl_has_adapters_run_again_by_reentrant_checkpointing_under_stage_3_whatever_it_is_told():
    settings = {"parallel.engine": "deepspeed", "parallel.zero_stage": 3, "adapter.dtype": "bf16"}
    keys = {"gpu": "h100", "gpus": GPUS, "config": "lora", "stack": "trl", "activation_checkpointing": "full"}
    told = [
        plan_by_share("llama-3.2-1b", set={**settings, "reentrant_checkpointing": way}, **keys)
        for way in (True, False, None)
    ]
    assert {plan.memory.setup.stack.checkpointing.reentrant for plan in told} == {True}
    assert len({plan.memory.requested_bytes for plan in told}) == 1


@pytest.mark.parametrize("keys", [{"evaluation": True}, {"parallel.reshard_after_forward": False}])
def test_what_of_a_sharded_reference_model_is_not_followed_is_refused(keys):
    with pytest.raises(CannotAnswerError, match="share a model"):
        plan("resident", **keys)
