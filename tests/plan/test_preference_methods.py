"""Plans of steps on preferences, as a user sees them."""

import json

import pytest

import memplan
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share


def plan(config="qlora", **settings):
    given = {f"method.{key}": value for key, value in settings.items() if key != "batch"}
    return plan_by_share(
        "llama-3.2-1b", gpu="h100", config=config, stack="trl", micro_batch_size=settings.get("batch", 2), set=given
    )


def part(plan, name):
    return plan.components.get(name, 0)


def test_a_pair_is_two_rows_of_a_micro_batch():
    pairs = plan(stage="dpo", reference_model="precomputed")
    assert pairs.memory.requested_bytes == pytest.approx(plan(batch=4).memory.requested_bytes, rel=0.002)


def test_a_resident_reference_has_the_weights_once_more_and_no_gradients():
    alone, beside = (plan("bf16-adamw", stage="dpo", reference_model=kind) for kind in ("precomputed", "resident"))
    assert part(beside, "weights") == 2 * part(alone, "weights")
    assert part(beside, "optimizer_states") == part(alone, "optimizer_states")


def test_adapters_are_switched_off_for_the_reference_unless_a_copy_is_asked_for():
    assert plan(stage="dpo").training["method"]["reference_model"] == "adapter-off"
    assert part(plan(stage="dpo"), "weights") == part(plan(), "weights")
    assert part(plan(stage="dpo", reference_model="resident"), "weights") > part(plan(), "weights")


def test_kto_takes_one_row_for_each_answer():
    assert plan(stage="kto").memory.requested_bytes < plan(stage="dpo").memory.requested_bytes


def test_a_reward_model_has_one_score_for_each_token_and_no_logits():
    reward = plan("bf16-adamw", stage="reward")
    pairs = plan("bf16-adamw", stage="dpo", reference_model="precomputed")
    assert part(reward, "logits") < 1e-3 * part(pairs, "logits") + 2**20
    assert reward.memory.requested_bytes < pairs.memory.requested_bytes
    with pytest.raises(InvalidFileError, match="has no reference model"):
        plan(stage="reward", reference_model="resident")


def test_llama_factorys_reward_model_forms_logits_and_a_loss_that_nobody_looks_at():
    def factory(stage, config="bf16-adamw"):
        settings = {"method.stage": stage, "weights.default": "bf16", "micro_batch_size": 1}
        return plan_by_share("llama-3.1-8b", gpu="h200", config=config, stack="llama-factory", set=settings)

    # No gradient comes to the model's own head; that of values is in fp32 whatever the model is in.
    reward, sft, head, values = factory("reward"), factory("sft"), 128_256 * 4096, 4096 + 1
    assert part(reward, "weights") == part(sft, "weights") + 4 * values
    assert part(reward, "gradients") == part(sft, "gradients") - 2 * head + 4 * values
    assert part(reward, "optimizer_states") == part(sft, "optimizer_states") - 2 * 2 * head + 2 * 4 * values + 4
    adapted, alone = (part(factory(stage, "lora"), "optimizer_states") for stage in ("reward", "sft"))
    assert adapted == alone + 2 * (4 * values + 4)
    assert any("to which no gradient comes" in text for text in reward.to_dict()["assumptions"])


def classifier(model="llama-3.2-1b", config="bf16-adamw", **settings):
    given = {"method.stage": "classification", **settings}
    return plan_by_share(model, gpu="h100", config=config, stack="transformers", set=given)


def test_a_head_of_classes_has_one_score_for_each_and_is_trained_beside_adapters():
    two, many = (classifier(**{"method.labels": labels}) for labels in (2, 1002))
    assert classifier().training["method"]["labels"] == 2
    assert part(many, "weights") - part(two, "weights") == 1000 * 2048 * 2
    assert part(many, "optimizer_states") - part(two, "optimizer_states") >= 1000 * 2048 * 4
    two, many = (classifier(config="lora", **{"method.labels": labels}) for labels in (2, 1002))
    # a copy of the module is trained, and the original stays
    assert part(many, "weights") - part(two, "weights") == 2 * 1000 * 2048 * 2


