"""Plans of stacks as they were at older versions."""

import json

import pytest

from memplan.errors import CannotAnswerError
from memplan.library.answers.planned_job import plan_by_share

ROWS = 8


def planned(stack, model="llama-3.2-1b", length=1024):
    sizes = {"micro_batch_size": ROWS, "sequence_length": length}
    return plan_by_share(model, gpu="a100-sxm-80gb", config="bf16-adamw", stack=stack, **sizes, set={"autocast": False})


def test_repeated_keys_and_values_and_copies_stay_until_backward():
    repeated, copied, views = (planned(f"transformers@{at}") for at in ("4.53", "4.55", "4.57"))
    layers, tokens, hidden, grouped = 16, ROWS * 1024, 2048, 512
    retained = [plan.components["activations"] for plan in (repeated, copied, views)]
    attention = layers * tokens * 2  # bytes of one number for each token in all layers
    assert retained[1] - retained[2] == attention * hidden
    assert retained[0] - retained[1] == attention * 2 * (hidden - grouped)


def test_what_ran_otherwise_then_is_refused_by_name():
    with pytest.raises(CannotAnswerError, match="8192 is beyond the window of 4096 tokens"):
        planned("transformers@4.51", "mistral-7b-v0.1", 8192)
    with pytest.raises(CannotAnswerError, match="8192 is beyond the window of 4096 tokens"):
        planned("transformers@4.44", "mistral-7b-v0.1", 8192)
    with pytest.raises(CannotAnswerError, match="models of family gpt_oss are not modelled for transformers"):
        planned("transformers@4.57", "gpt-oss-20b")
    with pytest.raises(CannotAnswerError, match=r"models of family gpt_neox are not modelled for transformers 4\.44;"):
        planned("transformers@4.44", "pythia-1b")
    with pytest.raises(CannotAnswerError, match="is older than"):
        planned("transformers@4.40")
    with pytest.raises(CannotAnswerError, match=r"DoRA of the time of transformers 4\.42"):
        instants_of("transformers@4.42", config="lora", set={"adapter.kind": "dora"})


def test_layers_of_mistral_kept_tables_of_all_positions_up_to_4_41():
    kept, formed = (planned(f"transformers@{at}", "mistral-7b").components["buffers"] for at in ("4.41", "4.43"))
    assert kept - formed == 32 * 2 * 32_768 * 128 * 2


@pytest.mark.parametrize(("model", "times"), [("mistral-7b", 4), ("llama-3-8b", 1)])
def test_mistral_repeated_keys_and_values_for_flash_attn_and_llama_did_not(model, times):
    job = {"config": "lora", "set": {"kernels.attention": "flash"}}
    older, newer = (instants_of(f"transformers@{at}", model, **job)["forward"] for at in ("4.47", "4.48"))
    layers, heads, width, tokens = 32, 8, 128, ROWS * 1024
    repeated = (
        layers * 2 * tokens * heads * width * 2 * times if times > 1 else 0
    )  # the model returns those as they were
    formed = (layers - 1) * 2 * 1024 * width * 2 if times > 1 else 0  # cosines and sines of each layer
    narrow = tokens * 32_000 * 2 if times > 1 else 0  # logits, of which it named those in fp32 alone
    assert abs(older + narrow - newer - repeated - formed) < 2**20


def test_trainer_steps_over_all_parameters_at_once_before_4_54():
    older, newer = (instants_of(f"transformers@{at}", config="bf16-adamw") for at in ("4.53", "4.54"))
    assert older["optimizer step"] - newer["optimizer step"] > 2**30  # the root of every second moment


def test_trl_prepared_weights_beside_codes_up_to_0_25():
    job = {"gpu": "h100", "config": "qlora", "set": {"adapter.dtype": "bf16"}}
    older, newer = (plan_by_share("llama-3.2-1b", stack=f"trl@{at}", **job) for at in ("0.25", "0.26"))
    norms = 2 * 16 + 1
    assert older.components["weights"] - newer.components["weights"] == norms * 2048 * 2


