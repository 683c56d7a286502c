"""What ``memplan import`` reads of trainers' files, as a user sees it."""

import json
from fnmatch import fnmatchcase
from math import log2
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.catalog.catalog import data_directory
from memplan.errors import CannotAnswerError, GuessedNameWarning, InvalidFileError, MemplanError
from memplan.importer.classified_keys import known_keys
from memplan.library.answers.planned_job import plan_by_share
from memplan.library.lookup.trainer_files import trainer_mappings
from tests.jobs import yaml_data

EXAMPLES = Path(__file__).parent / "examples"


def read(name, **options):
    return memplan.import_file(EXAMPLES / name, **options).to_dict()


def written(folder, text, name="job.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def test_an_axolotl_file_comes_out_in_our_keys():
    answer = read("axolotl.yaml")
    assert (answer["trainer"]["name"], answer["role"]) == ("axolotl", "job")
    assert answer["model"]["given"] == "Qwen/Qwen2.5-7B"
    assert answer["method"] == {"stage": "sft", "tuning": "qlora", "reference_model": "none"}
    training = answer["training"]
    assert training["weights"] == {"default": "bf16", "hidden_matrix": "nf4-dq"}
    assert training["adapter"] == {
        "kind": "lora",
        "dtype": "fp32",
        "rank": 32,
        "dropout": 0.05,
        "targets": ["all-linear"],
    }
    assert training["optimizer"] == {"default": "adamw-8bit-paged-bnb"}
    assert (training["micro_batch_size"], training["gradient_accumulation_steps"]) == (4, 2)
    assert (training["sequence_length"], training["activation_checkpointing"]) == (4096, "full")
    assert (answer["packing"], training["kernels"]["attention"], training["stack"]) == (True, "flash", "axolotl")


def test_every_key_has_its_line():
    lines = {one["key"]: one["line"] for one in read("axolotl.yaml")["keys"]["used"]}
    assert (lines["base_model"], lines["lora_r"], lines["gradient_checkpointing"]) == (2, 5, 18)


def test_the_same_words_mean_other_dtypes_in_other_trainers():
    axolotl = read("axolotl-full.yaml")["training"]
    assert (axolotl["weights"]["hidden_matrix"], axolotl["optimizer"]["default"]) == ("bf16", "adamw-bf16")
    assert (axolotl["weights"]["embedding"], axolotl["weights"]["norm"]) == ("fp32", "fp32")
    lora = read("llama-factory.yaml")["training"]
    assert (lora["weights"]["hidden_matrix"], lora["adapter"]["dtype"]) == ("bf16", "fp32")
    assert lora["activation_checkpointing"] == "full"
    assert read("trl.yaml")["training"]["optimizer"] == {"default": "adamw-bf16"}


def test_llama_factory_upcasts_what_it_trains_whole(tmp_path):
    text = (EXAMPLES / "llama-factory.yaml").read_text().replace("finetuning_type: lora", "finetuning_type: full")
    training = memplan.import_file(written(tmp_path, text)).to_dict()["training"]
    assert (training["weights"]["hidden_matrix"], training["compute_dtype"]) == ("fp32", "bf16")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("finetuning_type: lora", "finetuning_type: lora\nquantization_bit: 3", "quantization_bit: not modelled"),
        ("finetuning_type: lora", "finetuning_type: full\nquantization_bit: 4", "quantization_bit: not modelled"),
        ("finetuning_type: lora", "finetuning_type: lara", "finetuning_type: not modelled: 'lara'"),
        ("stage: sft", "stage: sfd", "stage: not modelled: 'sfd'"),
        ("bf16: true", "bf16: true\nfp16: true", "bf16: not modelled: bf16 and fp16 at once"),
    ],
)
def test_what_llama_factory_refuses_is_refused_by_its_key(tmp_path, old, new, said):
    text = (EXAMPLES / "llama-factory.yaml").read_text().replace(old, new)
    with pytest.raises(CannotAnswerError, match=said):
        plan_by_share(str(written(tmp_path, text)), gpu="h100")


@pytest.mark.parametrize(
    "path",
    [
        "/data/models/Qwen2.5-7B-Instruct/",
        "~/absent/Qwen2.5-7B",
        "./no/Qwen2.5-7B",
        "/out/Qwen2.5-7B/full/checkpoint-500",
    ],
)
def test_a_models_folder_on_another_machine_is_guessed_from_and_said_so(tmp_path, path, cli):
    text = (EXAMPLES / "axolotl.yaml").read_text().replace("base_model: Qwen/Qwen2.5-7B", f"base_model: {path}")
    file = written(tmp_path, text)
    answer = json.loads(cli("import", file, "--json").out)
    assert answer["model"] == {"given": path, "name": "qwen2.5-7b", "how": "guess"}
    assert "guessed from its name" in cli("fit", file, "--gpu", "h100").err
    assert "no such file" in cli("fit", path, "--gpu", "h100").err
    unknown = written(tmp_path, text.replace(path, "/data/run-7/checkpoint-500"))
    assert "no such file" in cli("fit", unknown, "--gpu", "h100").err


@pytest.mark.parametrize(("model", "refused"), [("Qwen/Qwen3-0.6B", False), ("Qwen/Qwen3-30B-A3B", True)])
def test_kernels_for_experts_change_nothing_of_a_model_without_any(tmp_path, model, refused, cli):
    text = (EXAMPLES / "llama-factory.yaml").read_text().splitlines()
    lines = [f"model_name_or_path: {model}" if one.startswith("model_name_or_path") else one for one in text]
    path = written(tmp_path, "\n".join([*lines, "use_v1_kernels: true\n"]))
    answer = cli("import", path)
    assert ("the model has no routed experts" in answer.out) is not refused
    assert (cli("fit", path, "--gpu", "h200").exit_code == 3) is refused


@pytest.mark.parametrize(("model", "refused"), [("Qwen/Qwen3-0.6B", False), ("Qwen/Qwen3-30B-A3B", True)])
def test_kernels_that_the_v1_engine_chooses_are_for_experts_alone(tmp_path, model, refused, cli):
    kernels = "kernel_config: {name: auto, include_kernels: auto}\n"
    path = written(
        tmp_path, f"model: {model}\n{kernels}micro_batch_size: 1\ncutoff_len: 512\ntrain_dataset: a\noutput_dir: b\n"
    )
    answer = cli("import", path)
    assert ("the model has no routed experts" in answer.out) is not refused
    assert (cli("fit", path, "--gpu", "h200").exit_code == 3) is refused


@pytest.mark.parametrize("more", ["quantize: bnb.nf4\n", "lora_r: 8\nquantize: bnb.nf5\n"])
def test_what_litgpt_cannot_quantise_is_refused(tmp_path, more):
    text = "checkpoint_dir: meta-llama/Llama-3.2-1B\nprecision: bf16-true\ntrain: {max_seq_length: 512, micro_batch_size: 1}\n"
    file = written(tmp_path, text + more)
    assert [one["key"] for one in memplan.import_file(file).to_dict()["keys"]["not_modelled"]] == ["quantize"]


TRL = "model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 1024\nuse_peft: false\n"


def test_trls_loss_types_are_the_losses_that_its_version_has(tmp_path):
    def loss(kind, version):
        file = written(tmp_path, f"{TRL}loss_type: {kind}\n")
        return memplan.import_file(file, trainer_version=version).to_dict()["training"]["kernels"]["loss"]

    assert {loss(kind, "1.15") for kind in ("nll", "dft", "chunked_nll")} == {"fused-head"}
    assert [loss("nll", "1.14"), loss("chunked_nll", "1.14")] == ["fp32", "token-chunks"]
    assert loss("chunked_nll", "1.12") == "token-chunks-fp32"


def test_axolotl_evaluates_at_steps_that_are_named(tmp_path):
    def evaluates(more):
        file = written(tmp_path, (EXAMPLES / "axolotl.yaml").read_text() + more)
        return memplan.import_file(file).to_dict()["training"].get("evaluation", False)

    assert evaluates("val_set_size: 0.1\nevals_per_epoch: 2\n")
    assert evaluates("test_datasets: [{path: a}]\neval_steps: 5\n")
    assert not evaluates("test_datasets: [{path: a}]\n")
    assert not evaluates("val_set_size: 0.1\neval_steps: 5\neval_strategy: 'no'\n")