def test_families_without_a_head_of_scores_are_refused():
    with pytest.raises(CannotAnswerError, match="no head of scores for cohere2"):
        classifier("command-r7b")


def test_dropout_that_is_a_function_stays_where_the_trainer_switches_modules_off():
    """``disable_dropout_in_model`` finds modules: GPT-2's are, Seed-OSS calls ``nn.functional.dropout``."""
    for name, told in (("gpt2", 0.0), ("seed-oss-36b", 0.1)):
        answer = plan_by_share(name, gpu="h200", config="lora", stack="trl", set={"method.stage": "reward"})
        assert answer.training["dropout"] == told


def test_transformers_drops_attentions_weights_and_no_residual_stream_of_llama(tmp_path):
    keys = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
    }
    sizes = []
    for given in (0.0, 0.1):
        data = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_dropout": given, **keys}
        (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
        answer = plan_by_share(
            str(tmp_path), gpu="h100", config="bf16-adamw", stack="transformers", set={"kernels.attention": "flash"}
        )
        sizes.append(answer.memory.requested_bytes)
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stage": "sft", "labels": 3}, "no classes"),
        ({"stage": "classification", "labels": 0}, "expected a whole number from 1"),
        ({"stage": "sft", "reference_model": "resident"}, "has no reference model"),
        ({"stage": "dpo", "reference_model": "none"}, "compares with a reference model"),
        ({"stage": "kto", "batch": 1}, "at least 2"),
        ({"stage": "dpoo"}, "did you mean 'dpo'"),
        ({"stage": "orpo", "reference_model": "resident"}, "has no reference model"),
        ({"stage": "orpo", "chosen_nll": False}, "leave it out"),
        ({"stage": "dpo", "chosen_nll": True}, "no such second loss"),
    ],
)
def test_contradictions_are_refused(settings, said):
    with pytest.raises(InvalidFileError, match=said):
        plan(**settings)


def test_there_is_nothing_to_switch_off_without_adapters():
    with pytest.raises(InvalidFileError, match="no adapters to switch off"):
        plan("bf16-adamw", stage="dpo", reference_model="adapter-off")


@pytest.mark.parametrize(
    ("stack", "settings", "way"),
    [
        ("trl@1.14", {"method.stage": "kto", "micro_batch_size": 2}, ".*its newest version runs it: --stack trl$"),
        ("torchtune", {}, ".* are sft$"),
        ("trl", {"method.stage": "classification"}, ".*transformers' Trainer runs it: --stack transformers$"),
        ("torchtune", {"method.stage": "classification"}, ".* are sft; .*: --stack transformers$"),
        ("llama-factory", {"method.stage": "cpo"}, ".*--stack trl$"),
        ("llama-factory", {"method.stage": "reward", "parallel.data": 2}, " on several GPUs"),
        ("llama-factory", {"method.stage": "reward", "evaluation": True}, " as it evaluates"),
        ("llama-factory", {"method.stage": "reward", "adapter.modules_to_save": ["lm_head"]}, " with copies"),
        ("trl", {"parallel.data": 2, "parallel.zero_stage": 3, "parallel.engine": "fsdp1", "evaluation": True}, ""),
        ("trl@0.29", {"parallel.data": 2}, "; as TRL's newest version does: --stack trl$"),
        ("trl@1.12", {"method.stage": "simpo"}, ".*its newest version runs it: --stack trl$"),
        ("trl", {"method.stage": "orpo", "parallel.data": 2, "parallel.zero_stage": 3}, ""),
    ],
)
def test_steps_that_nothing_follows_are_refused(stack, settings, way):
    keys = {"method.stage": "dpo", **settings}
    with pytest.raises(CannotAnswerError, match=f"not modelled{way}"):
        plan_by_share("llama-3.2-1b", gpu="h100", config="lora", stack=stack, set=keys)


