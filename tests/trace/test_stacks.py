"""Steps that other libraries run themselves, on tensors without memory."""

from typing import Any

import pytest
import torch

import memplan
from memplan.catalog.kernel_profiles import Kernels
from memplan.catalog.training_config import Adapter
from memplan.errors import CannotAnswerError
from memplan.model.families import model_spec
from memplan.model.model import Model
from memplan.trace.pretended_cuda import autocast_region
from memplan.trace.pretended_cuda.autocast_region import cuda_autocast
from memplan.trace.recording.trace_result import Trace
from memplan.trace.stacks import registry
from memplan.trace.stacks.registry import (
    StackDetails,
    StackInputs,
    trace_stack,
)

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]

KEYS = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "intermediate_size": 96,
    "tie_word_embeddings": False,
}
TOKENS = 64


@pytest.fixture
def traced(make_setup):
    for package in ("transformers", "peft", "bitsandbytes", "accelerate", "trl"):
        pytest.importorskip(package)

    known: dict[str, Trace] = {}

    def run(stack: str = "plain-loop", details: StackDetails = StackDetails(), **keys: Any) -> Trace:  # noqa: B008
        if (key := repr((stack, details, keys))) in known:
            return known[key]
        plain = {name: dict(value) if isinstance(value, tuple) else value for name, value in keys.items()}
        setup = make_setup(stack=stack, sequence_length=TOKENS, **plain)
        model = Model.from_spec(model_spec(KEYS, "test", "test"), "test")
        known[key] = trace_stack(stack, StackInputs(model, KEYS, setup, "8.0", details))[0]
        return known[key]

    return run


def test_a_stack_without_a_program_is_refused():
    with pytest.raises(CannotAnswerError, match="cannot be traced; stacks that can: plain-loop"):
        trace_stack("megatron", None)


def test_a_plain_loop_that_deepspeed_would_run_is_not_traced_without_it(monkeypatch):
    monkeypatch.setattr(registry, "program_of", lambda name: None)  # whose packages need not be here to refuse
    engine = {"parallel.engine": "deepspeed", "parallel.zero_stage": 2, "master_weights": "fp32"}
    keys = {**engine, "optimizer.default": "adamw-fp32"}
    with pytest.raises(CannotAnswerError, match="without DeepSpeed; use --stack transformers"):
        memplan.trace("llama-3.2-1b", config="bf16-adamw", stack="plain-loop", set=keys)


def test_code_of_another_version_than_the_formulas_is_said(traced, make_setup):
    said = "the formula is that of transformers 4.51;"
    assert not any(said in note for note in traced().notes)
    setup = make_setup(stack="plain-loop@4.51", sequence_length=TOKENS)
    model = Model.from_spec(model_spec(KEYS, "test", "test"), "test")
    other, _ = trace_stack("plain-loop", StackInputs(model, KEYS, setup, "8.0"))
    assert any(said in note for note in other.notes)


def test_a_plain_loop_has_a_name_for_the_last_steps_logits(traced):
    trace = traced()
    logits = [s for s in trace.storages if s.component == "logits" and s.shape[-1] == KEYS["vocab_size"]]
    assert {s.bytes for s in logits} >= {TOKENS * 1000 * 2, TOKENS * 1000 * 4}
    alive = trace.alive_after(trace.steady_from)
    assert [trace.storages[i].bytes for i in alive if trace.storages[i].component == "logits"] == [TOKENS * 1000 * 2]


@pytest.mark.parametrize("optimizer", ["adamw-paged-bnb", "adafactor-transformers"])
def test_a_plain_loop_steps_by_what_asks_for_a_card_or_has_a_rate_of_its_own(traced, optimizer):
    assert traced(optimizer={"default": optimizer}).instants["optimizer step"].bytes > 0


