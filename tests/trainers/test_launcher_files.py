"""Launchers' files that are known by name alone, and versions and values that a trainer takes no longer."""

import re

import pytest

import memplan
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share
from memplan.report.document import render

from .test_import_files import EXAMPLES, TRL, written

AXOLOTL = (EXAMPLES / "axolotl-full.yaml").read_text()


def shown(answer):
    return render(answer.document(), "table")


def test_keys_of_a_file_that_a_package_ships_have_no_line(tmp_path):
    file = written(tmp_path, f"{AXOLOTL}deepspeed: deepspeed_configs/zero3_bf16.json\n")
    answer = memplan.import_file(file, gpus=4)
    lines = {one["key"]: one["line"] for one in answer.to_dict()["keys"]["used"]}
    assert (lines["zero_optimization.stage"], lines["deepspeed"], lines["base_model"]) == (None, 9, 1)
    row = next(line for line in shown(answer).splitlines() if "zero_optimization.stage " in line)
    assert row.split()[1] == "-"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["swift", "sft", "--model", "Qwen/Qwen3-0.6B", "--deepspeed", "zero3"],
            "zero3 names this file of the package",
        ),
        (
            ["swift", "sft", "--model", "Qwen/Qwen3-0.6B", "--deepspeed", "swift/config/zero3.json"],
            "swift/config/zero3.json is not there; this is what the package has under that name",
        ),
    ],
)
def test_a_preset_is_no_file_that_is_missing(words, said):
    assumed = memplan.import_file(words, gpus=2).to_dict()["assumed"]
    assert next(one["why"] for one in assumed if one["key"] == "launcher's file").endswith(said)


def test_a_word_where_a_trainer_takes_a_path_says_so(tmp_path):
    needs = memplan.import_file(written(tmp_path, f"{AXOLOTL}deepspeed: zero3\n"), gpus=2).to_dict()["needs"]
    assert needs[0].endswith("--with FILE; it takes a file's path")


@pytest.mark.parametrize("keys", ["fsdp_config: {fsdp_version: 1}\n", "fsdp_version: 1\nfsdp_config: {a: 1}\n"])
def test_fsdps_first_version_is_that_of_an_older_axolotl(tmp_path, keys):
    file = written(tmp_path, f"{AXOLOTL}{keys}")
    answer = memplan.import_file(file, gpus=4).to_dict()
    assert (answer["trainer"]["version"], answer["training"]["parallel"]["engine"]) == ("0.19", "fsdp1")
    refused = memplan.import_file(file, gpus=4, trainer_version="0.21").to_dict()["keys"]["not_modelled"]
    assert "FSDP1, which axolotl 0.19 was the last to take" in refused[0]["why"]
    assert refused[0]["line"] == 9


MEGATRON = """torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 4 \\
  --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --vocab-size 1000 --bf16 \\
  --micro-batch-size 1 --global-batch-size 32 --use-distributed-optimizer
"""


@pytest.mark.parametrize(
    ("degrees", "gpus", "expected"),
    [
        ({"tensor": 4}, None, (8, 2, 16)),
        ({"pipeline": 2}, None, (8, 2, 16)),
        ({"tensor": 1, "data": 8}, None, (8, 8, 4)),
        ({"tensor": 4}, 16, (16, 4, 8)),
        (
            {"pipeline": 3},
            None,
            "8 GPUs are no multiple of tensor 2 x pipeline 3 = 6; the nearest that divides them: 4;",
        ),
        ({"tensor": 16}, None, "no multiple of tensor 16 = 16; the nearest that divides them: 8; --gpus says another"),
        (
            {"data": 2},
            None,
            "parallel.data: the file's 8 GPUs leave 4 for data parallelism, not 2; --gpus says another",
        ),
    ],
)
def test_degrees_of_the_command_line_share_out_the_gpus_that_a_launcher_starts(tmp_path, degrees, gpus, expected):
    file = written(tmp_path, MEGATRON, "script.sh")
    options = {"gpu": "h100", "config": str(file), "set": {f"parallel.{key}": value for key, value in degrees.items()}}
    if isinstance(expected, str):
        with pytest.raises(InvalidFileError, match=re.escape(expected)):
            memplan.plan_grid(str(file), gpus=gpus, **options)
        return
    answer = memplan.plan_grid(str(file), gpus=gpus, **options)
    assert (answer.plan.grid.world, answer.plan.grid.data, answer.config.gradient_accumulation_steps) == expected


def test_the_trainers_file_heads_the_answer_whatever_goes_with_it(tmp_path):
    file = written(tmp_path, TRL)
    for given, beside in ((file, EXAMPLES / "ds_z3.json"), (EXAMPLES / "ds_z3.json", file)):
        answer = memplan.import_file(given, beside=[beside], gpus=2)
        assert shown(answer).startswith(str(file))


@pytest.mark.parametrize("stack", ["llama-factory", "trl@1.14", "trl"])
def test_cut_cross_entropy_is_none_of_trainers_that_never_call_it(stack):
    chosen = {"config": "bf16-adamw", "stack": stack, "set": ["kernels.loss=cut-cross-entropy"]}
    with pytest.raises(CannotAnswerError, match="cut-cross-entropy is not modelled for"):
        plan_by_share("llama-3.2-1b", gpu="h100", **chosen)
