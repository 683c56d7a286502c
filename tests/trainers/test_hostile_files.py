"""What nobody should write in a trainer's file, and what planning says of it."""

from pathlib import Path

import pytest

import memplan
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.answers.planned_job import plan_by_share

EXAMPLES = Path(__file__).parent / "examples"


def written(folder, text):
    path = folder / "job.yaml"
    path.write_text(text)
    return path


JOB = "base_model: Qwen/Qwen2.5-0.5B\nmicro_batch_size: 1\nsequence_len: 128\nbf16: true\n"


@pytest.mark.parametrize(
    "line",
    [
        "base_model: [a]",
        "base_model: 1.5",
        "micro_batch_size: -1",
        "micro_batch_size: 1e30",
        "sequence_len: 0",
        "sequence_len: .inf",
        "lora_r: 0",
        "gradient_accumulation_steps: [1]",
    ],
)
def test_an_impossible_value_is_refused_with_the_key_and_line_that_hold_it(tmp_path, line):
    key = line.partition(":")[0]
    text = "".join(f"{one}\n" for one in JOB.splitlines() if not one.startswith(key)) + f"adapter: lora\n{line}\n"
    with pytest.raises(InvalidFileError, match=rf"job\.yaml:\d: {key}: expected "):
        memplan.import_file(written(tmp_path, text))


@pytest.mark.parametrize("word", ["2j", "(-8) ** 0.5", "b'x'", "...", "float('nan')", "1e999", "-float('inf')"])
def test_what_no_json_can_hold_is_an_expression_of_the_script(tmp_path, word):
    path = tmp_path / "train.py"
    path.write_text(
        f"w = {word}\nargs = SFTConfig(max_length=128, eval_strategy=w, optim=w, torch_compile=w)\n"
        "SFTTrainer(model='gpt2', args=args).train()\n"
    )
    assert memplan.import_file(path).to_dict()["model"]["given"] == "gpt2"


@pytest.mark.parametrize("version", ["x.y", "1e3", "-1", "1_0", "."])
def test_a_version_that_is_none_is_refused(version):
    with pytest.raises(InvalidFileError, match=rf"--trainer-version {version}: expected numbers"):
        memplan.import_file(EXAMPLES / "axolotl.yaml", trainer_version=version)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("cut_off.json", '{"zero_optimization": {"stage": 2},\n', r"cut_off\.json:2: not JSON"),
        ("digits.toml", f"a = {'9' * 5000}\n", "a number too long"),
        ("deep.toml", f"b = 1\n{'a.' * 50_000}a = 1\n", r"deep\.toml:2: nested too deeply"),
        ("long.toml", "\n" * 600_000, r"long\.toml: larger than 0\.5 MiB"),
        ("long.py", "x = 1\n" * 100_000, r"long\.py: larger than 0\.5 MiB"),
        ("terms.py", f"f(a=1{'*1' * 2500})", "a script of one.s own is not read"),
        ("base16.toml", f"[training]\nlocal_batch_size = 0x{'f' * 5000}\n", "a number too long"),
        ("bits.toml", f"a = {2**63}\n", "a number too long"),
        (
            "base16.py",
            f"x = 1\nSFTConfig(max_length=[0x{'f' * 5000}])\n",
            r"base16\.py:2: not Python: a number of thousands",
        ),
        ("documents.yaml", "a: 1\n---\n" * 1_000, r"documents\.yaml:2: not valid YAML: but found another document"),
        (
            "scripts.yaml",
            "x:\n" + "- run: python sft.py --a 1\n" * 1_000,
            "no trainer that memplan reads has these keys",
        ),
        (
            "doubled.py",
            "x0 = [1]\n" + "".join(f"x{i + 1} = [*x{i}, *x{i}]\n" for i in range(80)),
            "no trainer that memplan reads",
        ),
        (
            "nested.py",
            "x0 = {}\n" + "".join(f"x{i + 1} = {{'a': x{i}, 'b': x{i}}}\n" for i in range(80)),
            "no trainer that memplan reads",
        ),
        ("circle.py", "def f(a=b, b=a): pass\nx = a ** b ** a\n", "no trainer that memplan reads"),
        ("added.py", f"x += a{'.b' * 700}\n", "no trainer that memplan reads has these keys"),
        ("looped.py", f"for x in a{'.b' * 700}:\n    pass\n", "no trainer that memplan reads has these keys"),
        ("set.py", f"a{'.b' * 700}['A'] = 1\n", "not Python that can be read"),
    ],
)
def test_what_its_parser_breaks_on_is_refused_by_its_line(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidFileError, match=said):
        memplan.import_file(tmp_path / name)