MODEL = "--model_name_or_path Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    ("command", "trainer", "said"),
    [
        (f"trl sft {MODEL} --no_gradient_checkpointing", "trl", {"training.activation_checkpointing": "none"}),
        (f"trl reward {MODEL} --dataset_name x/ultrafeedback_binarized", "trl", {"method.stage": "reward"}),
        (
            f"torchrun --nproc_per_node 8 train.py {MODEL} --data_path x.json --bf16 True --model_max_length 512",
            "transformers",
            {"training.activation_checkpointing": "none", "training.sequence_length": 512, "packing": False},
        ),
        (
            "litgpt finetune_lora microsoft/phi-2 --train.max_seq_length 256",
            "litgpt",
            {"model.given": "microsoft/phi-2"},
        ),
        (
            "megatron sft --model Qwen/Qwen2.5-7B --micro_batch_size 1 --max_length 512",
            "ms-swift",
            {"training.stack": "megatron", "training.master_weights": "fp32", "training.parallel.zero_stage": 1},
        ),
        (
            "torchrun --nproc_per_node 8 swift/cli/_megatron/rlhf.py --rlhf_type grpo --model Qwen/Qwen2.5-7B --micro_batch_size 2"
            " --global_batch_size 64 --steps_per_generation 2 --tensor_model_parallel_size 2",
            "ms-swift",
            {"method.rollout.micro_batches": 16, "training.gradient_accumulation_steps": 8},
        ),
        (
            "python -m torchtitan.train --model.name llama3 --model.flavor 8B --parallelism.data_parallel_shard_degree 4"
            " --parallelism.tensor_parallel_degree 2 --training.global_batch_size 64 --training.local_batch_size 2",
            "torchtitan",
            {"training.parallel.data": 4, "training.gradient_accumulation_steps": 8, "needs": []},
        ),
        (
            f"llamafactory-cli train {MODEL} --stage sft --ray_num_workers 4",
            "llamafactory",
            {"training.parallel.data": 4},
        ),
        (
            f"torchrun --nproc_per_node 8 src/train.py {MODEL} --stage sft --ray_num_workers 4",
            "llamafactory",
            {"training.parallel.data": 8},
        ),
    ],
)
def test_commands_say_what_their_program_and_flags_mean_together(command, trainer, said):
    answer = memplan.import_file(command.split()).to_dict()
    assert answer["trainer"]["name"] == trainer
    for path, wanted in said.items():
        value = answer
        for part in path.split("."):
            value = value[part]
        assert value == wanted, path


def test_a_command_is_what_its_file_says_and_its_flags_count_over_that(tmp_path):
    file = str(EXAMPLES / "llama-factory.yaml")
    job = memplan.import_file(["llamafactory-cli", "train", file, "model_name_or_path=Qwen/Qwen2.5-3B"]).to_dict()
    assert (job["role"], job["model"]["given"]) == ("job", "Qwen/Qwen2.5-3B")
    launching = str(EXAMPLES / "accelerate.yaml")
    words = f"accelerate launch --config_file {launching} --num_processes 2 sft.py {MODEL}".split()
    assert memplan.import_file(words).to_dict()["training"]["parallel"]["data"] == 2


def test_what_is_set_besides_is_not_refused(tmp_path):
    file = written(tmp_path, (EXAMPLES / "axolotl.yaml").read_text() + "liger_cross_entropy: true\n")
    with pytest.raises(CannotAnswerError, match=r"in-place is not modelled yet"):
        plan_by_share(str(file), gpu="h100")
    assert plan_by_share(str(file), gpu="h100", set={"kernels.loss": "fused-linear"})


def test_axolotls_plugin_alone_turns_cut_cross_entropy_on(tmp_path):
    plugin = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
    cut = written(tmp_path, (EXAMPLES / "axolotl.yaml").read_text() + plugin)
    assert memplan.import_file(cut).to_dict()["training"]["kernels"]["loss"] == "cut-cross-entropy"
    key = written(tmp_path, (EXAMPLES / "axolotl.yaml").read_text() + "cut_cross_entropy: true\n")
    assert "loss" not in memplan.import_file(key).to_dict()["training"].get("kernels", {})
    both = written(tmp_path, (EXAMPLES / "axolotl.yaml").read_text() + plugin + "chunked_cross_entropy: true\n")
    with pytest.raises(CannotAnswerError, match="axolotl takes one loss"):
        plan_by_share(str(both), gpu="h100")


def test_a_package_s_own_launcher_file_is_assumed_where_none_lies_there(tmp_path):
    text = (EXAMPLES / "axolotl-full.yaml").read_text() + "deepspeed: deepspeed_configs/zero3_bf16.json\n"
    file = written(tmp_path, text)
    job = memplan.import_file(file, gpus=4).to_dict()
    assert job["training"]["parallel"]["deepspeed"]["max_live_parameters"] == 0  # written without stage3_ there
    assert [row["value"] for row in job["assumed"] if "launcher" in row["key"]] == ["zero3_bf16.json of axolotl 0.19.0"]
    (tmp_path / "deepspeed_configs").mkdir()
    written(
        tmp_path / "deepspeed_configs",
        '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}',
        "zero3_bf16.json",
    )
    job = memplan.import_file(file, gpus=4).to_dict()
    assert job["training"]["parallel"]["zero_stage"] == 1
    assert not any("launcher" in row["key"] for row in job["assumed"])


@pytest.mark.parametrize(
    ("keys", "adapters"),
    [
        ("lora_mlp_kernel: true\n", "fused-mlp"),
        ("lora_qkv_kernel: true\nlora_o_kernel: true\nlora_mlp_kernel: false\n", "fused-qkv-o"),
        ("lora_o_kernel: false\n", "composite"),
    ],
)
def test_axolotls_lora_functions_are_switched_on_one_by_one(tmp_path, keys, adapters):
    file = written(tmp_path, (EXAMPLES / "axolotl.yaml").read_text() + keys)
    assert memplan.import_file(file).to_dict()["training"]["kernels"]["adapters"] == adapters


def test_a_file_of_that_name_in_another_folder_is_nobodys(tmp_path):
    file = written(tmp_path, (EXAMPLES / "axolotl-full.yaml").read_text() + "deepspeed: mine/zero3_bf16.json\n")
    assert any("mine/zero3_bf16.json" in need for need in memplan.import_file(file, gpus=4).to_dict()["needs"])


@pytest.mark.parametrize("launcher", ["accelerate", "deepspeed"])
def test_every_shipped_file_has_known_keys_alone(tmp_path, launcher):
    folder = data_directory() / "configs" / "trainers" / "shipped"
    for path, file in yaml_data(folder / f"{launcher}.yaml").items():
        job = memplan.import_file(written(tmp_path, json.dumps(file["keys"]), "keys.json"), trainer=launcher).to_dict()
        assert job["keys"]["unknown"] == [], path


def test_a_trainers_file_heads_the_answer_whatever_stands_beside_it(tmp_path):
    engine = written(tmp_path, '{"zero_optimization": {"stage": 1}}', "ds.json")
    answer = memplan.import_file(written(tmp_path, TRL), beside=[engine], gpus=2)
    assert answer.to_dict()["files"][-1].endswith("job.yaml")


@pytest.mark.parametrize(("gpus", "error"), [(None, None), (2, InvalidFileError), (4, None)])
def test_rows_that_are_generated_together_are_whole_groups(tmp_path, gpus, error):
    file = str(
        written(
            tmp_path,
            f"{TRL}num_generations: 16\nper_device_train_batch_size: 4\nuse_vllm: true\nvllm_max_model_length: 1024\n",
        )
    )
    if error is None:
        assert plan_by_share(file, gpu="h100", gpus=gpus).training["parallel"]["data"] == (gpus or 1)
        return
    with pytest.raises(error, match="16 rows belong to each prompt"):
        plan_by_share(file, gpu="h100", gpus=gpus)


def test_torchtunes_components_are_overridden_by_their_name_alone():
    words = ["tune", "run", "lora_finetune_single_device", "--config", str(EXAMPLES / "torchtune.yaml")]
    job = memplan.import_file([*words, "model=torchtune.models.llama3_2.lora_llama3_2_3b"]).to_dict()
    assert job["model"]["given"] == "llama3_2_3b"


@pytest.mark.parametrize(("version", "default"), [("0.21", "none"), ("0.22", "full")])
def test_trls_defaults_are_those_of_its_version(tmp_path, version, default):
    training = memplan.import_file(written(tmp_path, TRL), trainer_version=version).to_dict()["training"]
    assert training["activation_checkpointing"] == default


@pytest.mark.parametrize(
    ("more", "engine", "weights"),
    [
        ("fsdp_config: {offload_params: false}\n", None, "bf16"),
        ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: false}\n", "fsdp1", "fp32"),
    ],
)
def test_axolotls_fsdp_is_the_second_where_nothing_says_the_first(tmp_path, more, engine, weights):
    file = written(tmp_path, (EXAMPLES / "axolotl-full.yaml").read_text() + more)
    training = memplan.import_file(file, gpus=4).to_dict()["training"]
    assert (training["parallel"].get("engine"), training["weights"]["default"]) == (engine, weights)