def test_trl_copied_logits_for_the_accuracy_from_0_15_on():
    job = {"config": "lora", "set": {"activation_checkpointing": "full"}}
    older = instants_of("trl@0.15", **job)["forward"]
    assert older > instants_of("transformers@4.51", **job)["forward"]


def held_bytes(length):
    plan = plan_by_share(
        "llama-3.2-1b",
        gpu="h200-sxm-141gb",
        config="bf16-adamw",
        stack="plain-loop",
        micro_batch_size=ROWS,
        sequence_length=length,
    )
    return next(
        instant["requested_bytes"] for instant in plan.to_dict()["instants"] if instant["name"] == "optimizer step"
    )


def test_a_plain_loops_outputs_hold_keys_and_values_until_the_next_forward():
    ids, logits, cache = 3 * 8, 128256 * 2, 2 * 16 * 512 * 2
    assert held_bytes(2048) - held_bytes(1024) == ROWS * 1024 * (ids + logits + cache)


def test_a_config_that_says_so_returns_no_cache(tmp_path):
    shape = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    peaks = []
    for name, use_cache in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({**shape, "architectures": ["LlamaForCausalLM"], "use_cache": use_cache})
        )
        plan = plan_by_share(
            tmp_path / name, gpu="h200-sxm-141gb", config="bf16-adamw", stack="plain-loop", sequence_length=1024
        )
        peaks.append({one["name"]: one["requested_bytes"] for one in plan.to_dict()["instants"]}["optimizer step"])
    assert peaks[0] - peaks[1] == 2 * 2 * 64 * 2 * 1024


def instants_of(stack, model="llama-3.2-1b", **options):
    where = {"gpu": "a100-sxm-80gb", "stack": stack, "micro_batch_size": ROWS, "sequence_length": 1024}
    plan = plan_by_share(model, **{**where, **options})
    return {instant["name"]: instant["requested_bytes"] for instant in plan.to_dict()["instants"]}


def test_up_to_4_48_the_loss_copies_logits_without_each_rows_last_token():
    older, newer = (instants_of(f"transformers@{at}", config="bf16-adamw") for at in ("4.48", "4.49"))
    word = 128_256 * 4
    padded = ROWS * 1025 * 8  # labels, which the newer one pads and names to its end
    assert (
        older["forward"] - newer["forward"] == ROWS * 1023 * word - ROWS * word - padded
    )  # the log-softmax is as short


def test_up_to_4_45_models_name_logits_in_fp32_alone():
    older, newer = (instants_of(f"transformers@{at}", config="bf16-adamw") for at in ("4.45", "4.46"))
    assert newer["forward"] - older["forward"] == ROWS * 1024 * 128_256 * 2
    older, newer = (instants_of(f"transformers@{at}", "mistral-7b", config="bf16-adamw") for at in ("4.45", "4.47"))
    assert newer["forward"] == older["forward"]


def test_hooks_of_frozen_units_retain_what_layers_ran_again_from_and_its_gradient():
    job = {"config": "lora", "gpus": 2, "set": {"parallel.engine": "fsdp1", "activation_checkpointing": "full"}}
    inside, around = (instants_of(f"transformers@{at}", **job)["layer 1 backward"] for at in ("4.52", "4.51"))
    layers, row = 16, ROWS * 1024 * 2048 * 2
    assert around - inside == (2 * (layers - 1) - 1) * row


def test_layers_of_gpt_2_keep_masks_of_all_positions():
    job = {"gpu": "a100-sxm-80gb", "config": "bf16-adamw", "micro_batch_size": 1}
    older, newer = (plan_by_share("gpt2", stack=stack, **job) for stack in ("transformers@4.57", "transformers"))
    persistent = [plan.memory.persistent_bytes for plan in (older, newer)]
    assert persistent[0] == persistent[1]  # weights and states; masks are among the buffers
    steps = [
        next(i["requested_bytes"] for i in plan.to_dict()["instants"] if i["name"] == "optimizer step")
        for plan in (older, newer)
    ]
    assert steps[0] - steps[1] >= 12 * (1024**2 + 4)


