"""Files that name no model and give its shapes, files of trainers that are only recognised, and what a pattern selects."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.errors import CannotAnswerError, InvalidFileError, UnknownKeyWarning
from memplan.importer.sources.module_patterns import selected_linears
from memplan.library.answers.planned_job import plan_by_share
from memplan.library.lookup.__init__ import open_catalog
from memplan.library.lookup.model_lookup import Shapes, find_model
from memplan.model.inventory import parameter_count

from .test_import_files import written

GPT3 = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --max-position-embeddings 2048 --seq-length 2048 --micro-batch-size 1 --bf16 --merge-file m --vocab-file v"
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    " --max-position-embeddings 8192 --seq-length 8192 --micro-batch-size 1 --bf16 --vocab-size 128256"
    " --untie-embeddings-and-output-weights"
)


def command(folder, line, program="pretrain_gpt.py"):
    return written(folder, json.dumps({"commands": [["python", program, *line.split()]]}), "job.argv.json")


def model(path, **shapes):
    return find_model(str(path), Shapes(**shapes), open_catalog(None))


def test_megatrons_flags_are_a_model(tmp_path):
    # https://arxiv.org/abs/2005.14165, table 2.1: 175.0B; with biases, LayerNorms and 2,048 learned positions
    gpt3 = model(command(tmp_path, GPT3))
    hidden, layers = 12288, 96
    layer = 12 * hidden**2 + 13 * hidden
    assert parameter_count(gpt3.inventory) == layers * layer + (50257 + 2048) * hidden + 2 * hidden
    catalog = open_catalog(None)
    expected = find_model("llama-3-8b", Shapes(), catalog)
    assert parameter_count(model(command(tmp_path, LLAMA)).inventory) == parameter_count(expected.inventory)


def test_groups_of_queries_count_only_where_they_are_asked_for(tmp_path):
    without = model(command(tmp_path, LLAMA.replace("--group-query-attention", "")))
    assert without.spec.runs[0].layer.attention.num_key_value_heads == 32
    swiglu = model(command(tmp_path, LLAMA.replace("--ffn-hidden-size 14336", "")))
    assert swiglu.spec.runs[0].layer.feed_forward.intermediate_size == 10880


def test_a_tokenizer_whose_size_no_flag_says_is_asked_for(tmp_path):
    path = command(tmp_path, LLAMA.replace("--vocab-size 128256", ""))
    with pytest.raises(CannotAnswerError, match="--vocab N"):
        model(path)
    assert model(path, vocab=1000).spec.vocab_size == 1000
    with pytest.raises(InvalidFileError, match="names the model"):
        model(written(tmp_path, "base_model: Qwen/Qwen3-8B\ndatasets: []\nmicro_batch_size: 1\n"), vocab=1000)


def test_megatrons_experts_and_latent_attention(tmp_path):
    tied = LLAMA.replace("--untie-embeddings-and-output-weights", "").replace("--num-layers 32", "--num-layers 4")
    sparse = model(
        command(tmp_path, f"{tied} --num-experts 8 --moe-ffn-hidden-size 512 --moe-layer-freq ([0]*1+[1]*3)")
    )
    assert [run.count for run in sparse.spec.runs] == [1, 3]
    assert sparse.spec.runs[0].layer.feed_forward.intermediate_size == 14336
    assert sparse.spec.runs[1].layer.feed_forward.num_experts == 8
    every, other = (model(command(tmp_path, f"{tied} --num-experts 8 --moe-layer-freq {n}")) for n in (1, 2))
    assert [run.count for run in every.spec.runs] == [4]
    assert [run.count for run in other.spec.runs] == [1, 1, 1, 1]
    plain = model(command(tmp_path, f"{tied} --num-experts 8 --moe-ffn-hidden-size 512".replace("--swiglu", "")))
    ungated = 3 * 8 * 512 * 4096 - 2 * 8 * 512 * 4096
    gated = model(command(tmp_path, f"{tied} --num-experts 8 --moe-ffn-hidden-size 512"))
    assert parameter_count(gated.inventory) - parameter_count(plain.inventory) == 4 * ungated
    latent = f"{tied} --multi-latent-attention --qk-layernorm --kv-lora-rank 512 --q-lora-rank 1536"
    part = model(command(tmp_path, latent)).spec.runs[0].layer.attention
    assert (part.q_lora_rank, part.kv_lora_rank, part.qk_head_dim, part.v_head_dim) == (1536, 512, 192, 128)
    quick = model(command(tmp_path, tied.replace("--swiglu", "--quick-geglu")))
    with pytest.raises(CannotAnswerError, match="quick GELU"):
        plan_by_share(quick, gpu="h100", config="bf16-adamw")
    plainly = model(command(tmp_path, latent.replace("--qk-layernorm", "")))
    normed = model(command(tmp_path, latent))
    assert parameter_count(normed.inventory) - parameter_count(plainly.inventory) == 4 * (512 + 1536)
    with pytest.raises(CannotAnswerError, match="latent attention without norms"):
        plan_by_share(plainly, gpu="h100", config="bf16-adamw")
    with pytest.raises(InvalidFileError, match="a 0 or 1 for each of 4 layers"):
        model(command(tmp_path, f"{tied} --num-experts 8 --moe-layer-freq [1]*3"))


def test_nanogpts_flags_are_a_model(tmp_path):
    flags = "--dataset=shakespeare_char --block_size=256 --n_layer=6 --n_head=6 --n_embd=384 --batch_size=64"
    char = model(command(tmp_path, f"{flags} --compile=False", "train.py"))
    # without biases: twelve matrices of the width, two norms a layer; tied
    assert parameter_count(char.inventory) == 6 * (12 * 384**2 + 2 * 384) + (65 + 256) * 384 + 384
    file = tmp_path / "job.argv.json"
    for path in (file, str(file)):
        with pytest.raises(InvalidFileError, match=r"names a training job: memplan.plan\(\) plans it"):
            memplan.fit(path, gpu="rtx4090")
    own = memplan.plan(str(file), gpu="rtx4090")
    assert (own.verdict, own.to_dict()["stack"]["name"]) == ("fits", "nanogpt")


def test_nanochats_own_model_is_built_of_its_flags(tmp_path):
    path = command(tmp_path, "--depth=6 --device-batch-size=32 --total-batch-size=16384", "base_train.py")
    for shapes, words, cut in (({}, 32768, 0), ({"vocab": 1000}, 1024, 24)):
        spec = model(path, **shapes).spec
        assert (spec.architecture, spec.hidden_size, spec.vocab_size, spec.cut_words) == ("nanochat", 384, words, cut)
    with pytest.raises(CannotAnswerError, match="fp8: not modelled"):
        model(command(tmp_path, "--depth=6 --device-batch-size=32 --total-batch-size=16384 --fp8", "base_train.py"))
    squared = model(command(tmp_path, f"{GPT3} --squared-relu"))
    assert squared.spec.runs[0].layer.feed_forward.activation == "relu-squared"


@pytest.mark.parametrize(
    ("text", "trainer", "name", "stage"),
    [
        ("policy: {model_name: Qwen/Qwen3-8B}\ndpo: {max_num_steps: 1}\n", "nemo-rl", "Qwen/Qwen3-8B", "dpo"),
        (
            "step_scheduler: {local_batch_size: 2}\nmodel: {pretrained_model_name_or_path: a/b}\npeft: {dim: 8}\n",
            "nemo-automodel",
            "a/b",
            "sft",
        ),
        ('actor_rollout_ref: {model: {path: "???"}}\nalgorithm: {adv_estimator: grpo}\n', "verl", None, "grpo"),
    ],
)
def test_recognised_trainers_say_model_and_stage(tmp_path, text, trainer, name, stage):
    answer = memplan.import_file(written(tmp_path, text)).document()
    assert (answer.exit_code, answer.data["trainer"]["name"]) == (3, trainer)
    assert (answer.data["model"]["given"], answer.data["method"]["stage"]) == (name, stage)


def test_the_environment_of_a_command_counts():
    words = [
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "swift",
        "rlhf",
        "--rlhf_type",
        "grpo",
        "--model",
        "a/b",
    ]
    answer = memplan.import_file([*words, "--max_length", "1000", "--max_completion_length", "24"]).to_dict()
    assert answer["training"]["allocator"] == "expandable"
    assert answer["training"]["sequence_length"] == 1024


def test_a_pattern_of_all_layers_is_its_linear_modules():
    assert selected_linears(r"^model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj$") == [
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    ]
    for other in (
        r".*layers.1.*q_proj",
        r".*q_proj",
        r"(.*)*q_proj",
        r"model.layers.[\d]+.moe.*",
        "(",
        "(?a)(?u)x",
        ".?" * 30,
        "(.|.)" * 30,
    ):
        assert selected_linears(other) is None


@given(st.text(alphabet=r".*+()[]|\d{}?^$q_projmodel.layers", max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_pattern_is_a_traceback(pattern):
    names = selected_linears(pattern)
    assert names is None or all(re.fullmatch("[a-z_]+", name) for name in names)


AXOLOTL = "base_model: meta-llama/Llama-3.2-1B\ndatasets: [{path: a}]\nsequence_len: 512\nadapter: lora\n"


def adapted(folder, targets):
    return plan_by_share(str(written(folder, f"{AXOLOTL}lora_target_modules: {targets}\n")), gpu="h100").memory


def test_targets_with_a_path_select_what_ends_with_it(tmp_path):
    plain, paths = adapted(tmp_path, "[q_proj, down_proj]"), adapted(tmp_path, "[self_attn.q_proj, mlp.down_proj]")
    assert paths.requested_bytes == plain.requested_bytes
    assert adapted(tmp_path, "[self_attn.q_proj]").requested_bytes < plain.requested_bytes
    with pytest.raises(InvalidFileError, match=r"'attn.q_proj' is no projection of"):
        adapted(tmp_path, "[attn.q_proj]")


OWN = "dtype: bfloat16\nuse_peft: true\nmax_length: 512\npacking: false\nper_device_train_batch_size: 1\n"


@pytest.mark.parametrize(
    ("model", "targets"),
    [("microsoft/phi-2", "[q_proj, v_proj, fc1, fc2]"), ("EleutherAI/pythia-410m", "[query_key_value]")],
)
def test_targets_that_are_not_said_are_pefts_of_the_family(tmp_path, model, targets):
    def planned(more):
        return plan_by_share(str(written(tmp_path, f"model_name_or_path: {model}\n{OWN}{more}")), gpu="h100").memory

    assert planned("").requested_bytes == planned(f"lora_target_modules: {targets}\n").requested_bytes


def test_targets_that_are_not_said_of_a_family_that_peft_has_none_of(tmp_path):
    with pytest.raises(
        CannotAnswerError, match="PEFT has no list of its own for phi3; name them in lora_target_modules"
    ):
        plan_by_share(
            str(written(tmp_path, f"model_name_or_path: microsoft/Phi-3-mini-4k-instruct\n{OWN}")), gpu="h100"
        )


def test_targets_that_a_model_has_not_are_left_out_as_peft_leaves_them(tmp_path):
    plain = adapted(tmp_path, "[q_proj, down_proj]")
    with pytest.warns(
        UnknownKeyWarning, match="PEFT leaves out query_key_value, w1, which Llama-3.2-1B has no module of"
    ):
        others = adapted(tmp_path, "[query_key_value, q_proj, w1, down_proj]")
    assert others.requested_bytes == plain.requested_bytes
    with pytest.raises(InvalidFileError, match="'self_attn' is no projection of"):
        adapted(tmp_path, "[self_attn, q_proj]")  # a module, which PEFT does not adapt


@pytest.mark.parametrize("targets", ["[model.layers.0.self_attn.q_proj]", "[q_proj, layers.3.mlp.up_proj]"])
def test_targets_of_one_layer_are_refused(tmp_path, targets):
    with pytest.raises(CannotAnswerError, match="lora_target_modules: not modelled: adapters on some layers alone"):
        adapted(tmp_path, targets)


FACTORY = "model_name_or_path: meta-llama/Llama-3.2-1B\ncutoff_len: 512\nper_device_train_batch_size: 1\nbf16: true\n"


def factory(folder, keys):
    return plan_by_share(str(written(folder, f"{FACTORY}{keys}\n")), gpu="h100").memory


def test_more_last_layers_than_there_are_is_said(tmp_path):
    frozen = "stage: sft\nfinetuning_type: freeze\nfreeze_trainable_layers: "
    most = plan_by_share(str(written(tmp_path, f"{FACTORY}{frozen}99\n")), gpu="h100")
    said = "freeze.last_layers 99: Llama-3.2-1B has 16 layers, and all of them train"
    assert said in most.to_dict()["assumptions"]
    assert said in str(most.document(full=False).blocks)
    assert most.memory.requested_bytes == factory(tmp_path, f"{frozen}16").requested_bytes


def test_llama_factorys_reference_model_stays_in_16_bits(tmp_path):
    full = factory(tmp_path, "stage: dpo\nfinetuning_type: full")
    weights = [entry for entry in full.states.tensors if entry.tensor.name.startswith("reference.")]
    trained = [entry for entry in full.states.tensors if entry.trainable]
    assert {entry.format_name for entry in weights} == {"bf16"}
    assert {entry.format_name for entry in trained} == {"fp32"}
    with pytest.raises(CannotAnswerError, match="set bf16: true"):
        plan_by_share(
            str(written(tmp_path, FACTORY.replace("bf16: true", "stage: dpo\nfinetuning_type: full"))), gpu="h100"
        )


def test_llama_factorys_copies_of_ends_are_trained_in_fp32_beside_originals_in_16_bits(tmp_path):
    saved = factory(tmp_path, "stage: sft\nfinetuning_type: lora\nadditional_target: embed_tokens,lm_head").states
    ends = {e.tensor.name: (e.format_name, e.trainable) for e in saved.tensors if e.tensor.shape == (128256, 2048)}
    assert sorted(ends.values()) == [("bf16", False), ("fp32", True), ("fp32", True)]


TUNE = """\
length: 4096
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: "${length}"}
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_rank: 8, lora_attn_modules: [q_proj]}
optimizer: {_component_: torch.optim.AdamW, fused: true}
dataset: {packed: true}
batch_size: 2
dtype: bf16
"""


def test_flags_count_over_the_file_that_they_name(tmp_path):
    path = written(tmp_path, TUNE)
    words = ["tune", "run", "--nproc_per_node", "2", "lora_finetune_distributed", "--config", str(path)]
    answer = memplan.import_file([*words, "batch_size=4", "dataset.packed=False", "model.lora_rank=32"]).to_dict()
    training = answer["training"]
    assert (training["micro_batch_size"], training["adapter"]["rank"], answer["packing"]) == (4, 32, False)
    assert (training["sequence_length"], training["kernels"], training["parallel"]["data"]) == (
        4096,
        {"optimizer": "fused"},
        2,
    )
    assert (answer["keys"]["unknown"], answer["needs"]) == ([], [])
    lines = {one["key"]: (one["file"], one["line"]) for one in answer["keys"]["used"] if one["effect"]}
    assert (lines["batch_size"], lines["dtype"]) == (("command line", 8), (str(path), 7))


def test_nanogpts_settings_in_python_are_read_and_not_run(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "train_small.py").write_text("import time\nbatch_size = 12\nn_layer = 6\nout = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    answer = memplan.import_file(["python", "train.py", "config/train_small.py", "--batch_size=8"]).to_dict()
    assert (answer["trainer"]["name"], answer["model"]["num_hidden_layers"]) == ("nanogpt", 6)
    assert answer["training"]["micro_batch_size"] == 8


@pytest.mark.parametrize("spelled", ["y", "yes", "on", "true", "'true'", "True", "Y"])
def test_every_spelling_of_true_is_true(tmp_path, spelled):
    text = (
        f"base_model: a/b\ndatasets: []\nmicro_batch_size: 1\nflash_attention: {spelled}\nsample_packing: {spelled}\n"
    )
    answer = memplan.import_file(written(tmp_path, text)).to_dict()
    assert (answer["training"]["kernels"]["attention"], answer["packing"]) == ("flash", True)


def test_a_loss_that_preferences_are_not_compared_by_is_refused_by_the_key_that_the_file_has(tmp_path):
    path = tmp_path / "job.json"
    keys = {"rlhf_type": "dpo", "model": "Qwen/Qwen2.5-0.5B-Instruct", "tuner_type": "lora", "dataset": ["a/b"]}
    path.write_text(json.dumps({**keys, "max_length": 2048, "use_liger_kernel": True}))
    with pytest.raises(memplan.MemplanError, match="leave it out, there use_liger_kernel"):
        plan_by_share(path, gpu="h100-sxm-80gb")