def test_the_optimizer_that_deepspeeds_file_names_counts(tmp_path):
    engine = written(tmp_path, '{"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"}}', "ds.json")
    file = written(tmp_path, f"{TRL}optim: adamw_bnb_8bit\n")
    training = memplan.import_file(file, beside=[engine], gpus=2).to_dict()["training"]
    assert training["optimizer"] == {"default": "adamw-fp32"}


def test_rows_that_nothing_bounds_need_a_length(tmp_path):
    text = TRL.replace("max_length: 1024", "max_length: null")
    assert memplan.import_file(written(tmp_path, text)).to_dict()["needs"][0].startswith("--sequence-length N")


@pytest.mark.parametrize(
    ("keys", "method", "refused"),
    [
        ("beta: 0.1\nloss_type: ipo\n", "dpo", ""),
        ("loss_type: [ipo, sft]\n", "dpo", ""),
        ("loss_type: aot_unpaired\n", "dpo", ""),
        ("beta: 0.1\nloss_type: sigmiod\n", "dpo", "did you mean 'sigmoid'"),
        ("loss_type: [sigmoid, nll]\n", "dpo", "'nll'"),
        ("loss_type: apo_zero_unpaired\n", "kto", ""),
        ("desirable_weight: 1.0\nloss_type: bco\n", "kto", "modelled are kto, apo_zero_unpaired"),
        ("center_rewards_coefficient: 0.01\nloss_type: nll\n", "reward", "has no loss_type"),
    ],
)
def test_loss_types_that_trls_trainers_do_not_have_are_refused(tmp_path, keys, method, refused):
    answer = memplan.import_file(written(tmp_path, TRL + keys)).to_dict()
    said = [one["why"] for one in answer["keys"]["not_modelled"] if one["key"] == "loss_type"]
    assert answer["method"]["stage"] == method
    assert bool(said) == bool(refused)
    assert refused in "".join(said)


@pytest.mark.parametrize(
    ("more", "version", "said"),
    [
        ("packing: true\n", "1.16.0", "joined"),
        ("packing: true\nattn_implementation: sdpa\n", "1.15", "joined"),
        ("packing: true\nattn_implementation: eager\n", "1.16.0", "joined"),
        ("padding_free: true\nmax_length: null\n", "1.16.0", "joined"),
        ("packing: true\n", "1.14", "refused"),
        ("packing: true\n", "0.24", "refused"),
        ("packing: true\n", "0.23", ""),
        ("padding_free: true\n", "1.16.0", "refused"),
        ("padding_free: true\nmax_length: null\nper_device_train_batch_size: 1\n", "1.16.0", "refused"),
        ("padding_free: true\nmax_length: null\n", "1.14", "refused"),
        ("packing: false\n", "1.16.0", ""),
        ("packing: true\npacking_strategy: wrapped\n", "1.16.0", ""),
        ("packing: true\nattn_implementation: flash_attention_2\n", "1.16.0", ""),
        ("padding_free: true\nattn_implementation: flash_attention_2\n", "1.16.0", ""),
    ],
)
def test_rows_that_trl_joins_under_a_mask_are_planned_so_or_refused(tmp_path, more, version, said):
    text = TRL.replace("max_length: 1024\n", "") if "max_length" in more else TRL
    answer = memplan.import_file(written(tmp_path, text + more), trainer_version=version).to_dict()
    refused = any("a mask of all by all" in one["why"] for one in answer["keys"]["not_modelled"])
    assert refused == (said == "refused")
    assert bool(answer["training"].get("joined_rows")) == (said == "joined")


def test_a_packed_file_of_trl_is_planned_with_its_rows_joined(tmp_path):
    text = TRL + "packing: true\nper_device_train_batch_size: 2\n"
    joined = plan_by_share(written(tmp_path, text), gpu="a100-80gb").memory
    assert joined.setup.config.joined_rows
    apart = plan_by_share(written(tmp_path, text + "packing_strategy: wrapped\n"), gpu="a100-80gb").memory
    assert joined.requested_bytes != apart.requested_bytes


@pytest.mark.parametrize(
    ("asked_for", "padded"),
    [
        ({}, True),
        ({"set": ["kernels.attention=flash"]}, False),
        ({"stack": "transformers@4.52"}, False),
        ({"stack": "litgpt"}, False),
    ],
)
def test_a_trainers_file_pads_its_rows_unless_what_is_asked_for_has_no_mask_of_them(tmp_path, asked_for, padded):
    path = written(tmp_path, TRL + "per_device_train_batch_size: 2\n")
    plan = plan_by_share(path, gpu="a100-80gb", **asked_for)
    assert bool(plan.memory.setup.config.padded_rows) == padded


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "\nactivation_offloading: true\ngradient_checkpointing: false\n",
            r"job.yaml:5: offload.activations: cpu is not supported without full checkpointing",
        ),
        ("\noptim: ademamix\n", r"job.yaml:5: optim: AdEMAMix is not modelled; leave it out to plan without it$"),
        (
            "optim: ademamix\nfull_determinism: true\n",
            r"job.yaml:4: optim: AdEMAMix is not modelled; leave it out to plan without it; also refused: full_determinism$",
        ),
    ],
)
def test_what_is_refused_has_the_line_that_says_it(tmp_path, more, said):
    with pytest.raises(CannotAnswerError, match=said):
        plan_by_share(written(tmp_path, TRL + more), gpu="h100")


def test_a_key_says_what_it_does_in_the_end(tmp_path):
    lines = [
        "model_name_or_path: Qwen/Qwen3-8B",
        "stage: sft",
        "finetuning_type: freeze",
        "cutoff_len: 2048",
        "bf16: true",
    ]
    lines.append("freeze_extra_modules: embed_tokens,norm")
    answer = memplan.import_file(written(tmp_path, "\n".join(lines))).to_dict()
    effects = {one["key"]: one["effect"] for one in answer["keys"]["used"]}
    assert effects["bf16"] == "compute_dtype = bf16"
    assert effects["freeze_extra_modules"] == "freeze.train = ['embed_tokens', 'norm']"
    assumed = {one["key"]: (one["value"], one["why"]) for one in answer["assumed"]}
    assert assumed["weights.default"] == ("fp32", "trained parameters are upcast to fp32 (model/adapter.py)")


def test_an_older_trl_is_betrayed_by_its_keys(tmp_path):
    text = (EXAMPLES / "trl.yaml").read_text().replace("max_length", "max_seq_length").replace("dtype: bfloat16\n", "")
    answer = memplan.import_file(written(tmp_path, text)).to_dict()
    assert answer["trainer"]["version"] == "0.19"
    assert answer["training"]["sequence_length"] == 2048
    plan = plan_by_share(written(tmp_path, text), gpu="h100")
    assert plan.training["description"] == "TRL 0.19, planned as trl 0.29"


def test_a_key_that_a_version_retired_is_unknown_to_it(tmp_path):
    path = written(tmp_path, (EXAMPLES / "trl.yaml").read_text().replace("max_length", "max_seq_length"))
    answer = memplan.import_file(path, trainer_version="1.16").to_dict()
    assert [(one["key"], one["line"]) for one in answer["keys"]["unknown"]] == [("max_seq_length", 6)]


def test_preference_pairs_are_read_as_what_they_are():
    answer = read("dpo.yaml")
    assert answer["method"]["stage"] == "dpo"
    assert (answer["method"]["reference_model"], answer["method"]["rows_per_sample"]) == ("resident", 2)


def test_a_launcher_joins_the_trainer(tmp_path):
    answer = read("trl.yaml", beside=[EXAMPLES / "accelerate.yaml"])
    assert answer["training"]["parallel"] == {"data": 4}
    deepspeed = written(
        tmp_path, "num_processes: 4\ndistributed_type: DEEPSPEED\ndeepspeed_config: {gradient_accumulation_steps: 4}\n"
    )
    refused = read("trl.yaml", beside=[deepspeed])["keys"]["not_modelled"]
    assert [one["key"] for one in refused] == ["deepspeed_config.gradient_accumulation_steps"]
    sharded = read("trl.yaml", beside=[EXAMPLES / "ds_z3.json"], gpus=8)["training"]
    assert (sharded["parallel"], sharded["master_weights"]) == (
        {
            "zero_stage": 3,
            "engine": "deepspeed",
            "data": 8,
            "deepspeed": {"reduce_bucket_size": 500_000_000, "overlap_comm": True},
        },
        "fp32",
    )


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ("axolotl", "base_model: Qwen/Qwen2.5-7B\ndatasets: [{path: x}]\nsequence_len: 512\ndeepspeed: ds.json\n"),
        ("ms-swift", "model: Qwen/Qwen2.5-7B\ndataset: x\nmax_length: 512\ndeepspeed: ds.json\n"),
    ],
)
def test_a_trainers_own_batch_is_not_left_to_an_engines_file(tmp_path, trainer, text):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}')
    refused = read(written(tmp_path, text), trainer=trainer, gpus=2)["keys"]["not_modelled"]
    assert [one["key"] for one in refused] == ["train_micro_batch_size_per_gpu"]