def test_a_date_is_no_number_and_no_fault_where_none_is_read(tmp_path):
    (tmp_path / "dates.toml").write_text(
        (EXAMPLES / "torchtitan.toml").read_text().replace("local_batch_size = ", "local_batch_size = 1979-05-27 # ")
    )
    with pytest.raises(InvalidFileError, match=r"dates\.toml:\d+: training\.local_batch_size: .*, got '1979-05-27'"):
        memplan.import_file(tmp_path / "dates.toml")
    (tmp_path / "dates.toml").write_text(
        (EXAMPLES / "torchtitan.toml").read_text() + "\n[of_my_own]\nday = 1979-05-27\n"
    )
    assert memplan.import_file(tmp_path / "dates.toml").to_dict()["training"]


def test_what_python_warns_of_in_a_file_is_not_said(tmp_path, recwarn):
    (tmp_path / "job.py").write_text("x = '\\d' if 1 is 1else 0\n")
    with pytest.raises(InvalidFileError, match="no trainer that memplan reads"):
        memplan.import_file(tmp_path / "job.py")
    assert not recwarn.list


def test_a_way_of_sharding_that_is_not_known_is_not_passed_over(tmp_path):
    answer = memplan.import_file(written(tmp_path, f"{JOB}fsdp: [1, 2]\n")).to_dict()
    assert [one["key"] for one in answer["keys"]["not_modelled"]] == ["fsdp"]


def test_a_file_with_the_class_of_a_model_is_a_trainers_all_the_same(tmp_path):
    path = written(tmp_path, f"{JOB}model_type: LlamaForCausalLM\n")
    assert plan_by_share(str(path), gpu="h100").training["stack"] == "axolotl"


def test_what_a_file_does_not_say_is_taken_from_the_options(tmp_path):
    text = JOB.replace("micro_batch_size: 1", "micro_batch_size: ${size}").replace("sequence_len: 128\n", "")
    with pytest.raises(CannotAnswerError, match="without --micro-batch-size N: micro_batch_size is"):
        plan_by_share(str(written(tmp_path, text)), gpu="h100")
    training = plan_by_share(str(written(tmp_path, text)), gpu="h100", micro_batch_size=2).training
    assert training["micro_batch_size"] == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("job.yaml", b"", "empty"),
        ("job.yaml", b"base_model: [", "not valid YAML"),
        ("job.yaml", b"\xff\xfe\x00", "not UTF-8"),
        ("job.py", b"f(", "not Python"),
        ("job.toml", b"a = ", "not valid TOML"),
        ("job.yaml", b"a: 1", "no trainer's keys"),
        ("job.yaml", b"---\n" + b"\n" * 200_000 + b"---\n", "not valid YAML"),
        ("job.yaml", b"description: mine", "a training config, which names no model"),
    ],
)
def test_planning_says_what_is_wrong_with_a_file_that_names_no_model(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidFileError, match=said):
        plan_by_share(str(path), gpu="h100")


def test_what_is_not_modelled_is_said_before_what_is_missing(tmp_path):
    path = tmp_path / "qat.yaml"
    path.write_text(
        "model: {_component_: torchtune.models.llama3_2.llama3_2_1b}\nquantizer: {_component_: x}\noptimizer: {_component_: torch.optim.AdamW}\n"
    )
    with pytest.raises(CannotAnswerError, match="quantizer: not modelled"):
        plan_by_share(str(path), gpu="h100")


@pytest.mark.parametrize("trainer", [None, "trl", "transformers"])
def test_a_script_is_not_taken_for_a_file_of_a_trainer_that_is_named(tmp_path, trainer):
    script = tmp_path / "train.py"
    script.write_text("from trl import SFTConfig\nargs = SFTConfig(per_device_train_batch_size=2)\n")
    with pytest.raises(InvalidFileError, match=r"memplan run \S*train\.py --gpu NAME"):
        memplan.import_file(script, trainer=trainer)