def test_log_probabilities_of_whole_logits_take_what_older_versions_copy_of_them():
    tokens, vocabulary, each = 2 * 2 * 2048, 128_256, []
    for stack in ("trl", "trl@1.14", "trl@1.12", "trl@0.29"):
        answer = plan_by_share(
            "llama-3.2-1b", gpu="h100", config="lora", stack=stack, micro_batch_size=2, set={"method.stage": "dpo"}
        )
        each.append(part(answer, "logits") / (tokens * vocabulary))
    assert each == pytest.approx([0, 10, 12, 18], abs=0.5)


def test_a_second_loss_over_the_chosen_answers_needs_a_copy_and_a_softmax_of_their_logits():
    tokens, vocabulary = 2 * 2 * 2048, 128_256
    with_it, without = (
        part(plan("lora", stage="simpo", chosen_nll=nll), "logits") / (tokens * vocabulary) for nll in (True, False)
    )
    assert (with_it, without) == pytest.approx((10, 8), abs=0.1)
    assert part(plan("lora", stage="orpo"), "logits") == pytest.approx(with_it * tokens * vocabulary, rel=0.001)


@pytest.mark.parametrize(("stage", "stack"), [("orpo", "trl"), ("dpo", "trl@0.29"), ("simpo", "llama-factory")])
def test_the_keys_of_a_plan_are_a_config_of_the_same_plan(stage, stack, tmp_path):
    first = plan_by_share("llama-3.2-1b", gpu="h100", config="lora", stack=stack, set={"method.stage": stage})
    path = tmp_path / "again.yaml"
    path.write_text(json.dumps({**first.training, "description": "again"}))
    assert plan_by_share("llama-3.2-1b", gpu="h100", config=path).expected_bytes == first.expected_bytes


def test_llama_factory_takes_the_softmax_of_both_models_whole_logits():
    vocabulary, each = 128_256, []
    for stage, rows in (("dpo", 4), ("orpo", 4), ("kto", 2)):
        answer = plan_by_share(
            "llama-3.2-1b",
            gpu="h100",
            config="lora",
            stack="llama-factory",
            micro_batch_size=2,
            set={"method.stage": stage},
        )
        each.append((part(answer, "logits") + part(answer, "temporaries")) / (rows * 2048 * vocabulary))
    assert each == pytest.approx([20, 12, 24], abs=0.2)


def test_ms_swift_looks_at_whole_logits_row_by_row_and_copies_none():
    """The graph keeps them in fp32; in backward there are their gradient and a part of it that is added, as large each."""
    each = []
    for stage, rows in (("dpo", 4), ("kto", 2), ("simpo", 4)):
        keys = {"method.stage": stage} | ({"method.chosen_nll": False} if stage == "simpo" else {})
        answer = plan_by_share(
            "llama-3.2-1b", gpu="h100", config="lora", stack="ms-swift", micro_batch_size=2, set=keys
        )
        each.append((part(answer, "logits") + part(answer, "temporaries")) / (rows * 2048 * 128_256))
    assert each == pytest.approx([12, 12, 12], abs=0.2)


def test_ms_swift_compares_one_answer_and_computes_reference_log_probabilities_in_each_step():
    keys = {"config": "lora", "stack": "ms-swift", "gpu": "h100"}
    assert plan_by_share("llama-3.2-1b", micro_batch_size=1, set={"method.stage": "kto"}, **keys).expected_bytes
    known = {"method.stage": "dpo", "method.reference_model": "precomputed"}
    with pytest.raises(CannotAnswerError, match="in each step; use adapter-off"):
        plan_by_share("llama-3.2-1b", set=known, **keys)


def test_replicas_of_ms_swift_are_not_checkpointed_as_one_gpu_is():
    one, two = (
        plan_by_share("llama-3.2-1b", config="lora", stack="ms-swift", gpu="h100", set={"parallel.data": data})
        for data in (1, 2)
    )
    assert one.memory.setup.stack.checkpointing.reentrant
    assert not two.memory.setup.stack.checkpointing.reentrant