def test_buckets_of_deepspeed_are_read_with_auto_as_it_is():
    training = read("trl.yaml", beside=[EXAMPLES / "ds_z2.json"], gpus=8)["training"]
    assert training["parallel"] == {
        "zero_stage": 2,
        "engine": "deepspeed",
        "data": 8,
        "deepspeed": {"reduce_bucket_size": "auto", "overlap_comm": True, "reduce_scatter": True},
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto"}', "0 is not supported under DeepSpeed"),
        ('{"zero_optimization": {"stage": 0}}', "0 is not supported under DeepSpeed"),
        (
            '{"zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": false}}',
            "for one rank after the other",
        ),
        ('{"zero_optimization": {"stage": 1}, "bf16": {"bf16_master_weights_and_grads": true}}', "bf16 copies"),
        ('{"zero_optimization": {"stage": 3}, "data_types": {"grad_accum_dtype": "fp32"}}', "another dtype"),
        ('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}', "nvme is not modelled"),
        ('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}', "a share of"),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
            "none beside weights in host memory",
        ),
        (
            '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3}',
            "per_device_train_batch_size, with",
        ),
        ('{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}', "gradient_accumulation_steps, with"),
        ('{"zero_optimization": {"stage": 2}, "train_batch_size": 64}', "another number than GPUs x"),
    ],
)
def test_what_deepspeed_does_otherwise_is_refused(tmp_path, text, reason):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(CannotAnswerError, match=reason):
        plan_by_share(str(EXAMPLES / "trl.yaml"), beside=[str(tmp_path / "ds.json")], gpu="h100", gpus=8)


def test_shards_without_a_number_of_gpus_are_refused_with_the_flag():
    answer = memplan.import_file(EXAMPLES / "trl.yaml", beside=[EXAMPLES / "ds_z3.json"]).document()
    assert answer.exit_code == 3
    assert "--gpus" in answer.data["answer"]


def test_a_named_file_that_is_missing_is_the_reason(tmp_path):
    text = (EXAMPLES / "trl.yaml").read_text() + "deepspeed: conf/ds.json\n"
    answer = memplan.import_file(written(tmp_path, text)).document()
    assert answer.exit_code == 3
    assert "conf/ds.json" in answer.data["answer"]
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds.json").write_text((EXAMPLES / "ds_z3.json").read_text())
    assert memplan.import_file(tmp_path / "job.yaml", gpus=2).document().exit_code == 0


def test_a_launcher_alone_is_no_job():
    assert read("ds_z3.json")["role"] == "launcher"
    assert read("accelerate.yaml")["role"] == "launcher"


def test_files_that_train_nothing_say_what_they_are():
    answer = memplan.import_file(EXAMPLES / "export.yaml").document()
    assert (answer.exit_code, answer.data["role"]) == (2, "not_training")
    assert "export" in answer.data["answer"]


@pytest.mark.parametrize(
    "text",
    [
        "actor_rollout_ref: {model: {path: a}}\n",
        "policy: {model_name: a}\ngrpo: {num_prompts_per_step: 8}\n",
        "num_layers: 12\npipe_parallel_size: 1\nzero_optimization: {stage: 1}\n",
    ],
)
def test_trainers_that_are_not_read_are_refused_by_name(tmp_path, text):
    answer = memplan.import_file(written(tmp_path, text)).document()
    assert answer.exit_code == 3
    assert "recognised" in answer.data["answer"]


@pytest.mark.parametrize("more", ["--zero_stage 2", "--zero_stage 3", "--zero_stage 0 --add_eot_token --eot_token x"])
def test_deepspeed_chat_is_refused_by_name(more):
    given = (
        f"deepspeed main.py --data_path Dahoas/rm-static {MODEL} --per_device_train_batch_size 16 {more} --deepspeed"
    )
    answer = memplan.import_file(given.split()).document()
    assert (answer.exit_code, answer.data["needs"], answer.data["keys"]["unknown"]) == (3, [], [])
    assert "DeepSpeed-Chat's own loop is not modelled" in answer.data["answer"]


def test_misspelt_keys_have_their_line_and_the_nearest_key(tmp_path):
    text = (EXAMPLES / "axolotl.yaml").read_text().replace("gradient_checkpointing", "gradient_checkpoint")
    (one,) = memplan.import_file(written(tmp_path, text)).to_dict()["keys"]["unknown"]
    assert (one["key"], one["line"]) == ("gradient_checkpoint", 18)
    assert "gradient_checkpointing" in one["nearest"]


def test_keys_that_move_memory_unmodelled_are_refused_by_name(tmp_path):
    text = (EXAMPLES / "axolotl.yaml").read_text() + "tiled_mlp: true\nqat: {}\n"
    answer = memplan.import_file(written(tmp_path, text)).to_dict()
    assert [one["key"] for one in answer["keys"]["not_modelled"]] == ["tiled_mlp"]


def test_a_command_line_is_read_like_a_file():
    words = (
        "torchrun --nproc_per_node 2 sft.py --model_name_or_path Qwen/Qwen3-0.6B --dtype bfloat16 --use_peft --lora_r 8"
    )
    answer = memplan.import_file(words.split()).to_dict()
    assert answer["training"]["parallel"] == {"data": 2}
    assert (answer["method"]["tuning"], answer["training"]["adapter"]["rank"]) == ("lora", 8)


