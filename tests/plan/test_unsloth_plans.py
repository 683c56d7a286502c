"""unsloth's scripts, planned: what waits in host memory, pieces of the loss by card, and what is refused."""

import pytest

import memplan
from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share
from memplan.plan.reserve.simulation import simulated
from memplan.step.blocks.fused_adapters import run_together
from memplan.step.kernels.loss_pieces import has_all_words, next_rows, piece_rows

LAYERS, HIDDEN, BYTES = 32, 4096, 2  # of Llama-3.1-8B


def planned(batch=2, length=2048, gpu="rtx4090", model="llama-3.1-8b", config="qlora", **keys):
    settings = {"stack": "unsloth", "micro_batch_size": batch, "sequence_length": length, **keys}
    return plan_by_share(model, gpu=gpu, config=config, set=settings).memory


def at_last_layer(plan):
    return dict(plan.instants)[f"layer {LAYERS} backward"]


def stream_bytes(batch, length):
    return batch * length * HIDDEN * BYTES


def test_inputs_of_layers_wait_in_host_memory_but_for_four_tensors_of_their_size():
    own, full = planned(), planned(activation_checkpointing="full")
    assert own.setup.config.offload.activations == "cpu"
    assert full.setup.config.offload.activations == "none"
    kept = 4  # the embedding's result, the last layer's input, two buffers for what comes back
    assert at_last_layer(full) - at_last_layer(own) == (LAYERS - kept) * stream_bytes(2, 2048)


@pytest.mark.parametrize(("gpu", "allocator"), [("rtx4090", "expandable"), ("mi300x", "native")])
def test_expandable_segments_are_asked_for_on_nvidias_cards_alone(gpu, allocator):
    plan = planned(gpu=gpu)
    assert plan.setup.config.allocator == allocator
    assert plan.setup.reserve_share.allocator == allocator


def test_inputs_of_no_more_than_2_mib_stay_on_the_card():
    assert stream_bytes(1, 256) == 2 * 1024**2
    assert planned(1, 256).requested_bytes == planned(1, 256, activation_checkpointing="full").requested_bytes
    assert at_last_layer(planned(1, 257)) < at_last_layer(planned(1, 257, activation_checkpointing="full"))


def test_host_memory_has_the_inputs_of_all_layers_but_the_last():
    buffers = 200 * 256 * 1024  # pinned before the first step
    assert planned().host.bytes == (LAYERS - 1) * stream_bytes(2, 2048) + buffers
    assert planned(1, 256).host.bytes == buffers
    assert not planned(activation_checkpointing="full").host.tensors


def test_only_a_stack_that_keeps_inputs_of_layers_on_the_host_is_told_to():
    told = {
        name: {
            one.change for one in memplan.plan("llama-3.1-8b", gpu="rtx3060-12gb", config="lora", set=keys).suggestions
        }
        for name, keys in (
            ("transformers", {"stack": "transformers"}),
            ("unsloth", {"stack": "unsloth", "activation_checkpointing": "full"}),
        )
    }
    assert "offload.activations=cpu" in told["unsloth"]
    assert "offload.activations=cpu" not in told["transformers"]


def test_events_of_a_run_add_up_to_the_peak_with_inputs_in_host_memory():
    assert simulated(planned()).reserve_by_share == ""


def test_a_large_card_forms_logits_of_all_words_in_a_short_micro_batch_alone():
    small, large = planned(1, 4096), planned(1, 4096, gpu="a100-sxm-80gb")
    assert (small.setup.profile.loss, large.setup.profile.loss) == ("tiled-linear", "pieced-linear")
    assert [has_all_words("pieced-linear", 128256, tokens) for tokens in (4096, 4097)] == [True, False]
    assert not has_all_words("tiled-linear", 128256, 10)
    assert has_all_words("tiled-linear", 32768, 10_000)