def test_odds_of_quantised_models_stand_on_norms_in_fp32_and_embeddings_in_bf16():
    paired, alone = (plan("qlora", stage=stage) for stage in ("orpo", "sft"))
    norms, adapters = (2 * 16 + 1) * 2048, 11_272_192  # Llama 3.2 1B: parameters of norms, and of adapters of rank 16
    assert part(paired, "weights") - part(alone, "weights") == 2 * (norms + adapters)


@pytest.mark.parametrize(("stage", "head", "norm"), [("cpo", "bf16", "fp32"), ("sft", "bf16", "bf16")])
def test_a_head_that_is_cast_back_takes_its_bias_with_it(stage, head, norm):
    states = plan_by_share("phi-2", gpu="h100", config="qlora", stack="trl", set={"method.stage": stage}).memory.states
    formats = {entry.tensor.name: entry.format_name for entry in states.tensors}
    assert (formats["lm_head.bias"], formats["model.final_layernorm.bias"]) == (head, norm)


@pytest.mark.parametrize(
    ("config", "keys", "said"),
    [
        ("qlora", {"adapter.kind": "dora"}, "casts DoRA's magnitudes"),
        ("bf16-adamw", {"method.reference_model": "precomputed"}, "keeps the reference model"),
        ("lora", {"kernels.loss": "fp32"}, "leave it out"),
    ],
)
def test_what_older_versions_do_otherwise_is_refused(config, keys, said):
    with pytest.raises(CannotAnswerError, match=said):
        plan_by_share("llama-3.2-1b", gpu="h100", config=config, stack="trl@0.29", set={"method.stage": "dpo", **keys})


def rolled(attention="auto", **rollout):
    engine = {"engine": "vllm", "completion_length": 1024, **rollout}
    keys = {f"method.rollout.{key}": value for key, value in engine.items()} | {"kernels.attention": attention}
    return plan_by_share(
        "llama-3.2-1b", gpu="h100", config="lora", stack="trl", micro_batch_size=2, set={"method.stage": "grpo", **keys}
    )


def test_an_engine_on_the_same_gpu_takes_the_share_that_is_stated_and_a_server_none():
    beside, elsewhere = rolled(engine_fraction=0.25), rolled(engine="server")
    assert part(beside, "generation_engine") == pytest.approx(beside.memory.usable_bytes / 4, rel=1e-6)
    assert beside.memory.device_bytes - elsewhere.memory.device_bytes == part(beside, "generation_engine")
    assert not part(elsewhere, "generation_engine")


def test_an_engine_that_sleeps_has_what_a_step_lets_go_of():
    awake, asleep = rolled(), rolled(sleeps=True)
    step = sum(part(awake, name) for name in ("gradients", "activations", "logits", "temporaries"))
    assert part(asleep, "generation_engine") == part(awake, "generation_engine") - step


@pytest.mark.parametrize(("sleeps", "fraction"), [(False, 0.5), (True, 0.5), (True, 0.98)])
def test_the_largest_batch_beside_an_engine_fits_and_the_next_does_not(sleeps, fraction):
    keys = {"method.stage": "grpo", "method.rollout.engine": "vllm", "method.rollout.sleeps": sleeps}
    job = {"gpu": "h100", "config": "lora", "stack": "trl", "micro_batch_size": 2}
    keys["method.rollout.engine_fraction"] = fraction
    (row,) = memplan.largest("llama-3.2-1b", of="batch", set=keys, **job).rows
    assert (row.fits.value == 0) == (fraction > 0.9)
    assert row.plan is None or row.plan.verdict == "fits"
    assert row.following.verdict != "fits"


def test_no_sequence_is_sought_that_completions_fill():
    keys = {"method.stage": "grpo", "method.rollout.engine": "server", "method.rollout.completion_length": 1900}
    job = {"config": "lora", "stack": "trl", "micro_batch_size": 8, "set": keys}
    values = [
        memplan.largest("qwen3-8b", of="sequence", gpu=gpu, **job).rows[0].fits.value for gpu in ("rtx4090", "h100")
    ]
    assert values[0] == 0
    assert values[1] > 1900