def test_flags_stand_above_the_file():
    words = ["trl", "sft", "--config", str(EXAMPLES / "trl.yaml"), "--per_device_train_batch_size", "7"]
    assert memplan.import_file(words).to_dict()["training"]["micro_batch_size"] == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base_model: a\nmicro_batch_size: 2e-5\ndatasets: []\n", "job.yaml:2: micro_batch_size: expected a whole number"),
        ("base_model: a\nfinetuning_type: lora\n", "has keys of axolotl and llamafactory"),
        ("model_name_or_path: a\nfinetuning_type: lora\nzero_optimization: {stage: 2}\n", "llamafactory"),
        ("[1, 2]\n", "expected the configuration"),
        ("", "empty"),
        ("a: [" * 100, "not valid YAML"),
        ("base_model: ${a}\na: ${base_model}\n", "leads back"),
        ("base_model: a\n" + "x" * (5 * 2**20), "larger than 4 MiB"),
        ("defaults: job.yaml\n", "includes itself"),
        ("a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(f"{n}: &{n} [{','.join(['*' + m] * 9)}]\n" for m, n in zip("abcdef", "bcdefg", strict=True)), "too many"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(tmp_path, text, said):
    with pytest.raises(InvalidFileError) as caught:
        memplan.import_file(written(tmp_path, text))
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_yaml_reads_booleans_of_its_own_as_the_trainer_does(tmp_path):
    text = (EXAMPLES / "axolotl.yaml").read_text().replace("gradient_checkpointing: true", "gradient_checkpointing: on")
    assert memplan.import_file(written(tmp_path, text)).to_dict()["training"]["activation_checkpointing"] == "full"


def test_of_a_key_given_twice_the_last_counts_as_in_the_trainers_own_loader(tmp_path):
    answer = memplan.import_file(
        written(tmp_path, "base_model: a\nmicro_batch_size: 1\nmicro_batch_size: 2\n")
    ).to_dict()
    assert answer["training"]["micro_batch_size"] == 2
    assert any("duplicate key" in one["why"] for one in answer["assumed"])


def test_merged_anchors_are_keys_like_others(tmp_path):
    text = "base: &base {micro_batch_size: 3, sequence_len: 64}\n<<: *base\nbase_model: a\nsequence_len: 128\n"
    training = memplan.import_file(written(tmp_path, text)).to_dict()["training"]
    assert (training["micro_batch_size"], training["sequence_length"]) == (3, 128)


@pytest.mark.parametrize("name", ["axolotl.yaml", "trl.yaml", "llama-factory.yaml"])
def test_a_trainers_file_is_model_and_config_of_a_plan(name):
    plan = plan_by_share(EXAMPLES / name, gpu="a100-80gb")
    said = read(name)["training"]
    assert plan.training["micro_batch_size"] == said["micro_batch_size"]
    assert plan.training["stack"].partition("@")[0] == said["stack"]
    assert (
        plan_by_share(read(name)["model"]["given"], config=EXAMPLES / name, gpu="a100-80gb").expected_bytes
        == plan.expected_bytes
    )


def test_methods_that_are_not_modelled_are_never_planned_as_others(tmp_path):
    text = "base_model: Qwen/Qwen3-0.6B\ndatasets: [{path: x}]\nsequence_len: 1024\n"
    for stage, said in (("ebft", "full ebft is not modelled"),):
        with pytest.raises(CannotAnswerError, match=said):
            plan_by_share(written(tmp_path, f"{text}rl: {stage}\n"), gpu="a100-80gb")


def test_a_file_for_preference_pairs_is_planned_with_its_reference_model():
    plan = plan_by_share(EXAMPLES / "dpo.yaml", gpu="a100-80gb")
    assert plan.training["method"] == {"stage": "dpo", "reference_model": "resident"}
    alone = plan_by_share(EXAMPLES / "dpo.yaml", gpu="a100-80gb", set={"method.reference_model": "precomputed"})
    weights = [one.components["weights"] for one in (plan, alone)]
    assert weights[0] == 2 * weights[1]


def test_keys_that_are_not_modelled_refuse_the_plan(tmp_path):
    path = written(tmp_path, (EXAMPLES / "axolotl.yaml").read_text() + "tiled_mlp: true\n")
    with pytest.raises(CannotAnswerError, match=r"job.yaml:23: tiled_mlp: not modelled"):
        plan_by_share(path, gpu="a100-80gb")


def test_what_is_set_on_the_command_line_stands_above_the_trainers_file():
    assert plan_by_share(EXAMPLES / "trl.yaml", gpu="rtx4090", micro_batch_size=1).training["micro_batch_size"] == 1


def test_litgpt():
    answer = read("litgpt.yaml")
    training = answer["training"]
    assert (answer["model"]["given"], answer["method"]["tuning"]) == ("google/gemma-2b", "qlora")
    assert training["adapter"]["targets"] == ["query", "value", "mlp"]
    assert memplan.plan(EXAMPLES / "litgpt.yaml", gpu="h100-sxm-80gb").verdict == "fits"
    assert (training["gradient_accumulation_steps"], training["weights"]["hidden_matrix"]) == (4, "nf4")


def test_litgpt_shards_and_checkpoints_on_several_gpus():
    training = read("litgpt.yaml", gpus=2)["training"]
    flat = {"zero_stage": 3, "data": 2, "engine": "fsdp1", "flat": {"backward_prefetch": "pre"}}
    assert (training["parallel"], training["activation_checkpointing"]) == (flat, "full")
    assert training["gradient_accumulation_steps"] == 2


def test_torchtune_components_say_model_and_method():
    answer = read("torchtune.yaml")
    assert (answer["model"]["given"], answer["method"]["tuning"], answer["packing"]) == ("llama3_1_8b", "lora", True)
    assert answer["training"]["adapter"]["targets"] == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert answer["training"]["kernels"]["optimizer"] == "fused"


def test_torchtune_says_which_recipe_it_takes(tmp_path):
    text = (EXAMPLES / "torchtune.yaml").read_text(encoding="utf-8")
    assert "single device" in str(memplan.import_file(EXAMPLES / "torchtune.yaml").document().data)
    (tmp_path / "job.yaml").write_text(f"{text}fsdp_reshard_after_forward: true\n", encoding="utf-8")
    assert "--gpus" in memplan.import_file(tmp_path / "job.yaml").document().data["answer"]


def test_torchtitan_shares_out_what_is_left():
    assert "--gpus" in memplan.import_file(EXAMPLES / "torchtitan.toml").document().data["answer"]
    training = read("torchtitan.toml", gpus=8)["training"]
    assert training["parallel"] == {"zero_stage": 3, "tensor": 2, "sequence": True, "data": 4}
    assert (training["weights"]["hidden_matrix"], training["compute_dtype"]) == ("fp32", "bf16")


TITAN = """[job]
dump_folder = "./outputs"
[model]
name = "{name}"
flavor = "{flavor}"
[training]
local_batch_size = 8
seq_len = 2048
[activation_checkpoint]
mode = "selective"
{option}
"""


def titan_plan(tmp_path, name, flavor, option="", gpus=8):
    path = tmp_path / "titan.toml"
    path.write_text(TITAN.format(name=name, flavor=flavor, option=option))
    return plan_by_share(str(path), gpu="h100", gpus=gpus).to_dict()


@pytest.mark.parametrize(
    ("option", "every"), [("selective_ac_option = '2'", 2), ("selective_ac_option = 3", 3), ("", 2)]
)
def test_torchtitan_checkpoints_every_so_many_layers_before_its_0_3(tmp_path, option, every):
    training = titan_plan(tmp_path, "llama3", "debugmodel", option)["training"]
    assert training["activation_checkpointing"] == "full"
    assert training["checkpointed_layers"] == {"every": every, "first": None}


def test_a_file_of_torchtitan_before_0_3_is_planned_as_0_2_2_where_that_was_traced(tmp_path):
    assert titan_plan(tmp_path, "llama3", "debugmodel")["training"]["stack"] == "torchtitan@0.2.2"
    for flavor in ("8B", "debugmodel"):  # with a head of its own, and the embedding
        training = titan_plan(tmp_path, "qwen3", flavor)["training"]
        assert (training["stack"], training["kernels"]["loss"]) == ("torchtitan", "fp32")
    path = tmp_path / "titan.toml"
    assumed = {row["key"]: row for row in memplan.import_file(path, gpus=8).to_dict()["assumed"]}
    assert (assumed["stack"]["value"], assumed["stack"]["change"]) == ("torchtitan", "model.name")
    assert "of 0.2 only Llama was traced" in assumed["stack"]["why"]


def test_torchtitan_0_2_2_with_16_bit_weights_under_autocast_is_refused_where_whole_layers_run_again():
    asked = {"gpu": "h100", "config": "bf16-adamw", "stack": "torchtitan@0.2.2", "sequence_length": 64}
    with pytest.raises(memplan.errors.CannotAnswerError, match="full over bf16 weights on one GPU"):
        plan_by_share("llama-3-8b", set=["activation_checkpointing=full"], **asked)
    assert plan_by_share("llama-3-8b", set=["activation_checkpointing=none"], **asked).memory.requested_bytes > 0


@pytest.mark.parametrize(
    ("version", "stack", "why"),
    [("", None, ""), ("0.1", "torchtitan@0.2.2", "the oldest version that was read"), ("0.3", None, "")],
)
def test_an_older_file_of_torchtitan_is_read_as_the_oldest_that_was(tmp_path, version, stack, why):
    titan_plan(tmp_path, "llama3", "debugmodel")
    answer = memplan.import_file(tmp_path / "titan.toml", gpus=8, trainer_version=version).to_dict()
    row = next((row for row in answer["assumed"] if row["key"] == "stack"), {"value": None, "why": ""})
    assert row["value"] == stack
    assert why in row["why"]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("[parallelism]\ntensor_parallel_degree = 2", "parallelism.tensor_parallel_degree"),
        ("[parallelism]\npipeline_parallel_degree = 2", "parallelism.pipeline_parallel_degree"),
        (
            "[parallelism]\ndata_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8",
            "parallelism.data_parallel_shard_degree",
        ),
    ],
)
def test_what_of_torchtitan_0_2_was_not_traced_is_planned_as_0_3_and_says_so(tmp_path, section, key):
    path = tmp_path / "titan.toml"
    path.write_text(TITAN.format(name="llama3", flavor="debugmodel", option="") + section, encoding="utf-8")
    answer = memplan.import_file(path, gpus=8).to_dict()
    assumed = {row["key"]: row for row in answer["assumed"]}
    assert (assumed["stack"]["value"], assumed["stack"]["change"]) == ("torchtitan", key)
    assert "whole logits in fp32" in assumed["stack"]["why"] or "a rank's whole logits" in assumed["stack"]["why"]


def test_every_layer_or_every_second_product_is_said_as_before(tmp_path):
    for option, kind in (("1", "full"), ("op", "selective")):
        training = titan_plan(tmp_path, "llama3", "debugmodel", f"selective_ac_option = '{option}'")["training"]
        assert training["activation_checkpointing"] == kind
        assert training["checkpointed_layers"] == {"every": 1, "first": None}


