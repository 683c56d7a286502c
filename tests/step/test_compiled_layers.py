"""Layers that torch compiles by themselves: the order of their kernels, their peaks, and what is refused."""

from dataclasses import replace

import pytest

from memplan.catalog.catalog import Catalog, data_directory
from memplan.errors import CannotAnswerError
from memplan.plan.memory_plan import Device
from memplan.plan.planner import CompiledPlan
from memplan.step.tapes.kernel_order import Kernel, Program, schedule
from tests.survey.drawn_jobs import Job, resolved

# Requested peaks of torchtitan's own compiled layers and loss (torch 2.13.0), three layers of six heads of 128, two of keys, a
# feed-forward part of 1,792 and 1,000 words: stack, checkpointing, attention, batch, length -> bytes.
PEAKS = {
    ("torchtitan", "none", "cudnn", 2, 640): 184_633_764,
    ("torchtitan", "none", "cudnn", 1, 192): 124_853_872,
    ("torchtitan", "selective", "cudnn", 3, 2560): 472_768_160,
    ("torchtitan", "selective", "flex", 2, 640): 157_884_912,
    ("torchtitan", "full", "cudnn", 2, 640): 156_193_408,
    ("torchtitan@0.2.2", "none", None, 3, 2560): 582_142_400,
    ("torchtitan@0.2.2", "selective", None, 2, 640): 128_363_696,
    ("torchtitan@0.2.2", "full", None, 1, 192): 89_911_440,
}


def planned(stack, checkpointing, attention, batch, length, *, family="llama", groups=2, **more):
    shards = "@" in stack
    model = {
        "model_type": family,
        "hidden_size": 768 if shards else 640,
        "intermediate_size": 1792,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": groups,
        "head_dim": 128,
        "vocab_size": 1000,
        "tie_word_embeddings": False,
    }
    dtype = "fp32" if shards else "bf16"
    training = {
        "description": "compiled",
        "stack": stack,
        "compile": "layers",
        "weights": {"default": dtype},
        "compute_dtype": "bf16",
        "optimizer": {"default": f"adamw-{dtype}"},
        "micro_batch_size": batch,
        "sequence_length": length,
        "activation_checkpointing": checkpointing,
        "zero_gradients": "free",  # as they were traced
    }
    training |= {"kernels": {"attention": attention}} if attention else {}
    training |= {"parallel": {"data": 8, "zero_stage": 3}} if shards else {}
    catalog = Catalog(data_directory())
    model, setup = resolved(Job(model, training | more), catalog)
    gpu = replace(catalog.gpus["h100-sxm-80gb"], compute_capability="9.0")
    return CompiledPlan(model, setup).evaluate(Device(gpu, "h100-sxm-80gb"))


@pytest.mark.parametrize("job", PEAKS, ids=str)
def test_peaks_are_those_of_the_compilers_own_programs(job):
    assert planned(*job).requested_bytes == pytest.approx(PEAKS[job], rel=0.0001)


def test_compiled_layers_need_less_than_the_same_without_a_compiler():
    job = ("torchtitan", "none", "cudnn", 3, 2560)
    assert planned(*job).requested_bytes < 0.9 * planned(*job, compile="none").requested_bytes


def test_heads_that_are_normed_are_planned_where_keys_have_fewer():
    job = ("torchtitan", "full", "cudnn", 2, 640)
    assert planned(*job, family="qwen3").requested_bytes > planned(*job).requested_bytes
    with pytest.raises(CannotAnswerError, match="as many heads of keys as of queries"):
        planned(*job, family="qwen3", groups=6)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"kernels": {"attention": "math"}}, "kernels.attention: math"),
        ({"sequence_length": 2047}, "no multiple of 8"),
        ({"kernels": {"attention": "cudnn", "loss": "token-chunks"}}, "kernels.loss: token-chunks"),
        (
            {"kernels": {"attention": "cudnn", "activation": "fused"}},
            "kernels.activation: fused is not modelled for torchtitan",
        ),
        ({"gradients": {"dtype": "fp32"}}, "gradients in a dtype of their own"),
        ({"weights": {"default": "bf16", "norm": "fp32"}}, "weights in several dtypes"),
        ({"dropout": 0.1}, "dropout"),
        ({"compute_dtype": "fp32", "weights": {"default": "fp32"}}, "anything but products in bf16"),
        ({"stack": "plain-loop"}, "compile: layers is not modelled for llama under stack plain-loop"),
        ({"evaluation": True}, "not modelled with evaluation"),
    ],
)
def test_what_was_not_read_is_refused(more, said):
    with pytest.raises(CannotAnswerError, match=said):
        planned(more.pop("stack", "torchtitan"), "none", "cudnn", 1, 256, **more)


def test_the_order_is_the_first_of_those_that_need_least():
    kernels = (
        Kernel("form", (), ("wide",)),
        Kernel("form another", (), ("wider",)),
        Kernel("use", ("wide",), ("narrow",)),
        Kernel("use another", ("wider",), ("result",)),
    )
    program = Program(kernels, (), frozenset({"narrow", "result"}))
    sizes = {"wide": 30, "wider": 31, "narrow": 1, "result": 1}
    keys = dict.fromkeys(sizes, "bf16")
    assert schedule(program, sizes, keys).order == (0, 2, 1, 3)
    assert schedule(program, sizes | {"narrow": 60}, keys).order[:2] != (0, 2)
    assert schedule(program, sizes | {"wide": 1, "wider": 1}, keys).order == (0, 1, 2, 3)


def test_memory_is_not_kept_for_a_later_tensor_where_that_raised_the_most():
    kernels = (
        Kernel("first", (), ("a",)),
        Kernel("second", ("a",), ("b", "z")),
        Kernel("wide", ("b",), ("w",)),
        Kernel("narrow", ("w",), ("n",)),
        Kernel("last", ("n",), ("c",)),
    )
    program = Program(kernels, (), frozenset({"c"}))
    sizes = {"a": 8, "z": 20, "b": 4, "w": 30, "n": 2, "c": 8}
    assert schedule(program, sizes, dict.fromkeys(sizes, "bf16")).taken == ()
    assert schedule(program, sizes | {"w": 2}, dict.fromkeys(sizes, "bf16")).taken == (("c", "a"),)