def test_only_tokens_that_were_generated_have_log_probabilities():
    few, many = rolled(completion_length=64), rolled(completion_length=2000)
    few, many = dict(few.instants), dict(many.instants)
    tile = 2 * (2000 - 64) * 32_768 * 2  # two rows, in bf16
    assert many["loss backward"] - few["loss backward"] > tile / 2
    assert few["layer 1 backward"] < many["layer 1 backward"] < few["layer 1 backward"] + tile / 1000


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"method.rollout.completion_length": 2048}, "expected 1 to sequence_length less one"),
        ({"method.rollout.micro_batches": 0}, "expected a whole number from 1"),
        ({"micro_batch_size": 1}, "of which it takes at least 2"),
        ({"method.rollout.engine_fraction": 1.5}, "a share of the GPU"),
        ({"method.stage": "dpo", "method.rollout.engine": "vllm"}, "generates nothing"),
        ({"method.reference_model": "precomputed"}, "generated as it trains"),
    ],
)
def test_contradictions_of_what_is_generated_are_refused(keys, said):
    with pytest.raises(InvalidFileError, match=said):
        plan_by_share("llama-3.2-1b", gpu="h100", config="lora", stack="trl", set={"method.stage": "grpo", **keys})


def test_a_model_that_generates_itself_caches_keys_and_values_of_all_rows_of_a_step():
    few, many = (
        dict(rolled(engine="transformers", completion_length=2000, micro_batches=count).instants)["generation"]
        for count in (8, 16)
    )
    cached = 8 * 2 * 2047 * 16 * 2 * 512 * 2  # rows, tokens, layers, keys and values of 8 heads of 64, in bf16
    assert cached < many - few < 1.2 * cached


def test_single_tokens_attend_step_by_step_to_copies_of_keys_and_values_for_each_head():
    eager, kernel = (
        dict(rolled(engine="transformers", completion_length=2000, micro_batches=16, **more).instants)["generation"]
        for more in ({"attention": "eager"}, {})
    )
    repeated = 16 * 2 * 2047 * 2 * 2048 * 2  # rows, tokens, keys and values of 32 heads of 64, in bf16
    assert 0.9 * repeated < eager - kernel < 1.5 * repeated


@pytest.mark.parametrize(
    ("model", "stack", "keys"),
    [
        ("lfm2-1.2b", "trl", {}),
        ("llama-3.2-1b", "trl@0.29", {}),
        ("llama-3.2-1b", "trl@1.6", {}),
        ("llama-3.2-1b", "trl", {"evaluation": True}),
    ],
)
def test_what_generation_is_not_followed_is_refused(model, stack, keys):
    given = {"method.stage": "grpo", "micro_batch_size": 2, **keys}
    with pytest.raises(CannotAnswerError, match="not modelled"):
        plan_by_share(model, gpu="h100", config="lora", stack=stack, set={**given, "adapter.targets": ["q_proj"]})


def test_whole_logits_of_completions_are_those_of_older_versions():
    keys = {"method.stage": "grpo", "method.rollout.engine": "vllm", "method.rollout.completion_length": 1000}
    older = plan_by_share("llama-3.2-1b", gpu="h100", config="lora", stack="trl@0.29", micro_batch_size=2, set=keys)
    assert part(older, "logits") / (2 * 1000 * 128_256) == pytest.approx(12, abs=2)


@pytest.mark.parametrize("stage", ["dpo", "grpo"])
def test_replicas_have_buckets_for_gradients_besides(stage):
    keys = {"method.stage": stage, "micro_batch_size": 2}
    keys |= {"method.rollout.engine": "server"} if stage == "grpo" else {}
    alone, many = (
        plan_by_share("llama-3.2-1b", gpu="h100", config="lora", stack="trl", set={**keys, "parallel.data": ranks})
        for ranks in (1, 8)
    )
    assert part(many, "communication") > part(alone, "communication") == 0