@pytest.mark.parametrize(
    ("name", "flavor", "parameters"),
    [
        ("qwen3", "debugmodel_moe", 315_758_848),
        ("llama3", "debugmodel", 6_163_712),
        ("llama3", "8B", 8_030_261_248),
        ("qwen3", "8B", 8_190_735_360),
    ],
)
def test_a_flavor_of_torchtitan_has_the_shapes_of_its_registry(tmp_path, name, flavor, parameters):
    plan = titan_plan(tmp_path, name, flavor, "selective_ac_option = 'op'")
    assert plan["model"]["parameters"] == parameters


@pytest.mark.parametrize("flavor", ["debugmodel", "16B"])
def test_a_flavor_whose_family_is_not_modelled_is_refused_by_it(tmp_path, flavor):
    with pytest.raises(
        memplan.errors.CannotAnswerError, match="models of family deepseek_v2 are not modelled for torchtitan"
    ):
        titan_plan(tmp_path, "deepseek_v3", flavor)


SCRIPT = """\
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel

raise SystemExit("a file that is read and never run")
max_seq_length = 1024 * 2
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Llama-3.2-1B", max_seq_length=max_seq_length, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "v_proj"])
SFTTrainer(
    model=model, args=SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="adamw_8bit")
)
"""


def test_a_script_is_read_and_never_run(tmp_path):
    answer = memplan.import_file(written(tmp_path, SCRIPT, "finetune.py")).to_dict()
    assert (answer["trainer"]["name"], answer["method"]["tuning"]) == ("unsloth", "qlora")
    training = answer["training"]
    assert (training["sequence_length"], training["micro_batch_size"], training["adapter"]["rank"]) == (2048, 2, 16)
    assert training["offload"] == {"activations": "cpu"}


def test_megatrons_flags_have_its_main_parameters():
    training = read("megatron.yaml", gpus=8)["training"]
    assert (training["weights"]["hidden_matrix"], training["master_weights"], training["gradients"]) == (
        "bf16",
        "fp32",
        {"dtype": "fp32"},
    )
    assert (training["parallel"]["data"], training["gradient_accumulation_steps"]) == (4, 2)


def test_a_swift_command_has_its_own_defaults():
    words = (
        "NPROC_PER_NODE=2 swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset a --max_length 2048 --deepspeed zero3"
    )
    answer = memplan.import_file(words.split()).to_dict()
    training = answer["training"]
    assert (training["micro_batch_size"], training["gradient_accumulation_steps"]) == (1, 8)
    shipped = training["parallel"].pop("deepspeed")  # swift/config/zero3.json
    assert (shipped["persistence_threshold"], shipped["overlap_comm"]) == ("auto", False)
    assert training["parallel"] == {"zero_stage": 3, "engine": "deepspeed", "data": 2}
    assert answer["method"]["tuning"] == "lora"


def test_shell_arithmetic_of_whole_numbers_is_computed():
    words = [
        "swift",
        "sft",
        "--model",
        "a",
        "--max_length",
        "64",
        "--gradient_accumulation_steps",
        "$(expr",
        "16",
        "/",
        "4)",
    ]
    assert memplan.import_file(words).to_dict()["training"]["gradient_accumulation_steps"] == 4


def test_nanogpt_and_nanochat_flags():
    nanogpt = memplan.import_file(
        ["python", "train.py", "--batch_size=64", "--block_size=256", "--n_layer=6"]
    ).to_dict()
    assert (nanogpt["trainer"]["name"], nanogpt["model"]["num_hidden_layers"]) == ("nanogpt", 6)
    words = "python -m scripts.base_train --depth=6 --head-dim=64 --device-batch-size=32 --max-seq-len=512 --total-batch-size=16384"
    nanochat = memplan.import_file(words.split()).to_dict()
    assert nanochat["training"]["gradient_accumulation_steps"] == 1
    assert nanochat["model"]["hidden_size"] == 384


@pytest.mark.parametrize("depth", [1, 2, 3, 8, 9, 16, 17, 31, 32, 40])
def test_nanochats_total_batch_follows_from_its_depth(depth):
    def numbers(layers):  # of matrices and head, as base_train.py counts them (get_scaling_params)
        heads = -(-64 * layers // 128)
        gates = sum(12 * heads for layer in range(layers) if layer % 2 == (layers - 1) % 2)
        return 12 * layers * (128 * heads) ** 2 + gates + 32768 * 128 * heads

    total = 2 ** round(log2(2**19 * (numbers(depth) / numbers(12)) ** 0.383))
    job = memplan.import_file(["python", "-m", "scripts.base_train", f"--depth={depth}", "--device-batch-size=1"])
    assert job.to_dict()["training"]["gradient_accumulation_steps"] == total // 2048


MAPPINGS = sorted((Path(memplan.__file__).parent.parent / "configs" / "trainers").glob("*.yaml"))
RULE_KEYS = {
    *(
        "key",
        "to",
        "table",
        "also",
        "default",
        "why",
        "value",
        "set",
        "when",
        "unless",
        "append",
        "product",
        "multiple",
    ),
    *("quotient", "smallest", "sum", "join", "as", "match", "names", "need", "refuse", "up", "least", "change"),
    *("if_null", "overrides", "program", "exact"),
}


@pytest.mark.parametrize("path", MAPPINGS, ids=lambda path: path.stem)
def test_a_mapping_has_rules_of_the_kinds_that_there_are(path):
    data = yaml_data(path)
    for rule in [*data.get("rules", ()), *data.get("joined", ())]:
        assert rule.keys() <= RULE_KEYS, rule
        assert rule.keys() & {"to", "table", "set", "need", "refuse", "value", "change", "if_null"}, rule
    assert all(isinstance(why, str) and why for why in data.get("not_modelled", {}).values())
    assert not set(data.get("irrelevant", ())) & set(data.get("not_modelled", {}))


SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.txt"))


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_every_key_of_a_released_schema_is_used_irrelevant_or_not_modelled(path):
    mapped = trainer_mappings().body(path.stem)
    known = known_keys(mapped)
    missing = [
        key
        for key in path.read_text().split()
        if key not in known
        and not any("*" in name and fnmatchcase(key, name) for name in known)
        and not any(name.startswith(f"{key}.") for name in known)
    ]
    assert missing == []


ODD = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        1.5,
        "",
        "${a.b}",
        "$x",
        "2e-5",
        [],
        [1],
        {},
        {"a": {"b": 1}},
        [{"a": 1}],
        "auto",
        10**30,
        "*",
        "\x1b[",
    ]
)
WHOLE = {path.name: yaml_data(path) for path in sorted(EXAMPLES.glob("*.y*ml"))}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_odd_values_are_read_or_refused_in_words(tmp_path_factory, name, data):
    keys = dict(WHOLE[name])
    for key in data.draw(st.lists(st.sampled_from(sorted(keys)), max_size=3)):
        keys[key] = data.draw(ODD)
    path = written(tmp_path_factory.mktemp("odd"), yaml.safe_dump(keys))
    try:
        answer = memplan.import_file(path, gpus=data.draw(st.sampled_from([None, 1, 8])))
    except MemplanError:
        return
    assert answer.to_dict()["schema"] == "memplan/import/1"


@pytest.mark.parametrize(
    "line", ["load_in_4bit: auto", "flash_attention: maybe", "gradient_checkpointing_kwargs: {use_reentrant: 2}"]
)
def test_text_where_a_key_switches_something_is_refused(tmp_path, line):
    text = f"base_model: Qwen/Qwen3-0.6B\ndatasets: [{{path: x}}]\nadapter: qlora\n{line}\n"
    with pytest.raises(InvalidFileError, match=r":4: .*expected true or false"):
        memplan.import_file(written(tmp_path, text))


def test_a_launchers_file_without_keys_is_no_launchers_file(tmp_path):
    written(tmp_path, "{}", "ds.json")
    text = f"base_model: Qwen/Qwen3-0.6B\ndatasets: [{{path: x}}]\ndeepspeed: {tmp_path}/ds.json\n"
    with pytest.raises(InvalidFileError, match="has no keys of deepspeed"):
        memplan.import_file(written(tmp_path, text))


def test_a_launchers_file_that_a_command_names_is_asked_for():
    words = (
        "accelerate launch --config_file fsdp.yaml train.py --model Qwen/Qwen3-0.6B --tuner_type lora --max_length 512"
    )
    needs = memplan.import_file(words.replace("train.py", "swift/cli/sft.py").split()).to_dict()["needs"]
    assert any("fsdp.yaml" in need for need in needs)
    assert any("--gpus" in need for need in needs)