@pytest.mark.parametrize(("model", "layers", "width"), [("gemma-3-1b", 26, 256), ("command-r7b", 32, 8 * 128)])
def test_gemma_3_and_cohere_2_made_no_cache_where_they_trained(model, layers, width):
    job = {"config": "lora", "gpu": "h200-sxm-141gb", "set": {"activation_checkpointing": "none"}}
    older, newer = (instants_of(at, model, **job)["optimizer step"] for at in ("plain-loop@4.57", "plain-loop"))
    assert newer - older == layers * 2 * width * ROWS * 1024 * 2


def test_eager_attention_of_gpt_2_was_given_a_mask_of_keys_up_to_4_51():
    job = {"config": "lora", "set": {"kernels.attention": "eager", "activation_checkpointing": "full"}}
    older, newer = (instants_of(f"transformers@{at}", "gpt2", **job)["head backward"] for at in ("4.51", "4.53"))
    assert newer - older == ROWS * 1024 * (1024 - 1) * 2


@pytest.mark.parametrize(("at", "runs"), [("4.55", False), ("4.57", False), ("5.23", True)])
def test_layers_of_gpt_bigcode_were_never_run_again_from_4_54_to_4_57(at, runs):
    peaks, notes = [], []
    for asked in ("none", "full"):
        options = {"config": "lora", "gpu": "h200-sxm-141gb", "set": {"activation_checkpointing": asked}}
        plan = plan_by_share("starcoderbase-1b", stack=f"transformers@{at}" if at < "5" else "transformers", **options)
        peaks.append(plan.memory.requested_bytes)
        notes.append(str(plan.to_dict()))
    assert (peaks[1] < peaks[0] * 0.7) is runs
    assert ("its code never runs one again" in notes[1]) is not runs
    assert "its code never runs one again" not in notes[0]


def test_layers_of_gptj_kept_masks_of_all_positions_up_to_4_44():
    job = {"config": "lora", "gpu": "h200-sxm-141gb", "micro_batch_size": 1}
    older, newer = (instants_of(f"transformers@{at}", "gpt-j-6b", **job)["optimizer step"] for at in ("4.44", "4.45"))
    assert 0 <= older - newer - 28 * (2048**2 + 4) < 2**16


def test_gptj_turned_heads_in_fp32_up_to_4_55():
    job = {"config": "lora", "gpu": "h200-sxm-141gb", "micro_batch_size": 1}
    older, newer = (instants_of(f"transformers@{at}", "gpt-j-6b", **job)["forward"] for at in ("4.55", "4.56"))
    rows, entries, layers = 1024, 64, 28
    assert older - newer >= layers * 2 * rows * entries * 2  # sines and cosines that each layer's graph keeps


def test_gpt_neox_formed_its_loss_of_logits_as_they_were_up_to_4_48():
    job = {"config": "lora", "gpu": "h200-sxm-141gb", "micro_batch_size": 1}
    of = {at: instants_of(at, "pythia-1b", **job) for at in ("plain-loop@4.48", "plain-loop@4.49")}
    older, newer = of.values()
    words = 50_304 * 1024
    kept = 16 * (2048**2 + 4)  # masks of all positions that layers kept
    # beside logits in bf16: their log-softmax in bf16, where there were a copy and a log-softmax in fp32
    gone = older["loss backward"] - kept - newer["loss backward"]
    assert -words * 8 < gone < -words * 4


def test_torchs_attention_ran_gemma_2_without_its_caps_of_scores_up_to_4_57():
    job = {"config": "lora", "gpu": "h200-sxm-141gb", "set": {"activation_checkpointing": "none"}}
    eager = {**job, "set": {**job["set"], "kernels.attention": "eager"}}
    older, newer = (instants_of(at, "gemma-2-2b", **job)["forward"] for at in ("plain-loop@4.57", "plain-loop"))
    heads, layers = 8, 26
    assert newer - older > layers * ROWS * heads * 1024 * 1024 * 4
    older, newer = (instants_of(at, "gemma-2-2b", **eager) for at in ("transformers@4.57", "transformers"))
    assert abs(older["layer 1 backward"] / newer["layer 1 backward"] - 1) < 0.01