def test_pieces_of_all_words_have_about_as_many_logits():
    sizes = {words: piece_rows(words, 4096, whole=True) for words in (1000, 32000, 49152, 128256, 256000)}
    assert sizes == {1000: 4096, 32000: 2048, 49152: 1024, 128256: 512, 256000: 512}
    # steps seen in what the loss allocates: words are padded to a multiple of 8
    assert [piece_rows(words, 4096, whole=True) for words in (18992, 18993, 37984, 37985)] == [4096, 2048, 2048, 1024]
    assert [piece_rows(words, 10_000 * 12288, whole=True) for words in (29992, 30000)] == [4096, 2048]
    assert [next_rows(rows, 2048, whole=True) for rows in (2048, 3000, 4096)] == [0, 0, 2048]
    assert [next_rows(rows, 4096, whole=False) for rows in (4096, 5000, 9000)] == [0, 904, 4096]


def test_sequences_are_padded_for_cudnn_by_1_to_128_tokens_on_h100():
    keys = {"activation_checkpointing": "none", "config": "lora"}
    more = [
        at_last_layer(planned(1, length, gpu="h100-sxm", **keys))
        - at_last_layer(planned(1, length, gpu="a100-sxm-80gb", **keys))
        for length in (2048, 2047)
    ]
    heads, groups, width, statistics = 32, 8, 128, 4
    token = LAYERS * ((2 * heads + 2 * groups) * width * BYTES + heads * statistics)
    random = LAYERS * (24 - 16)  # flash has one number more, which it does not use
    assert [round((one + random) / token) for one in more] == [128, 1]


@pytest.mark.parametrize(
    ("name", "together"),
    [
        ("model.layers.3.self_attn.k_proj", ["q_proj", "k_proj", "v_proj"]),
        ("model.layers.3.self_attn.o_proj", ["o_proj"]),
        ("model.layers.3.mlp.up_proj", ["gate_proj", "up_proj", "down_proj"]),
        ("lm_head", ["lm_head"]),
    ],
)
def test_projections_run_together_by_name(name, together):
    part = name.rpartition(".")[0]
    assert run_together(name) == [f"{part}.{other}" if part else other for other in together]


def test_codes_are_decoded_into_a_buffer_where_all_projections_of_one_function_have_adapters():
    own = {"gradient_accumulation_steps": 1, "weights": {"default": "bf16", "hidden_matrix": "nf4-dq"}}
    by_targets = {}
    for targets in (["q_proj", "v_proj"], ["o_proj", "v_proj"]):
        plan = planned(1, 256, **own, **{"adapter.targets": targets})
        by_targets[targets[0]] = dict(plan.instants)["end of backward"]
    buffer = HIDDEN * HIDDEN * BYTES
    assert by_targets["o_proj"] - by_targets["q_proj"] == buffer


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"config": "bf16-adamw"}, "adapter: training all weights"),
        ({"adapter.dropout": 0.1}, "adapter.dropout: dropout before adapters"),
        ({"adapter.targets": ["q_proj", "lm_head"]}, "adapters on lm_head are not modelled of stack unsloth"),
        ({"gpu": "t4"}, "kernels.attention: another attention"),
        ({"gpu": "b200"}, "kernels.attention: what unsloth takes instead of cuDNN on"),
        ({"kernels.attention": "flash"}, "kernels.attention: flash is not modelled for unsloth"),
        ({"model": "gemma-2b"}, "models of family gemma are not modelled for unsloth"),
        ({"model": "mistral-7b-v0.1", "length": 8192}, "8192 is beyond the window of 4096 tokens"),
        ({"evaluation": True}, "evaluation: evaluation"),
        ({"activation_checkpointing": "selective"}, "activation_checkpointing: selective is not modelled"),
    ],
)
def test_other_paths_through_unsloths_code_are_refused_by_name(keys, reason):
    with pytest.raises(CannotAnswerError, match=reason):
        planned(**keys)


SCRIPT = """\
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Meta-Llama-3.1-8B-bnb-4bit", max_seq_length=8192, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, lora_dropout=0, use_gradient_checkpointing=True, loftq_config=None)
SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=8, optim="adamw_8bit"))
"""


def test_a_script_is_planned_and_its_fixes_are_in_its_own_words(cli, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    answer = memplan.plan(str(path), gpu="rtx4090")
    assert (answer.verdict, answer.memory.setup.stack.name) == ("no", "unsloth")
    assert [one.change for one in answer.suggestions if one.flips_verdict][1] == "offload.activations=cpu"
    assert "use_gradient_checkpointing: unsloth" in cli("fit", path, "--gpu", "rtx4090").out