@pytest.mark.parametrize(
    ("name", "format_name"),
    [("unsloth/Qwen3-0.6B-bnb-4bit", "nf4"), ("x/Qwen3-0.6B-AWQ", None), ("x/Qwen3-0.6B-GPTQ", None)],
)
def test_quantised_weights_that_only_the_models_name_tells_are_not_planned_as_floats(tmp_path, name, format_name):
    text = (
        f"model_name_or_path: {name}\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\ndataset: x\ntemplate: qwen\n"
    )
    path = written(tmp_path, text)
    if format_name is None:
        with pytest.warns(GuessedNameWarning), pytest.raises(CannotAnswerError, match="the name says that its"):
            plan_by_share(path, gpu="a100-80gb")
    else:
        assert plan_by_share(path, gpu="a100-80gb").training["weights"]["hidden_matrix"] == format_name


def test_evaluation_has_the_rows_that_its_own_key_or_its_trainers_default_says(tmp_path):
    text = "model_name_or_path: Qwen/Qwen3-0.6B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\ndataset: x\ntemplate: qwen\nper_device_train_batch_size: 1\n"
    sizes = []
    for more in (
        "",
        "eval_strategy: steps\nper_device_eval_batch_size: 1\n",
        "eval_strategy: steps\n",
        "eval_on_start: true\n",
    ):
        plan = plan_by_share(written(tmp_path, text + more), gpu="a100-80gb")
        sizes.append(dict(plan.memory.instants).get("evaluation", 0))
    assert 0 == sizes[0] < sizes[1]
    assert sizes[2] > 4 * sizes[1] - 4 * plan.memory.states.weight_bytes
    assert sizes[3] == sizes[2]  # before the first step
    assert plan.memory.peak.name == "evaluation"


def test_one_gpu_that_is_said_is_told_from_none(tmp_path):
    text = "base_model: Qwen/Qwen3-0.6B\ndatasets: [{path: x}]\nsequence_len: 512\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
    path = written(tmp_path, text)
    with pytest.raises(CannotAnswerError, match="--gpus N"):
        plan_by_share(path, gpu="h100")
    with pytest.raises(MemplanError, match="one GPU, which has nothing to share"):
        plan_by_share(path, gpu="h100", gpus=1)


def test_a_misspelt_key_is_named_wherever_its_file_is_planned(cli, tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text(
        "model_name_or_path: meta-llama/Llama-3.2-1B\nmax_length: 1024\nuse_peft: true\ngradient_acumulation_steps: 4\n"
    )
    ran = cli("fit", path, "--gpu", "rtx4090")
    assert ran.exit_code == 0
    assert "trl.yaml:4: gradient_acumulation_steps: TRL has no such key" in ran.err
    assert ran.err.count("did you mean 'gradient_accumulation_steps'") == 1


def test_thousands_of_unknown_keys_are_twenty_lines_and_a_number(cli, tmp_path):
    text = "model_name_or_path: openai-community/gpt2\nmax_length: 1024\n" + "".join(
        f"zz_{n}: 1\n" for n in range(1020)
    )
    err = cli("fit", written(tmp_path, text), "--gpu", "rtx4090").err
    assert err.count("TRL has no such key") == 20
    assert "... and 1,000 more" in err


@pytest.mark.parametrize("line", ["lora_alpha: .nan", "logging_steps: .NaN", "odd_key: NaN", "log: {each: nan}"])
def test_what_is_not_a_number_is_refused_whatever_key_has_it(refused, tmp_path, line):
    text = f"model_name_or_path: openai-community/gpt2\nmax_length: 1024\n{line}\n"
    assert "expected a number, got NaN" in refused("fit", written(tmp_path, text), "--gpu", "rtx4090")


def test_what_deepspeed_casts_is_cast_whatever_dtype_a_file_loads_weights_in(cli, tmp_path):
    expected = set()
    for line in ("", "dtype: bfloat16\n", "dtype: float32\n"):
        path = tmp_path / "trl.yaml"
        path.write_text(f"model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 1024\n{line}")
        ran = cli("fit", path, "--with", EXAMPLES / "ds_z2.json", "--gpu", "h100", "--gpus", 8, "--json")
        expected.add(ran.data["peak"]["requested_bytes"])
        shown = cli("import", path, "--with", EXAMPLES / "ds_z2.json", "--gpus", 8, "--json").data["assumed"]
        assert ("weights.default", "bf16") in {(row["key"], row["value"]) for row in shown}
    assert len(expected) == 1


def test_a_file_of_several_gpus_is_planned_for_as_many_as_are_given(cli, tmp_path):
    path = tmp_path / "torchtitan.toml"
    text = (EXAMPLES / "torchtitan.toml").read_text()
    path.write_text(text.replace("tensor_parallel_degree = 2", "tensor_parallel_degree = 1"))
    ran = cli("fit", path, "--gpu", "h100", "--gpus", 4)
    assert ran.exit_code in (0, 1)
    assert "each of 4 h100-sxm-80gb" in ran.out


GENERATED = """model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
per_device_train_batch_size: 8
reward_funcs: [accuracy]
max_completion_length: 512
vllm_max_model_length: 1024
"""


@pytest.mark.parametrize(
    ("keys", "rollout"),
    [
        ("", {"engine": "transformers"}),
        ("use_vllm: true\n", {"engine": "vllm", "engine_fraction": 0.3}),
        ("use_vllm: true\nvllm_mode: server\n", {"engine": "server"}),
        ("use_vllm: true\ntorch_dtype: bfloat16\n", {"engine": "server"}),  # a key of TRL 0.26 and older
        (
            "use_vllm: true\nvllm_gpu_memory_utilization: 0.5\ncache_implementation: static\n",
            {"engine": "vllm", "engine_fraction": 0.5},
        ),
        ("steps_per_generation: 8\nnum_iterations: 2\n", {"micro_batches": 8, "iterations": 2}),
        ("generation_batch_size: 16\n", {"micro_batches": 2}),
    ],
)
def test_a_file_for_grpo_says_what_generates_and_how_much_together(tmp_path, keys, rollout):
    (tmp_path / "grpo.yaml").write_text(GENERATED + keys, encoding="utf-8")
    found = plan_by_share(tmp_path / "grpo.yaml", gpu="a100-80gb").training["method"]["rollout"]
    assert found["completion_length"] == 512
    assert {key: found[key] for key in rollout} == rollout


@pytest.mark.parametrize(
    "key",
    [
        "use_transformers_continuous_batching: true",
        "cache_implementation: static",
        "torch_dtype: bfloat16\nuse_vllm: true\nuse_liger_kernel: true",
        "use_vllm: true\nvllm_mode: colocated",
        "steps_per_generation: 2\ngeneration_batch_size: 16",
    ],
)
def test_what_of_generation_is_not_modelled_is_refused_by_its_key(tmp_path, key):
    (tmp_path / "grpo.yaml").write_text(GENERATED + key + "\n", encoding="utf-8")
    with pytest.raises(CannotAnswerError, match=key.rpartition("\n")[2].partition(":")[0]):
        plan_by_share(tmp_path / "grpo.yaml", gpu="a100-80gb")


LAUNCHED = """distributed_type: FSDP
mixed_precision: bf16
num_processes: 16
fsdp_config: {{fsdp_sharding_strategy: {}, fsdp_backward_prefetch: {}, fsdp_use_orig_params: false, {}}}
"""
LAYERS = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"


def test_a_launcher_that_names_no_version_starts_the_first_fsdp(tmp_path):
    launcher = written(tmp_path, LAUNCHED.format("FULL_SHARD", "BACKWARD_PRE", LAYERS), "launch.yaml")
    parallel = memplan.import_file(written(tmp_path, TRL), beside=[launcher]).to_dict()["training"]["parallel"]
    assert (parallel["data"], parallel["zero_stage"], parallel["engine"]) == (16, 3, "fsdp1")
    assert parallel["flat"] == {"backward_prefetch": "pre", "use_orig_params": False}


@pytest.mark.parametrize(("strategy", "hybrid"), [("2", False), ("SHARD_GRAD_OP", False), ("5", True)])
def test_the_first_fsdp_may_keep_layers_gathered(tmp_path, strategy, hybrid):
    launcher = written(tmp_path, LAUNCHED.format(strategy, "BACKWARD_PRE", LAYERS), "launch.yaml")
    answer = memplan.import_file(written(tmp_path, TRL), beside=[launcher]).to_dict()
    parallel = answer["training"]["parallel"]
    assert (parallel["zero_stage"], parallel["engine"], parallel["reshard_after_forward"]) == (3, "fsdp1", False)
    assert any("parallel.replicate" in need for need in answer["needs"]) == hybrid


def test_fsdps_hybrid_strategy_asks_how_many_groups_there_are(tmp_path):
    launcher = written(tmp_path, LAUNCHED.format("HYBRID_SHARD", "NO_PREFETCH", LAYERS), "launch.yaml")
    answer = memplan.import_file(written(tmp_path, TRL), beside=[launcher]).to_dict()
    assert any("parallel.replicate" in need for need in answer["needs"])


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (f"{LAYERS}, fsdp_forward_prefetch: true", "fsdp_forward_prefetch"),
        ("fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "fsdp_auto_wrap_policy"),
        ("fsdp_version: 2, fsdp_auto_wrap_policy: NO_WRAP", "fsdp_auto_wrap_policy"),
        ("fsdp_version: 2", "one unit"),
        (f"{LAYERS}, fsdp_transformer_layer_cls_to_wrap: LlamaMLP", "cls_to_wrap"),
        (f"{LAYERS}, fsdp_reshard_after_forward: NO_SHARD", "NO_SHARD"),
        (f"{LAYERS}, fsdp_transformer_layer_cls_to_wrap: 'LlamaMLP,LlamaDecoderLayer'", "cls_to_wrap"),
    ],
)
def test_units_of_fsdp_that_are_not_followed_are_refused_by_their_key(tmp_path, keys, named):
    launcher = written(tmp_path, LAUNCHED.format("FULL_SHARD", "BACKWARD_POST", keys), "launch.yaml")
    with pytest.raises(CannotAnswerError, match=named):
        plan_by_share(str(written(tmp_path, TRL)), gpu="h100", beside=[launcher])