def test_every_instant_of_a_step_is_seen(traced):
    assert list(traced().instants) == [
        "forward", "loss backward", "head backward", "layer 2 backward", "layer 1 backward", "end of backward",
        "optimizer step",
    ]  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_both_kinds_keeps_its_instants(traced, reentrant):
    trace = traced(details=StackDetails(reentrant=reentrant), activation_checkpointing="full")
    assert list(trace.instants)[3:6] == ["layer 2 backward", "layer 1 backward", "end of backward"]


@pytest.mark.parametrize("stack", ["transformers", "trl"])
def test_trainers_let_go_of_what_the_plain_loop_holds(traced, stack):
    trace = traced(stack, gradient_accumulation_steps=2, clip_gradients=True)
    assert list(trace.instants)[-3:] == ["second backward", "gradient clipping", "optimizer step"]
    alive = trace.alive_after(trace.steady_from)
    assert not [index for index in alive if trace.storages[index].component == "logits"]
    plain = traced(gradient_accumulation_steps=2, clip_gradients=True, kernels=Kernels(optimizer="fused"))
    assert trace.persistent_bytes == plain.persistent_bytes


def test_the_fused_head_of_trl_works_on_a_tile_of_its_own(traced):
    tile = TOKENS - 1, 32768
    assert tile in {s.shape for s in traced("trl").storages}
    assert tile not in {s.shape for s in traced("transformers").storages}
    assert "head backward" not in traced("trl").instants


def test_adapters_on_four_bits_are_as_each_stack_makes_them(traced):
    keys = {"adapter": Adapter(rank=4), "weights": (("default", "bf16"), ("hidden_matrix", "nf4-dq"))}
    plain, trainer = (traced(stack, **keys) for stack in ("plain-loop", "transformers"))
    norms = {s.bytes for s in plain.storages if s.component == "weights" and s.name.endswith("model.norm.weight")}
    assert norms == {4 * 64}, "prepare_model_for_kbit_training casts what is not quantised to fp32"
    norms = {s.bytes for s in trainer.storages if s.component == "weights" and s.name.endswith("model.norm.weight")}
    assert norms == {2 * 64}


# ------------------------------------------------------------------ autocast
def test_the_lists_of_autocast_are_torchs():
    names = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    ours = {f"aten::{name}" for one in autocast_region.operator_lists().values() for name in one}
    absent = ("conv", "binary", "cell", "upsample", "loss", "norm", "cudnn", "pdist", "renorm", "sqrth")
    assert ours <= names
    assert [name for name in sorted(names - ours) if not any(word in name for word in absent)] == []


def test_autocast_casts_a_trained_weight_once_a_region_and_a_frozen_one_each_time():
    x, frozen = torch.empty(4, 8, device="meta"), torch.empty(8, 8, device="meta")
    weight = torch.nn.Parameter(torch.empty(8, 8, device="meta"))
    with cuda_autocast():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled()
            with torch.no_grad():
                torch.nn.functional.linear(x, weight)
            copies = dict(autocast_region._REGION.copies)
            torch.nn.functional.linear(torch.nn.functional.linear(x, weight), frozen)
            assert autocast_region._REGION.copies == copies
            assert len(copies) == 1
            assert torch.softmax(x.bfloat16(), -1).dtype == torch.float32
            assert torch.nn.functional.linear(x, weight).requires_grad
        assert not autocast_region._REGION.copies
        assert not torch.is_autocast_enabled()


def test_outside_of_it_autocast_is_torchs_own():
    own = torch.autocast
    with cuda_autocast(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
    assert torch.autocast is own


def test_a_stacks_code_that_fails_over_a_format_is_answered_as_the_plan_answers():
    for package in ("transformers", "peft", "trl"):
        pytest.importorskip(package)
    with pytest.raises(CannotAnswerError, match="does not train over weights in fp8-e4m3"):
        memplan.trace("gpt2", config="lora", micro_batch_size=1, sequence_length=16, set={"weights": "fp8-e4m3"})
