"""What libraries' own kernels change in a plan, and where nothing runs them."""

import pytest

from memplan.catalog.catalog import Catalog, data_directory
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share
from memplan.library.lookup import Shapes, find_model
from memplan.step.losses.fused_linear_loss import linear_chunk

MODEL, TOKENS = "llama-3.2-1b", 2048
LIGER = ("kernels.norm=in-place", "kernels.rotary=in-place", "kernels.activation=in-place", "kernels.loss=fused-linear")
CUT = ("kernels.loss=cut-cross-entropy",)
INT8 = ("weights.hidden_matrix=llm-int8",)


def plan(*settings, stack="transformers", config="lora", model=MODEL, gpu="a100-80gb"):
    return plan_by_share(model, config=config, gpu=gpu, stack=stack, set=list(settings))


@pytest.mark.parametrize("key", LIGER)
def test_each_of_ligers_kernels_needs_less_than_what_it_replaces_but_the_rotation(key):
    none = "activation_checkpointing=none"
    plans = (plan(*keys, config="bf16-adamw").to_dict() for keys in ((key, none), (none,)))
    own, replaced = (one["peak"]["requested_bytes"] for one in plans)  # the order of allocations moves the reserve
    assert own == replaced if key == "kernels.rotary=in-place" else own < replaced


def test_a_chunk_of_the_fused_linear_loss_is_a_power_of_two_or_all_tokens():
    spec = find_model(MODEL, Shapes(), Catalog(data_directory())).spec
    assert linear_chunk(TOKENS, spec) == 64  # 33 of 2048 tokens for each of ceil(128256 / 2048) = 63 shares
    assert linear_chunk(1, spec) == 1


def test_cut_cross_entropy_has_no_logits_and_the_heads_gradient_alone():
    cut, whole = (
        plan("activation_checkpointing=full", f"kernels.loss={loss}", stack="axolotl").expected_bytes
        for loss in ("cut-cross-entropy", "fp32")
    )
    assert whole - cut > 0.9 * TOKENS * 128_256 * 4


@pytest.mark.parametrize("stack", ["transformers", "axolotl"])
def test_ligers_fused_loss_forms_whole_logits_where_it_evaluates(stack):
    own, evaluated = (
        plan("activation_checkpointing=full", "kernels.loss=fused-linear", f"evaluation={on}", stack=stack).to_dict()
        for on in ("false", "true")
    )
    assert evaluated["peak"]["instant"] == "evaluation"
    gained = evaluated["peak"]["requested_bytes"] - own["peak"]["requested_bytes"]
    assert gained > 0
    assert evaluated["peak"]["requested_bytes"] > TOKENS * 128_256 * (
        2 + 4 + 4
    )  # logits, in fp32, and their log-softmax
    cut = plan("activation_checkpointing=full", *CUT, "evaluation=true", stack="axolotl").to_dict()
    assert cut["peak"]["instant"] != "evaluation"


def test_adapters_on_the_head_are_counted_with_what_they_save_of_every_chunk():
    own, head = (
        plan(f"adapter.targets={targets}", stack="torchtune", model="llama-2-7b")
        for targets in ("[q_proj, v_proj]", "[q_proj, v_proj, lm_head]")
    )
    rank, added = own.training["adapter"]["rank"], 4096 + 32_000
    assert head.components["weights"] - own.components["weights"] == 2 * rank * added
    assert head.expected_bytes > own.expected_bytes


def test_axolotls_fused_adapters_save_less_than_pefts():
    fused = plan("activation_checkpointing=none", stack="axolotl", config="qlora")
    apart = plan("activation_checkpointing=none", "kernels.adapters=composite", stack="axolotl", config="qlora")
    assert fused.components["weights"] == apart.components["weights"]
    assert fused.components["activations"] < apart.components["activations"]
    some = plan("activation_checkpointing=none", "kernels.adapters=fused-mlp", stack="axolotl", config="qlora")
    peaks = [answer.memory.requested_bytes for answer in (fused, some, apart)]
    assert peaks == sorted(set(peaks))


def test_axolotl_trains_embedding_and_norms_in_fp32_but_with_flash_attention():
    auto, flash = (
        plan(f"kernels.attention={kernel}", stack="axolotl", config="bf16-adamw") for kernel in ("auto", "flash")
    )
    assert auto.components["weights"] > flash.components["weights"]


def test_integer_products_keep_their_inputs_whatever_checkpointing_says():
    full = "activation_checkpointing=full"
    assert plan(*INT8, full).components["activations"] > 3 * plan(full).components["activations"]
    assert plan(*INT8).components["weights"] < plan().components["weights"]


def test_nanogpts_loop_has_the_next_micro_batch_on_the_device():
    own, next_ = (plan(stack=stack, config="mixed-adamw", model="gpt2") for stack in ("bundled", "nanogpt"))
    assert next_.components["buffers"] - own.components["buffers"] == 16 * 1024


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        (LIGER[:1], {"stack": "bundled"}, "in-place is not modelled for bundled"),
        (
            LIGER[:1],
            {"model": "qwen3-30b-a3b", "config": "bf16-adamw"},
            "of qwen3_moe, as Liger runs it, is not modelled",
        ),
        (("adapter.kind=dora",), {"stack": "axolotl"}, "fused with dora, as axolotl runs it, is not modelled"),
        (
            ("parallel.engine=deepspeed", "parallel.zero_stage=3", "parallel.data=8", "adapter.dtype=bf16"),
            {"stack": "axolotl"},
            "fused under DeepSpeed's stage 3",
        ),
        (("adapter.kind=dora", "adapter.targets=[embed_tokens]"), {"model": "llama-2-7b"}, "embedding"),
        (("adapter.targets=[lm_head]",), {"stack": "torchtune"}, "tied to the embedding"),
        (
            ("weights.hidden_matrix=nf4-torchao", "adapter.targets=[q_proj]"),
            {"stack": "torchtune", "model": "qwen2.5-0.5b"},
            "leaves projections of qwen2 without adapters as floats",
        ),
        (CUT, {"stack": "torchtune"}, "cut-cross-entropy is not modelled for torchtune"),
        (CUT, {"stack": "transformers", "model": "gpt2"}, "has no forward for gpt2"),
        (
            (),
            {"stack": "nanogpt", "config": "mixed-adamw"},
            "models of family llama are not modelled for nanogpt 3adf61e1; gpt, gpt2 are",
        ),
        ((*CUT, "weights=fp32"), {"config": "bf16-adamw"}, "takes a head in bf16 or fp16"),
        (INT8, {"gpu": "v100-16gb"}, "needs compute capability 7.5"),
    ],
)
def test_what_nothing_runs_so_is_refused(settings, options, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        plan(*settings, **options)


def test_trl_keeps_its_own_fused_head():
    with pytest.raises(InvalidFileError, match="trl keeps its own fused head"):
        plan("kernels.loss=fused-linear", stack="trl")
