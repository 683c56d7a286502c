"""Whatever is wrong with the input: one readable line each, exit code 2, no traceback, at once."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.cli.main import COMMANDS
from tests.documents.test_loading import TEN_MISTAKES

GPU = ("--gpu", "rtx4090")
TRAINER_FILE = Path(__file__).parents[1] / "trainers" / "examples" / "trl.yaml"
MOST_LINES = 48  # of help, which a screen of 80 columns shows without scrolling
ONE = ("fit", "gpt2", *GPU, "--config", "bf16-adamw")


# ------------------------------------------------------------------ what would change nothing
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("recommend", "--host-memory", "1"), 2, "'1' is not a size"),
        (("where", "gpt2", "--lora", "--host-memory", "nanGiB"), 2, "'nanGiB' is not a size"),
        (("max", "gpt2", "--for", "batch", *GPU, "--with", "no.yaml"), 2, "--with no.yaml: goes with a trainer's own file"),
        (("max", *GPU, "--with", "no.yaml"), 2, "--with no.yaml: goes with a trainer's own file"),
        (("fit", "gpt2", *GPU, "--schedule", ""), 2, "--schedule: expected a name, got ''"),
        (("fit", "gpt2", *GPU, "--method", "inference", "--with", "x", "--profile", "y"), 2, "--with and --profile would have no effect"),
        (("fit", "gpt2", *GPU, "--method", "inference", "--host-memory", "nonsense"), 2, "--host-memory would have no effect"),
        (("fit", "gpt2", *GPU, "--method", "inference", "--rank", "3"), 3, "other ways of serving are not modelled"),
        (("fit", "gpt2", *GPU, "--lora", "--gpus", "2", "--rank", "0", "--plot", "x.svg"), 2, "--plot: ranks have no picture"),
        (("suggest", "gpt2", *GPU, "--write"), 2, "--write changes a trainer's file: give one as MODEL"),
        (("suggest", TRAINER_FILE, *GPU, "--keep", "optimizer"), 2, "--keep is for a search of configs"),
        (("trace", "--history", "h.json", *GPU), 2, "--history replays a run as it was"),
        (("validate", "--replay", "x.json", "-b", "2"), 2, "--replay: records say what is trained"),
        (("fit", "t5-base", *GPU), 3, "; memplan run executes a script that trains it"),
        (("fit", "gpt2", *GPU, "--method", "inference", "--tp", "2"), 2, "--tp 2 takes --gpus 2"),
        (("max", "gpt2", "--for", "batch", *GPU, "-b", "5"), 2, "micro_batch_size: it is what is sought; leave it out"),
        (("max", "gpt2", *GPU, "--set", "micro_batch_size=5"), 2, "micro_batch_size: it is what is sought; leave it out"),
        (("frontier", "gpt2", *GPU, "--set", "sequence_length=5"), 2, "sequence_length: lengths are an axis of the grid; leave it out"),
        (("fit", "gpt2", *GPU, "-s", "1000000000000"), 2, "expected a whole number from 1 to 1,073,741,824, got 1000000000000"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_an_option_that_would_change_nothing_is_refused(refused, arguments, code, said):
    assert said in refused(*arguments, code=code)


def test_a_job_of_petabytes_is_answered(cli):
    ran = cli(*ONE, "-b", str(2**24), "--format", "plain")
    assert (ran.exit_code, ran.err) == (1, "")
    assert "it fits with micro_batch_size=32 (saves 9680.01 TiB" in ran.out


# ------------------------------------------------------------------ names
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("fit", "lama-8b", *GPU), "did you mean 'llama-8b'?"),
        (("fit", "llama-3.1-8c", *GPU), "did you mean 'llama-3.1-8b'?"),
        (("fit", "gpt2", "--gpu", "rtx4900"), "did you mean 'rtx4090'?"),
        (("fit", "gpt2", "--gpu", "h100-smx"), "did you mean 'h100-sxm'?"),
        (("fit", "gpt2", *GPU, "--config", "teir1"), "did you mean 'tier1'?"),
        (("max", "--config", "bf16-adamv"), "did you mean 'bf16-adamw'?"),
        (("where", "gpt3", "--config", "tier1"), "did you mean 'gpt2'?"),
        (("explain", "mistral-7c"), "did you mean 'mistral-7b'?"),
        (("show", "rtx409"), "did you mean 'rtx4090'?"),
        (("show", "iq3-xx"), "did you mean 'iq3-xxs'?"),
        ((*ONE, "--set", "optimizer=adamv-fp32"), "did you mean 'adamw-fp32'?"),
        ((*ONE, "--set", "weights=q4_00"), "did you mean 'q4-0'?"),
        ((*ONE, "--set", "gradients.dtype=fp8-e4m4"), "did you mean 'fp8-e4m3'?"),
        ((*ONE, "--set", "kernals.optimizer=fused"), "did you mean 'kernels'?"),
        ((*ONE, "--set", "kernels.optimiser=fused"), "did you mean 'optimizer'?"),
        ((*ONE, "--set", "kernels.attention=flsh"), "did you mean 'flash'?"),
        ((*ONE, "--set", "weights.hiden_matrix=bf16"), "did you mean 'hidden_matrix'?"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else value,
)
def test_an_unknown_name_gets_the_nearest_match_in_one_line(refused, arguments, match):
    assert match in refused(*arguments)


@pytest.mark.parametrize(
    "name", ["", " ", "x" * 5000, "../../etc/passwd", "/dev/zero", "nul\0byte", "-", "~", "%s", "\n", "\u202e"]
)
def test_a_name_that_is_none_is_refused(cli, name):
    for ran in (
        cli("show", name),
        cli("fit", name, *GPU),
        cli("fit", "gpt2", *GPU, "--config", name),
        cli("fit", "gpt2", "--gpu", name),
    ):
        assert ran.exit_code in (2, 3)
        assert ran.out == ""
        assert "Traceback" not in ran.err
        assert len(ran.err) < 6000


def test_two_formats_named_iq2_are_not_guessed_between(refused):
    assert "iq2" in refused(*ONE, "--set", "weights=iq2")


def test_a_mistyped_command_is_a_usage_error(cli):
    ran = cli("fitt")
    assert (ran.exit_code, ran.out) == (2, "")
    assert "fitt" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [("fit", "--no-such-flag"), ("list",), ("list", "gpu"), ("show",), ("schema", "plans"), ("fit", "a", "b")],
)
def test_a_usage_error_exits_with_2(cli, arguments):
    ran = cli(*arguments)
    assert (ran.exit_code, ran.out) == (2, "")
    assert ran.err.startswith("memplan: ")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("list", "gpu"), "'gpus'"),
        (("ftt",), "'fit'"),
        (("fit", "llama-8b", "h200"), "--gpu h200"),
        (("fit", "llama-8b", "tier1"), "--config tier1"),
        (("fit", "llama-8b", "--checkpointing", "ful"), "'full'"),
    ],
)
def test_a_usage_error_names_the_nearest_thing_that_is_understood(refused, arguments, meant):
    assert f"did you mean {meant}?" in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("fit", "llama-8b", "--lora_r", "64"), "No such option: --lora-r; here it is --lora-rank (see"),
        (("emit", "llama-8b", "--trainer", "trl"), "here it is --as (see"),
        (("emit", "llama-8b", "--format", "axolotl"), "here it is --as (see"),
        (("fit", "llama-8b", "--nproc_per_node", "8"), "here it is --gpus (see"),
        (
            ("fit", "llama-8b", "--global-batch", "64"),
            "--global-batch; here it is --micro-batches N, or --set gradient_",
        ),
        (("where", "llama-8b", "--global_batch_size", "64"), "here it is --set gradient_accumulation_steps=8 (see"),
        (("fit", "llama-8b", "--ctx-size", "8192"), "here it is --context (see"),
        (("max", "llama-8b", "--context", "8192"), "here it is memplan fit MODEL --method inference (see"),
        (("where", "llama-8b", "--method", "dpo"), "here it is --set method.stage=dpo ("),
        (("list", "gpus", "--vram", "24GB"), "No such option: --vram (see"),
        (("run", "train.py", "--host-memory", "64GiB"), "No such option: --host-memory"),
        (("trace", "gpt2", "--host-memory", "64GiB"), "No such option: --host-memory"),
        (("validate", "gpt2", "--with", "ds.json"), "No such option: --with"),
        (("fit", "llama-8b", "--gpu", "rtx9999"), "any other: --gpu-memory 24GiB"),
        (("fit", "llama-8b", "--gpu", "colab"), "a notebook's free GPU is a t4"),
        (("fit", "Llama", "3.1", "8B", "--gpu", "4090"), 'quote a name of several words: "Llama 3.1 8B"'),
        (("fit", "llama3", "8b", "on", "4090"), 'quote a name of several words: "llama3 8b"'),
        (("fit", "llama-8b", "--gpu", "h100", "--muon"), "here it is --config muon (see"),
        (("fit", "llama-8b", "--gpu", "M3 Pro 36GB"), "of another Mac, two thirds of its memory up to 32 GB"),
        (("fit", "llama-8b", "--gpu", "h100", "--stack", "hf"), "known: axolotl, bundled,"),
        (("compare", "llama-8b", "mistral-7b"), "a command takes one model: ask for mistral-7b by itself"),
        (("check", "none.yaml"), "none.yaml: no such file; a first one may say {version: 1, budgets: ["),
        (("fit", "nobody/xyz-7b"), "or --online to fetch it"),
        (("fit", "llama-8b", "-b", "1e3"), "expected a whole number, got '1e3'"),
        (("llama-8b",), "did you mean memplan fit llama-8b?"),
        (("why", "llama-8b", __file__), f"did you mean --message {__file__}?"),
    ],
)
def test_a_mistake_is_told_the_way_that_there_is(refused, arguments, said):
    assert said in refused(*arguments)
    assert refused("fit", "llama-8b", "--checkpointing", "on").endswith("'full'")


def test_a_method_that_our_own_loop_does_not_run_is_told_who_does(cli):
    ran = cli("fit", "llama-8b", "--gpu", "h100", "--full", "--method", "dpo")
    assert (ran.exit_code, ran.out) == (3, "")
    assert "as TRL's own trainer runs it: --stack trl" in ran.err


@pytest.mark.parametrize("word", ["", " ", "\u2028", "\x1b[31m"])
def test_a_surplus_word_of_nothing_is_a_usage_error(refused, word):
    assert "unexpected extra argument" in refused("recommend", word)


def test_a_value_that_looks_like_an_option_is_a_value(refused):
    assert "-h: expected a name that ends in .svg or .png" in refused(
        "frontier", "gpt2", *GPU, "--config", "lora", "--plot", "-h"
    )


def test_a_name_too_long_for_a_file_is_refused_wherever_it_stands(refused):
    name = "x" * 400
    job = ("fit", "gpt2", *GPU, "--config", "lora")
    assert "unexpected extra argument" in refused(*job, name)
    assert "not a usable path: File name too long" in refused(*job, "--plot", f"{name}/x.svg")
    assert "nosuch/x.svg: there is no folder nosuch" in refused(*job, "--plot", "nosuch/x.svg")


def test_an_empty_name_is_not_all_tables(refused):
    assert "unknown table ''" in refused("tables", "")


def test_more_gpus_than_any_published_run_had_are_refused(refused):
    assert "16384" in refused(*ONE, "--gpus", "16385")


@pytest.mark.parametrize("name", ["a.txt", "model.pt", "b.yaml.bak"])
def test_suggestions_are_not_saved_into_a_folder_that_is_named_like_a_file(refused, tmp_path, name):
    line = refused("suggest", "gpt2", *GPU, "--save", tmp_path / name)
    assert f"--save {tmp_path / name}: expected a name that ends in .yaml, .yml, .json, or a folder" in line
    assert not (tmp_path / name).exists()


# ------------------------------------------------------------------ settings
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("micro_batch_size=0", "micro_batch_size: expected a whole number from 1"),
        ("micro_batch_size=-1", "micro_batch_size: expected a whole number from 1"),
        ("micro_batch_size=nan", "micro_batch_size: expected an integer, got 'nan'"),
        ("micro_batch_size=.nan", "micro_batch_size: expected an integer, got '.nan'"),
        ("micro_batch_size=1.5", "micro_batch_size: expected an integer, got 1.5"),
        ("micro_batch_size=two", "micro_batch_size: expected an integer, got 'two'"),
        ("micro_batch_size=", "micro_batch_size: expected an integer, got None"),
        (f"micro_batch_size={10**30}", "micro_batch_size: expected a"),
        (f"sequence_length={10**30}", "sequence_length: expected a"),
        ("sequence_length=0", "sequence_length: expected a whole number from 1"),
        ("gradient_accumulation_steps=0", "gradient_accumulation_steps: expected"),
        ("dropout=1.5", "dropout: expected a probability"),
        ("dropout=.inf", "dropout: expected"),
        ("kernels.loss_chunks=0", "kernels.loss_chunks: expected"),
        ("compute_dtype=fp64", "compute_dtype: expected fp32, bf16 or fp16"),
        ("reserve=500", "--set reserve: expected text, got 500"),
        ("reserve='500'", "--set reserve: '500' is not a size"),
        ("reserve=5 XB", "unknown unit"),
        ("reserve=-5 MiB", "is not a size"),
        ("adapter={kind: lora, rank: 0}", "adapter.rank: expected"),
        ("adapter={kind: lora, targets: []}", "adapter.targets: expected"),
        ("adapter={targets: [q_projj]}", "'q_projj' is no projection of GPT-2; known: c_attn, c_fc, c_proj"),
        ("adapter={targets: [c_attn, nope]}", "'nope' is no projection"),
        ("adapter.kind=lorra", "did you mean 'lora'?"),
        ("weights=q8-k", "exists only during computation"),
        ("weights.norm=q4-0", "norms and biases stay in"),
        ("optimizer.embedding=muon-int4", "takes hidden and expert matrices only"),
        ("compute_dtype=fp16", "compute in bf16, not in fp16"),
        ("kernels=fused", "kernels: expected"),
        ("micro_batch_size.x=1", "micro_batch_size"),
        ("status=perfect", "status: expected proven, works, experimental, untried or diverges"),
        ("description=[1]", "description: expected text"),
        ("weights=[a: b", "not valid YAML"),
        ("no-equals-sign", "expected KEY=VALUE"),
        ("=1", "expected KEY=VALUE"),
        ("nothing=1", "nothing: unknown key"),
        ("lora_r=64", "--set lora_r: unknown key; here it is adapter.rank"),
        (".=1", "unknown key"),
        ("Kernels.optimizer=fused", "--set Kernels: unknown key; did you mean 'kernels'?"),
        ("kernels.Optimizer=fused", "--set kernels.Optimizer: unknown key; did you mean 'optimizer'?"),
        ("none=1", "--set none: unknown key"),
        ("str=1", "--set str: unknown key"),
        ("weights.Default=bf16", "--set weights.Default: unknown role; did you mean 'default'?"),
        ("adapter={Kind: lora}", "--set adapter.Kind: unknown key; did you mean 'kind'?"),
        (
            "adapter.vision=false",
            "--set adapter.vision: the config has no adapter; --set adapter.kind=lora gives it one",
        ),
        ("adapter={dropout: ~}", "--set adapter: the config has no adapter"),
        ("weights.int=1", "--set weights.int: expected text, got 1"),
        ("parallel.data=16385", "parallel.data: expected a whole number from 1 to 16,384, got 16385"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(refused, setting, message):
    assert message in refused(*ONE, "--set", setting)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--with", "ds_z3.json"), "--with ds_z3.json: goes with a trainer's own file, and none is given"),
        (("--trainer-version", "1.9"), "--trainer-version 1.9: goes with a trainer's own file, and none is given"),
        (("--stack", "trl@"), "trl@: expected a version behind the @"),
        (
            ("--set", "method={stage: grpo, rollout: {micro_batches: 1000000000}}"),
            "--set method.rollout.micro_batches: expected a whole number from 1 to 1,048,576",
        ),
        (("--set", "parallel.deepspeed.overlap_comm=true"), "--set parallel.deepspeed: counts with"),
        (("--hsdp", "4"), "--set parallel.replicate: 4 groups do not share one GPU; --gpus N, or"),
        (
            ("--gpus", "8", "--set", "parallel.replicate=0"),
            "--set parallel.replicate: expected a whole number from 1 to 16,384, got 0",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_has_no_effect_or_bound_is_refused(refused, arguments, message):
    assert message in refused(*ONE, *arguments)


def test_a_loss_in_millions_of_pieces_is_refused_at_once(refused):
    job = ("fit", "llama-3.2-1b", *GPU, "--config", "bf16-adamw", "--stack", "litgpt", "-b", "4096", "-s", "65536")
    assert "2,097,120 pieces; at most 16,384 are planned" in refused(*job, code=3)


def test_contradictions_are_refused(refused):
    assert "cannot accumulate" in refused(
        *ONE, "--set", "gradients.lifetime=layer", "--set", "gradient_accumulation_steps=2"
    )
    assert "clipping needs" in refused(*ONE, "--set", "gradients.lifetime=layer", "--set", "clip_gradients=true")
    stable = ("fit", "pythia-14m", *GPU, "--config", "qlora", "--stack", "litgpt", "--set", "gradients.lifetime=layer")
    assert "whose embedding no optimizer updates" in refused(*stable, code=3)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--gpu", "h100"), "--gpu: given more than once"),
        (("-g", "rtx4090"), "--gpu: given more than once"),
        (("-c", "qlora"), "--config: given more than once"),
        (("-b", 1, "--batch-size", 1), "--micro-batch-size/--batch-size: given more than once"),
        (("--tied", "--untied"), "--tied/--untied: given more than once"),
        (("--json", "--format", "md"), "--json contradicts --format md"),
        (("--json", "-f", "table"), "--json contradicts --format table"),
        (("--qlora",), "--qlora and --config: give one of them"),
        (("--set", "micro_batch_size=4", "-b", 1), "--set micro_batch_size contradicts --micro-batch-size"),
        (("--set", "sequence_length=4", "-s", "4k"), "--set sequence_length contradicts --sequence-length"),
        (("--set", "activation_checkpointing=full", "--checkpointing", "none"), "contradicts --checkpointing"),
        (("--set", "optimizer=sgd", "--optimizer", "adamw"), "--set optimizer contradicts --optimizer"),
        (("--set", "adapter={rank: 4}", "--lora-rank", 8), "--set adapter contradicts --lora-rank"),
        (("--set", "micro_batch_size=2", "--set", "micro_batch_size=3"), "micro_batch_size: given more than once"),
        (("--set", "weights.norm=fp32", "--set", "weights=q4-0"), "--set weights contradicts --set weights.norm"),
        (("--lora-rank", 8), "--lora-rank: bf16-adamw has no adapter; give --lora"),
        (("-s", "4x"), "expected tokens, such as 4096 or 4k, got '4x'"),
        (("-s", "0k"), "expected tokens"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_what_counts_once_is_not_given_twice(refused, arguments, match):
    assert match in refused(*ONE, *arguments)


@pytest.mark.parametrize(
    ("arguments", "same"),
    [
        (("--qlora",), ("--config", "qlora")),
        (("--lora",), ("--config", "lora")),
        (("--full",), ("--config", "bf16-adamw")),
        (("--qlora", "--batch-size", 2, "--seq-len", "1k"), ("--config", "qlora", "-b", 2, "-s", 1024)),
        (("--qlora", "-s", "4k"), ("--config", "qlora", "-s", 4096)),
        (("--qlora", "-s", "28,712"), ("--config", "qlora", "-s", 28712)),
        (("--qlora", "--batch_size", 2, "--seq_len", "1k"), ("--config", "qlora", "-b", 2, "-s", 1024)),
        (("--lora", "--lora-rank", 64), ("--config", "lora", "--set", "adapter.rank=64")),
        (("--full", "--optimizer", "sgd"), ("--config", "bf16-adamw", "--set", "optimizer=sgd")),
        (("--full", "-q", "-q"), ("--config", "bf16-adamw", "-q")),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_what_people_type_is_what_it_stands_for(cli, arguments, same):
    job = ("fit", "llama-3.2-1b", *GPU, "--json")
    assert cli(*job, *arguments).data == cli(*job, *same).data


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "lab"] + ["lab train", "lab largest"])
def test_help_is_a_screen_in_groups_with_an_example(cli, command):
    lines = cli(*command.split(), "--help").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= MOST_LINES
    assert "Output:" in lines
    assert any(line.startswith(f"  Example: memplan {command}") for line in lines[-2:])


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "lab"])
def test_all_of_help_tells_what_every_option_does(cli, command):
    short, whole = cli(command, "--help").out, cli(command, "--help-all").out
    listed = set(re.findall(r"(?<![\w-])--\w[\w-]*", whole))
    assert listed >= set(re.findall(r"(?<![\w-])--\w[\w-]*", short)) - {"--help-all"}
    assert "More, in --help-all:" not in whole


def test_a_command_of_the_lab_that_is_none_points_to_the_labs_help(refused):
    assert refused("lab", "trian").endswith("did you mean 'train'? (see: memplan lab --help)")


@pytest.mark.parametrize(
    "setting", ["micro_batch_size=0", "micro_batch_size=x", "kernels.loss=x", "no_such_key=1", "weights.norm=x"]
)
def test_a_wrong_setting_is_named_as_one_and_not_as_a_line_of_the_config(refused, setting):
    assert refused(*ONE, "--set", setting).startswith(f"memplan: --set {setting.split('=')[0]}: ")


def test_a_wrong_shorthand_says_which_key_it_is(cli):
    ran = cli(*ONE, "-b", str(10**30))
    assert ran.exit_code == 2
    assert "micro_batch_size" in ran.err or "--micro-batch-size" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("value", ["NaN", "1e999", "0", "", "4k", "a\nb", "9" * 30])
def test_a_number_that_is_refused_is_shown(refused, value):
    assert f", got {value!r} (see" in refused(*ONE, "-b", value)


@pytest.mark.parametrize("option", [("--timeout", "inf"), ("--timeout", "1e400"), ("--synthetic", "9" * 30)])
def test_no_number_of_a_run_is_beyond_all_bounds(refused, option):
    assert f"Invalid value for '{option[0]}': expected at most" in refused("run", "x.py", *option)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e3", "two", "1.5"])
@pytest.mark.parametrize("flag", ["-b", "-s", "--gpus"])
def test_a_shorthand_takes_positive_integers_alone(cli, flag, value):
    ran = cli(*ONE, flag, value)
    assert (ran.exit_code, ran.out) == (2, "")
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "size", ["24", "24G", "0 GiB", "-1 GiB", "nan GiB", "1e30 GiB", f"{10**30} GiB", "", "GiB", "24 GiB GiB"]
)
def test_a_size_without_a_unit_or_sense_is_refused(refused, size):
    assert refused("fit", "gpt2", "--gpu-memory", size)


def test_two_ways_to_name_a_gpu_are_one_too_many(refused):
    assert "give one of them" in refused("fit", "gpt2", *GPU, "--gpu-memory", "24GiB")


def test_no_model_at_all_is_refused(refused):
    assert "no model given" in refused("fit", *GPU)


def test_a_model_and_shapes_are_one_too_many(refused):
    assert "give one of them" in refused("fit", "gpt2", "--layers", "3", *GPU)


def test_a_model_of_thousands_of_kinds_of_layers_is_refused_at_once(refused, write):
    config = {
        "model_type": "qwen2_moe", "hidden_size": 64, "num_hidden_layers": 10_000, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 100, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2,
    }  # fmt: skip
    path = write("config.json", json.dumps(config))
    assert "10,000 changes between kinds of layers; at most 128 are planned" in refused("fit", path, *GPU, code=3)


# ------------------------------------------------------------------ shapes
GOOD = {"layers": 2, "hidden": 256, "heads": 4}


@pytest.mark.parametrize("value", [0, -1, 10**30, "nan", "1.5", "", "1e9"])
@pytest.mark.parametrize("shape", ["layers", "hidden", "intermediate", "heads", "kv-heads", "head-dim", "vocab"])
def test_an_absurd_shape_on_the_command_line_is_refused(cli, shape, value):
    flags = {**GOOD, shape: value}
    ran = cli("fit", *(part for key, item in flags.items() for part in (f"--{key}", str(item))), *GPU)
    assert (ran.exit_code, ran.out) == (2, "")
    assert "Traceback" not in ran.err
    assert f"--{shape}" in ran.err


@pytest.mark.parametrize("missing", ["layers", "hidden", "heads"])
def test_a_shape_that_is_missing_is_named(refused, missing):
    flags = {key: value for key, value in GOOD.items() if key != missing}
    assert f"--{missing}" in refused(
        "fit", *(part for key, item in flags.items() for part in (f"--{key}", str(item))), *GPU
    )


CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.parametrize("value", [0, -1, 10**30, float("nan"), float("inf"), 1.5, "2", None, [], {}, True], ids=str)
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
def test_an_absurd_shape_in_a_config_json_is_refused(cli, write, key, value):
    ran = cli("show", write("config.json", json.dumps({**CONFIG, key: value})))
    assert ran.exit_code in (2, 3)
    assert ran.out == ""
    assert key in ran.err or "is no number" in ran.err
    assert "Traceback" not in ran.err


def test_many_layers_are_planned_at_once_and_too_many_refused(cli, refused, write):
    assert cli("show", write("config.json", json.dumps({**CONFIG, "num_hidden_layers": 10_000}))).exit_code == 0
    assert "num_hidden_layers" in refused(
        "show", write("config.json", json.dumps({**CONFIG, "num_hidden_layers": 10_001}))
    )


# ------------------------------------------------------------------ files
def test_a_config_with_ten_mistakes_reports_ten_with_file_line_and_key(cli, write):
    path = write("mine.yaml", TEN_MISTAKES)
    ran = cli("fit", "gpt2", *GPU, "--config", path)
    lines = [line for line in ran.err.splitlines() if "required key is missing" not in line]
    assert ran.exit_code == 2
    assert len(lines) == 10
    for number, (line, text) in enumerate(zip(lines, TEN_MISTAKES.splitlines(), strict=True), 1):
        assert line.startswith(f"memplan: {path}:{number}: {text.split(':')[0]}")


def test_ten_wrong_names_and_numbers_are_reported_with_their_lines_too(cli, write):
    text = """\