@pytest.mark.parametrize(
    ("classes", "blocks"),
    [
        ("Qwen2_5_VLDecoderLayer", False),
        ("'Qwen3_5DecoderLayer,Qwen3_5VisionBlock'", True),
        ("'Qwen3_5VisionBlock,Qwen3_5DecoderLayer'", True),
        ("[Gemma3DecoderLayer, SiglipEncoderLayer]", True),
    ],
)
def test_blocks_of_a_tower_are_units_where_a_launcher_names_them_beside_layers(tmp_path, classes, blocks):
    keys = f"fsdp_version: 2, {LAYERS}, fsdp_transformer_layer_cls_to_wrap: {classes}"
    launcher = written(tmp_path, f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {{{keys}}}\n", "launch.yaml")
    answer = plan_by_share(str(written(tmp_path, TRL)), gpu="h100", beside=[launcher]).to_dict()
    assert answer["training"]["parallel"]["tower_blocks"] is blocks


def test_layers_that_a_launcher_names_are_units(tmp_path):
    keys = f"{LAYERS}, fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer"
    launcher = written(tmp_path, LAUNCHED.format("FULL_SHARD", "BACKWARD_PRE", keys), "launch.yaml")
    answer = plan_by_share(str(written(tmp_path, TRL)), gpu="h100", beside=[launcher]).to_dict()
    assert answer["training"]["parallel"]["engine"] == "fsdp1"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tuned", ["use_peft: false", "use_peft: true"])
def test_weights_in_16_bits_are_upcast_over_fsdp_where_mixed_precision_is_on_alone(tmp_path, version, tuned):
    trained = written(tmp_path, f"{TRL.replace('use_peft: false', tuned)}dtype: bfloat16\nbf16: false\n")
    launched = f"distributed_type: FSDP\nnum_processes: 16\nfsdp_config: {{fsdp_version: {version}, {LAYERS}}}\n"
    mixed = written(tmp_path, f"{launched}mixed_precision: bf16\n", "mixed.yaml")
    training = plan_by_share(str(trained), gpu="h100", beside=[mixed]).to_dict()["training"]
    dtype = training["adapter"]["dtype"] if "true" in tuned else training["weights"]["hidden_matrix"]
    assert dtype == "fp32"
    plain = written(tmp_path, f"{launched}mixed_precision: 'no'\n", "plain.yaml")
    training = plan_by_share(str(trained), gpu="h100", beside=[plain]).to_dict()["training"]
    dtype = training["adapter"]["dtype"] if "true" in tuned else training["weights"]["hidden_matrix"]
    assert (dtype, training["autocast"]) == ("fp32" if "true" in tuned else "bf16", False)


@pytest.mark.parametrize(("mixed", "stored"), [("bf16", "fp32"), ("no", "bf16")])
def test_a_launchers_mixed_precision_counts_beside_pure_bf16(tmp_path, mixed, stored):
    trained = written(tmp_path, PURE)
    launched = f"distributed_type: FSDP\nnum_processes: 8\nmixed_precision: '{mixed}'\n"
    beside = written(tmp_path, f"{launched}fsdp_config: {{fsdp_version: 2, {LAYERS}}}\n", "launcher.yaml")
    training = plan_by_share(str(trained), gpu="h100", beside=[beside]).to_dict()["training"]
    assert training["weights"]["hidden_matrix"] == stored


PURE = """
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
do_train: true
finetuning_type: full
dataset: alpaca_en_demo
template: llama3
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1
pure_bf16: true
"""

QLORA = TRL.replace("false", "true") + "dtype: bfloat16\nload_in_4bit: true\nlora_target_modules: all-linear\n"


def test_codes_that_fsdp1_flattens_are_planned_with_adapters_in_fp32(tmp_path):
    launcher = written(tmp_path, LAUNCHED.format("FULL_SHARD", "BACKWARD_PRE", LAYERS), "launch.yaml")
    stored = written(tmp_path, QLORA + "bnb_4bit_quant_storage: bfloat16\n")
    answer = plan_by_share(str(stored), gpu="h100", beside=[launcher])
    training = answer.to_dict()["training"]
    assert (training["parallel"]["engine"], training["adapter"]["dtype"]) == ("fsdp1", "fp32")
    with pytest.raises(memplan.MemplanError, match="set bnb_4bit_quant_storage: bfloat16"):
        plan_by_share(str(written(tmp_path, QLORA)), gpu="h100", beside=[launcher])


def test_groups_of_replicas_that_are_none_are_refused_by_their_key(tmp_path):
    text = (EXAMPLES / "torchtitan.toml").read_text()
    none = text.replace("tensor_parallel_degree", "data_parallel_replicate_degree = 0\ntensor_parallel_degree")
    (tmp_path / "titan.toml").write_text(none)
    with pytest.raises(InvalidFileError, match="replicate_degree: expected a whole number, at least 1, got 0"):
        memplan.import_file(tmp_path / "titan.toml", gpus=8)


def test_a_group_of_no_completions_is_said_to_be_none(tmp_path):
    (tmp_path / "grpo.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\nnum_generations: 0\nper_device_train_batch_size: 4\n"
    )
    with pytest.raises(InvalidFileError, match="num_generations: expected a whole number, at least 1, got 0"):
        memplan.import_file(tmp_path / "grpo.yaml")


@pytest.mark.parametrize(("flag", "role"), [("--do_eval", "not_training"), ("--do_train", "job")])
def test_an_examples_script_that_only_evaluates_is_no_training(flag, role):
    words = ["python", "run_clm.py", "--model_name_or_path", "gpt2", "--block_size", "512", flag]
    assert memplan.import_file(words).to_dict()["role"] == role


@pytest.mark.parametrize(
    ("trainer", "key"), [("trl", "activation_offloading: true"), ("llama-factory", "use_unsloth_gc: true")]
)
def test_activations_in_host_memory_are_written_as_the_trainer_says_them(trainer, key):
    keys = {"activation_checkpointing": "full", "offload.activations": "cpu"}
    assert key in memplan.emit("llama-3.1-8b", trainer, config="lora", gpu="h100-sxm-80gb", set=keys)


def test_files_of_forks_and_of_nobody_are_no_trainers_that_they_look_like(tmp_path):
    flame = "[job]\ndump_folder = 'e'\n[model]\nname = 'fla'\nconfig = 'c.json'\n[training]\nseq_len = 2048\nvarlen = true\n"
    own = "base_model: Qwen/Qwen3-4B\noptim: paged_adamw_8bit\nper_device_train_batch_size: 2\nmax_length: 3072\n"
    forked = memplan.import_file(written(tmp_path, flame, "fla.toml")).to_dict()
    assert (forked["trainer"]["name"], forked["needs"] == [] and "not read" in forked["answer"]) == ("flame", True)
    with pytest.raises(InvalidFileError, match="no trainer that memplan reads"):
        memplan.import_file(written(tmp_path, own, "own.yaml"))


def test_experts_of_megablocks_fork_are_refused(tmp_path):
    flags = "--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 64 --micro-batch-size 1 --moe-num-experts=64"
    path = written(tmp_path, f"torchrun --nproc_per_node 2 pretrain_gpt.py {flags}\n", "run.sh")
    refused = {one["key"]: one["why"] for one in memplan.import_file(path).to_dict()["keys"]["not_modelled"]}
    assert refused["moe_num_experts"] == "experts of MegaBlocks' fork"