def test_windowed_layers_of_gemma_2_made_masks_of_their_own_up_to_4_51():
    options = {"config": "lora", "gpu": "h200-sxm-141gb"}
    with pytest.raises(CannotAnswerError, match=r"other attention of family gemma2 than eager .* use eager"):
        planned("transformers@4.51", "gemma-2-2b")
    masks = {"kernels.attention": "eager", "activation_checkpointing": "full"}
    older, newer = (instants_of(f"transformers@{at}", "gemma-2-2b", set=masks, **options) for at in ("4.51", "4.53"))
    square = ROWS * 1024 * 1024
    # a model's second mask was a layer's, with its flags
    assert older["head backward"] - newer["head backward"] == pytest.approx(-2 * square, rel=1e-4)
    assert older["layer 1 backward"] - newer["layer 1 backward"] == pytest.approx(square, rel=1e-2)


def test_a_gemma_2_of_windowed_layers_alone_makes_their_masks(tmp_path):
    length, config = 1024, {"model_type": "gemma2", "num_hidden_layers": 1, "hidden_size": 128, "vocab_size": 512}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 64}
    needs = []
    for kind in ("sliding_attention", "full_attention"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": [kind]}))
        plan = plan_by_share(
            str(tmp_path), stack="torchtune", gpu="a100-80gb", micro_batch_size=1, sequence_length=length
        )
        needs.append(dict(plan.instants)["forward"])
    assert needs[0] - needs[1] == 2 * 4 * length**2  # ones and the window, in fp32


def test_falcon_gave_torchs_attention_no_mask_up_to_4_57():
    job = {"config": "lora", "gpu": "h200-sxm-141gb", "set": {"activation_checkpointing": "full"}}
    older, newer = (instants_of(at, "falcon-7b", **job)["head backward"] for at in ("plain-loop@4.57", "plain-loop"))
    assert newer - older == ROWS * 1024 * 1024


def test_what_products_with_codes_were_given_stays_beside_the_next_rows_in_litgpt_up_to_0_5_4():
    job = {"config": "lora", "set": {"adapter.targets": ["q_proj", "v_proj"], "weights.hidden_matrix": "nf4"}}
    older, newer = (instants_of(f"litgpt@{at}", "llama-2-7b", **job) for at in ("0.5.4", "0.5.13"))
    tokens, hidden, intermediate = ROWS * 1024, 4096, 11008
    own = (
        32 * (2 * hidden + intermediate) + 31 * hidden + hidden
    )  # of the first layer's first product nothing needs a gradient
    assert own * tokens * 2 == pytest.approx(older["layer 1 backward"] - newer["layer 1 backward"], rel=0.01)
    assert own * tokens * 2 < older["forward"] - newer["forward"] < 2 * own * tokens * 2


def test_litgpt_put_no_embedding_in_the_place_of_the_models_up_to_0_4():
    job = {"config": "lora", "set": {"adapter.targets": ["q_proj", "v_proj"], "weights.hidden_matrix": "nf4"}}
    older, newer = (instants_of(f"litgpt@{at}", "llama-2-7b", **job) for at in ("0.4.13", "0.5.0"))
    given = ROWS * 1024 * 4096 * 2  # what its norm makes the first layer's product keep, too
    table = 32_000 * 4096 * 2
    assert newer["optimizer step"] - older["optimizer step"] == pytest.approx(2 * table + given, rel=0.001)


def test_torchtitan_compiled_layers_and_no_loss_in_2024():
    job = {"gpu": "h100-sxm-80gb", "gpus": 8, "config": "mixed-adamw", "micro_batch_size": 2, "sequence_length": 8192}
    plans = [
        plan_by_share("llama-3.1-8b", stack=f"torchtitan@{at}", **job, set={"compile": "layers"})
        for at in ("0.0.2", "0.1.0")
    ]
    word = (
        2 * 8192 * 128_256 * 4
    )  # logits in fp32, their softmax and its gradient, of which a compiled loss has the last
    difference = plans[0].components["logits"] - plans[1].components["logits"]
    assert difference == pytest.approx(2 * word, abs=8)