description: ten more
weights: {hidden_matrix: q4-9, embeding: bf16, norm: q4-0}
optimizer: {default: adamx, embedding: muon-int4}
gradients: {dtype: fp7}
micro_batch_size: 0
sequence_length: -5
gradient_accumulation_steps: 0
dropout: 2.0
reserve: 80
"""
    path = write("mine.yaml", text.replace("reserve: 80", "reserve: '80'"))
    ran = cli("fit", "gpt2", *GPU, "--config", path)
    keys = [line.removeprefix(f"memplan: {path}:").split(": ")[:2] for line in ran.err.splitlines()]
    assert sorted(keys) == sorted(
        [
            ["2", "weights.hidden_matrix"],
            ["2", "weights.embeding"],
            ["2", "weights.norm"],
            ["3", "optimizer.default"],
            ["3", "optimizer.embedding"],
            ["4", "gradients.dtype"],
            ["5", "micro_batch_size"],
            ["6", "sequence_length"],
            ["7", "gradient_accumulation_steps"],
            ["8", "dropout"],
            ["9", "reserve"],
        ]
    )


HOSTILE = {
    "empty": b"",
    "not-utf-8": b"description: \xff",
    "binary": bytes(range(256)) * 20,
    "not-yaml": b"a: [",
    "duplicate": b"description: a\ndescription: b\n",
    "list": b"- a\n- b\n",
    "number": b"42",
    "deep": b"[" * 100_000,
    "deep-dashes": b"- " * 100_000,
    "bomb": (
        "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "\n".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(8))
    ).encode(),
    "huge-number": b"description: a\nmicro_batch_size: " + b"9" * 100_000,
    "nan": b"description: a\ndropout: .nan\n",
    "too-large": b"#" * (5 * 2**20),
    "python-tag": b"description: !!python/object/apply:os.system [ls]\n",
    "surrogate": b'{"description": "\\ud800", "micro_batch_size": 0}',
    "surrogate-key": b'{"\\ud800": 1, "description": "a"}',
    "nul": b"description: a\0b\n",
    "long-line": b"description: a\n" + b"k" * 100_000 + b": 1\n",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("use", ["config", "model", "catalog"])
def test_a_hostile_file_is_refused_with_readable_lines(cli, write, use, content):
    path = write("hostile.yaml" if use != "model" else "config.json", content)
    arguments = {
        "config": ("fit", "gpt2", *GPU, "--config", path),
        "model": ("show", path),
        "catalog": ("list", "configs", "--catalog", path),
    }[use]
    ran = cli(*arguments)
    assert ran.exit_code in (2, 3), ran.err
    assert ran.out == ""
    assert ran.err
    assert all(line.startswith(f"memplan: {path}") and len(line) < 1000 for line in ran.err.splitlines())


@pytest.mark.parametrize("use", ["config", "model", "catalog"])
@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "secret"])
def test_a_file_that_cannot_be_read_is_refused(refused, write, tmp_path, use, kind):
    name = "config.json" if use == "model" else "file.yaml"
    path = tmp_path / name
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "secret":
        if os.geteuid() == 0:
            pytest.skip("root reads every file")
        write(name, "a: 1").chmod(0)
    arguments = {
        "config": ("fit", "gpt2", *GPU, "--config", path),
        "model": ("show", path),
        "catalog": ("list", "gpus", "--catalog", path),
    }[use]
    assert str(path) in refused(*arguments)


def test_standard_input_that_is_no_text_is_refused(refused):
    assert "not UTF-8 text" in refused("fit", "gpt2", *GPU, "--config", "-", stdin=b"\xff\xfe")


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["micro_batch_size", "weights", "optimizer.head", "kernels.loss", "adapter", "x", "gradients.dtype"]
            ),
            st.text(max_size=12),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_setting_is_taken_or_refused(cli, pairs):
    ran = cli(*ONE, *(part for key, value in pairs for part in ("--set", f"{key}={value}")))
    assert ran.exit_code in (0, 1, 2, 3), ran.err


# ------------------------------------------------------------------ the right thing is blamed
def test_a_broken_catalog_is_not_the_budgets_fault_and_is_said_once(cli, write):
    catalog = write("broken.yaml", "gpus:\n  x: {name: a}\n")
    budget = write("budget.yaml", "budgets:\n  - {model: gpt2, config: lora, gpus: [t4, rtx3060]}\n")
    ran = cli("check", budget, "--catalog", catalog)
    lines = ran.err.splitlines()
    assert (ran.exit_code, ran.out) == (2, "")
    assert len(lines) == len(set(lines))
    assert all("broken.yaml:2: gpus.x." in line and "budget.yaml" not in line for line in lines)


def test_targets_may_be_the_word_that_stands_for_all(cli, refused):
    job = ("fit", "gpt2", *GPU, "--config", "lora", "--json")
    assert cli(*job, "--set", "adapter.targets=all-linear").data["peak"] == cli(*job).data["peak"]
    assert "adapter.targets: expected a list, got 3" in refused(*job, "--set", "adapter.targets=3")


def test_a_file_is_called_by_its_own_language(refused, write):
    bad = write("bad.json", '{"a": ')
    assert "not valid JSON" in refused("diff", bad, bad)
    assert "no trainer's keys that are known" in refused("show", write("my.yaml", "a: 1\n"))


def test_settings_of_the_allocator_are_refused_before_anything_is_traced(cli):
    pytest.importorskip("torch")
    ran = cli("trace", "gpt2", "--alloc-conf", "nonesuch:3")
    assert ran.exit_code == 2
    assert "unknown setting 'nonesuch'" in ran.err
    assert "loading torch" not in ran.err


def test_help_of_suggest_names_every_axis_that_may_be_kept(cli, refused):
    line = refused("suggest", "gpt2", *GPU, "--keep", "nonesuch")
    axes = line.partition("expected one of ")[2].partition(";")[0].split(", ")
    text = " ".join(cli("suggest", "--help-all").out.split())
    assert len(axes) > 10
    assert all(axis in text for axis in axes)


def test_a_trace_refuses_sequences_beyond_learned_positions_before_it_begins(refused):
    pytest.importorskip("torch")
    assert "beyond the 1024 learned positions" in refused("trace", "gpt2", "--config", "lora", "-s", 10**9)


def test_no_gpus_of_a_kind_are_no_number_of_them(refused):
    assert "unknown GPU '0x h100'" in refused("fit", "gpt2", "--config", "lora", "--gpu", "0x h100")


def test_what_is_to_be_written_instead_is_said(cli, refused, tmp_path, monkeypatch):
    (tmp_path / "m3").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("description: x\nweights: bf16\nadapter: lora\n")
    said = cli("fit", "gpt2", "--gpu", "t4", "--config", tmp_path / "mine.yaml").err
    assert "weights: expected keys and values, such as {default: bf16}, got 'bf16'" in said
    assert "adapter: expected keys and values, such as {kind: lora}, got 'lora'" in said
    assert "m3: a folder without config.json" in refused("fit", "m3", "--gpu", "t4")
    assert "'--zero': expected at most 3, got '4'" in refused(
        "fit", "gpt2", "--gpu", "t4", "--gpus", "8", "--zero", "4"
    )
