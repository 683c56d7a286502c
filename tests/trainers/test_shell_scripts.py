"""Launch scripts: read as a shell would, but never run; what nobody can tell from them is asked for by its line."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import memplan
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.importer.shell.expansions import Scope, fields, filled
from memplan.importer.shell.shell_commands import shell_commands
from memplan.library.answers.planned_job import plan_by_share

EXAMPLES = Path(__file__).parent / "examples"
SCOPE = {"A": "1 2", "N": "8", "L": ["--x", "a b"], "U": None, "P": "a/b/Qwen3-8B.yaml"}


def commands(text):
    return [one.words for one in shell_commands(text, "run.sh")]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("$A", ["1", "2"]),
        ('"$A"', ["1 2"]),
        ("x${N}y", ["x8y"]),
        ("x$A", ["x1", "2"]),
        ("$((N*2))", ["16"]),
        ("$(( $N / 3 ))", ["2"]),
        ("$((N / 0))", ["$((N / 0))"]),
        ("$(( ($N > 1) ? 1 : 0 ))", ["1"]),
        ('"${L[@]}"', ["--x", "a b"]),
        ("${L[@]}", ["--x", "a", "b"]),
        ('"${L[*]}"', ["--x a b"]),
        ('"${L[1]}"', ["a b"]),
        ("${#L[@]}", ["2"]),
        ("${Q:-${N}}", ["8"]),
        ("${Q:-$HOME/x}", ["$HOME/x"]),
        ("${N:+--n $N}", ["--n", "8"]),
        ("$U", ["$U"]),
        ("${U:-4}", ["${U:-4}"]),
        ("${P##*/}", ["Qwen3-8B.yaml"]),
        ("${P%.yaml}", ["a/b/Qwen3-8B"]),
        ("${P%%/*}", ["a"]),
        ("$(expr 16 / 2)", ["8"]),
        ("$(expr 16 \\* $N)", ["128"]),
        ("$(nvidia-smi -L | wc -l)", ["$(nvidia-smi -L | wc -l)"]),
        ("'$A'", ["$A"]),
        ('"$@"', []),
        ("${1:-7}", ["7"]),
        ("a\\ b", ["a b"]),
        (f"${{{'9' * 5000}}}${{L[\u00b2]}}", [f"${{{'9' * 5000}}}${{L[\u00b2]}}"]),
        ('"{\\"a\\": 1}"', ['{"a": 1}']),
    ],
)
def test_a_word_becomes_what_a_shell_makes_of_it(word, expected):
    assert fields(word, Scope(dict(SCOPE))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("python a.py --x 1 \\\n  --y 2  # all\n", [("python", "a.py", "--x", "1", "--y", "2")]),
        ("X=1; python a.py $X && python b.py\r\n", [("python", "a.py", "1"), ("python", "b.py")]),
        ("A=(--x 1  # one\n  --y 2\n)\nA+=(--z)\npython a.py \"${A[@]}\"\n", [("python", "a.py", "--x", "1", "--y", "2", "--z")]),
        ("cat > c.json <<EOF\nit's; python no.py\nEOF\npython a.py\n", [("python", "a.py")]),
        ("f() { python a.py --n $1 \"$@\"; }\nf 3\n", [("python", "a.py", "--n", "3", "3")]),
        ("C='python a.py --x 1'\neval $C 2>&1 | tee log\n", [("python", "a.py", "--x", "1")]),
        ("srun bash -c \"python a.py $SLURM_NNODES\"\n#SBATCH --nodes=4\n", [("python", "a.py", "4")]),
        ("if [ -z \"$X\" ]; then X=5; else X=6; fi\npython a.py $X\n", [("python", "a.py", "5")]),
        ("X=1\n[[ $X == 1 && -n $X ]] && Y=2 || Y=3\npython a.py $Y\n", [("python", "a.py", "2")]),
        ("X=1\nwhile [[ $# -gt 0 ]]; do X=$2; shift; done\npython a.py $X\n", [("python", "a.py", "1")]),
        ("case $M in a|b) X=1;; *) X=2;; esac\npython a.py $X\n", [("python", "a.py", "2")]),
        ("for X in 7; do python a.py $X; done\n", [("python", "a.py", "7")]),
        ("X=1\nif grep -q a b; then X=2; fi\npython a.py --x $X\n", [("python", "a.py", "--x", "$X")]),
        ("for X in 1 2; do python a.py --x $X; done\n", [("python", "a.py", "--x", "1")]),
        ("for X in 1 $Y; do python a.py --x $X; done\n", [("python", "a.py", "--x", "$X")]),
        ("for X in 1 2; do :; done; python a.py --x $X\n", [("python", "a.py", "--x", "$X")]),
        ("X=`hostname`; nohup python a.py --x $X &\n", [("python", "a.py", "--x", "`hostname`")]),
        ("! [ -n \"$X\" ] && python a.py\n", [("python", "a.py")]),
        ("echo python a.py; pip install x\n", []),
        ("N=2\nread -r -d '' cmd <<EOF\npython a.py --n $N \\\n  --s 'b'\nEOF\nbash -c \"${cmd}\"\n", [("python", "a.py", "--n", "2", "--s", "b")]),
        ("N=2\nsrun bash <<'EOF'\npython a.py --n $N\nEOF\npython b.py\n", [("python", "a.py", "--n", "2"), ("python", "b.py")]),
        ("sudo docker run --gpus all -e A=1 img trl sft --x 1\n", [("trl", "sft", "--x", "1")]),
        ("docker run --rm -e N=2 img bash -lc \"torchrun --nproc_per_node=\\$N a.py\"\n", [("torchrun", "--nproc_per_node=2", "a.py")]),
        ("cat <<A <<B\n1\nA\n2\nB\npython a.py\n", [("python", "a.py")]),
        ("C=\"\"\"\npython `pwd`/a.py $X \\\n --n 1\n\"\"\"\n{ echo $C\n eval \"$C\"\n} || { exit 1\n}\n", [("python", "`pwd`/a.py", "--n", "1")]),
    ],
)  # fmt: skip
def test_the_commands_of_a_script_come_out_with_their_words(text, expected):
    assert commands(text) == expected


LAUNCHED = """#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1,2,3
MODEL=${1:-Qwen/Qwen3-8B}
BATCH=2
ARGS=(
  --model_name_or_path $MODEL  # from the hub
  --per_device_train_batch_size $BATCH
  --gradient_accumulation_steps $((32 / BATCH / 4))
)
torchrun --nproc_per_node=4 sft.py "${ARGS[@]}" \\
  --max_length 4096 \\
  --packing false $MORE_ARGS
"""


def written(folder, text, name="run.sh"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_launch_script_is_read_as_its_command(tmp_path):
    answer = memplan.import_file(written(tmp_path, LAUNCHED)).to_dict()
    training = answer["training"]
    assert (answer["trainer"]["name"], answer["model"]["given"]) == ("trl", "Qwen/Qwen3-8B")
    assert (training["micro_batch_size"], training["gradient_accumulation_steps"]) == (2, 4)
    assert (training["sequence_length"], training["parallel"]["data"]) == (4096, 4)
    lines = {one["key"]: one["line"] for one in answer["keys"]["used"]}
    assert (lines["per_device_train_batch_size"], lines["max_length"]) == (7, 11)
    notes = [one for one in answer["assumed"] if one["key"] == "$MORE_ARGS"]
    assert "run.sh:10" in notes[0]["why"] or "run.sh:12" in notes[0]["why"]


def test_a_script_plans_as_its_command_does(tmp_path):
    words = (
        "trl sft --model_name_or_path Qwen/Qwen3-0.6B --max_length 1024 --per_device_train_batch_size 2 --packing false"
    )
    path = written(tmp_path, f"N=2\n{words.replace(' 2 ', ' $N ')}\n", "job.slurm")
    yaml = written(tmp_path, "model_name_or_path: Qwen/Qwen3-0.6B\nmax_length: 1024\nper_device_train_batch_size: 2\npacking: false\n", "job.yaml")  # fmt: skip
    assert plan_by_share(str(path), gpu="h100").expected_bytes == plan_by_share(str(yaml), gpu="h100").expected_bytes


def test_what_nobody_can_tell_is_asked_for_by_its_line(tmp_path):
    text = "GPUS=$(nvidia-smi -L | wc -l)\ntorchrun --nproc_per_node $GPUS sft.py --model_name_or_path Qwen/Qwen3-8B --packing true\n"
    path = written(tmp_path, text)
    assert "--gpus N, the number of GPUs: nproc_per_node is" in memplan.import_file(path).to_dict()["needs"][0]
    assert memplan.import_file(path, gpus=2).to_dict()["training"]["parallel"]["data"] == 2
    length = written(tmp_path, "LEN=$(cat n)\ntrl sft --model_name_or_path a/b --max_length $LEN --packing true\n")
    assert "--sequence-length N: max_length is '$(cat n)' in" in memplan.import_file(length).to_dict()["needs"][0]
    words = written(tmp_path, "MORE=$(cat more)\ntrl sft --model_name_or_path a/b --packing false --bf16 true $MORE\n")
    assert "what $(cat more) stands for" in "".join(memplan.import_file(words).to_dict()["needs"])
    words.write_text(words.read_text().replace("a/b", "Qwen/Qwen3-0.6B"))
    with pytest.raises(CannotAnswerError, match=r"without what \$\(cat more\) stands for"):
        plan_by_share(str(words), gpu="h100")


def test_the_files_that_a_script_names_lie_beside_it_or_are_asked_for(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "lora.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-0.6B\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\ndataset: a\n"
    )
    path = written(tmp_path, "FILE=conf/lora.yaml\nllamafactory-cli train ${FILE} per_device_train_batch_size=3\n")
    training = memplan.import_file(path).to_dict()["training"]
    assert (training["micro_batch_size"], training["sequence_length"]) == (3, 512)
    other = written(tmp_path, "llamafactory-cli train lora2.yaml\n")
    assert "the file lora2.yaml, which the command names: --with FILE" in memplan.import_file(other).to_dict()["needs"]


@pytest.mark.parametrize(
    "flag",
    [
        f"--nproc_per_node {'9' * 5000}",
        "--nproc_per_node 0",
        "--nproc_per_node=-1",
        "--nproc_per_node \N{FULLWIDTH DIGIT EIGHT}",
        "--nproc_per_node 8 --nnodes 1:4",
    ],
)
def test_what_is_no_number_of_processes_is_asked_for(tmp_path, flag):
    path = written(tmp_path, f"torchrun {flag} sft.py --model_name_or_path a/b --packing true\n")
    assert memplan.import_file(path).to_dict()["needs"][0].startswith("--gpus N, the number of GPUs: n")
    assert memplan.import_file(path, gpus=2).to_dict()["training"]["parallel"]["data"] == 2


@pytest.mark.parametrize("start", ["torchrun --nproc_per_node gpu", "deepspeed --num_gpus=-1"])
def test_as_many_processes_as_a_machine_has_gpus_are_one_where_nothing_says_how_many(tmp_path, start):
    path = written(tmp_path, f"{start} sft.py --model_name_or_path a/b --packing true\n")
    assert memplan.import_file(path).to_dict()["training"]["parallel"]["data"] == 1


def test_of_several_jobs_the_first_is_answered_for_and_the_others_are_named(tmp_path):
    path = written(tmp_path, "python prepare.py\ntrl sft --model_name_or_path a/b --packing true\n\nRUN=2 trl dpo --model_name_or_path a/c --beta 0.1\n")  # fmt: skip
    answer = memplan.import_file(path).to_dict()
    assert answer["model"]["given"] == "a/b"
    assert next(one["why"] for one in answer["assumed"] if one["key"] == "command").endswith("begin at lines 4")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'abc\n", r"run\.sh:1: not a shell script that can be read: a quote does not end"),
        ("if true; then\npython a.py\n", "expected fi"),
        ("python a.py )\n", r"'\)' ends nothing"),
        ("cat <<EOF\nabc\n", "the here-document that 'EOF' ends does not end"),
        ("for x in 1; do\n" * 60, "nested too deeply"),
        ("x=" + "$(" * 60 + "\n", "nested too deeply|does not end"),
        ("a=(" * 5000, "an array in an array"),
        ("f() { f; f; }\nf\n" + "python a.py\n" * 6000, "more than 5,000 commands"),
        ("# nothing\n", "starts no trainer"),
        ("trl sft --a 1 \\\n  # --b 2 \\\n  --c 3\n", r"run\.sh:3: --c is a command of its own here: a comment"),
        ("A=(x y)\n" + "A=(${A[@]} ${A[@]})\n" * 30, "more than 5,000 words in A"),
        ("python own.py --lr 1\n", "no trainer that memplan reads has these keys"),
        ("python own.py --base_model a/b --micro_batch_size 4 --batch_size 8\n", "no trainer that memplan reads"),
        ("torchrun src/train.py sft.yaml\n", r"run\.sh: it names sft\.yaml, which is not here"),
        ("X=1\n" * 200_000, "larger than"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(tmp_path, text, said):
    with pytest.raises(InvalidFileError, match=said):
        memplan.import_file(written(tmp_path, text))


def test_a_job_behind_many_commands_that_train_nothing_is_read(tmp_path):
    job = (
        "from trl import SFTConfig, SFTTrainer\nSFTTrainer('Qwen/Qwen3-0.6B', args=SFTConfig(max_length=512)).train()\n"
    )
    (tmp_path / "mine.py").write_text(job)
    (tmp_path / "own.py").write_text("print(1)\n")
    before = "".join(f"curl -o {at} a/{at}\npython own.py {at}\npython -m own.{at} {at}\n" for at in range(40))
    answer = memplan.import_file(written(tmp_path, f"{before}python mine.py\n")).to_dict()
    assert (answer["trainer"]["name"], answer["model"]["given"]) == ("trl", "Qwen/Qwen3-0.6B")


TRAINED = "llamafactory-cli train --stage sft --do_train True --model_name_or_path Qwen/Qwen3-8B\n"


@pytest.mark.parametrize(
    ("directive", "command", "count"),
    [
        ("--gpus-per-node=4", TRAINED, 4),
        ("--gres=gpu:a100:2", f"srun {TRAINED}", 2),
        ("--mem=4G", TRAINED, 1),
        ("--gpus-per-node=8", f"CUDA_VISIBLE_DEVICES=0,1 {TRAINED}", 2),
    ],
)
def test_a_launcher_starts_a_process_for_each_gpu_that_slurm_gives(tmp_path, directive, command, count):
    text = f"#SBATCH {directive}\n{command}"
    assert memplan.import_file(written(tmp_path, text)).to_dict()["training"]["parallel"]["data"] == count


WRITING = """#!/bin/bash
RANK=16
OUT=/runs/$(date +%F)
cat > $OUT/job.yaml <<EOF
base_model: Qwen/Qwen3-8B
adapter: lora
lora_r: $RANK
sequence_len: ${LENGTH:-1024}
micro_batch_size: $2
deepspeed: ds.json
datasets: [{path: "a \\"b\\"", type: alpaca}]
EOF
tee ds.json <<'EOF'
{"zero_optimization": {"stage": 2},
 "bf16": {"enabled": true}}
EOF
cp $OUT/job.yaml $OUT/copy.yaml
"""
TRAINING = "CUDA_VISIBLE_DEVICES=0,1 axolotl train $OUT/job.yaml\n"


def test_a_file_that_a_script_writes_is_what_a_command_reads(tmp_path):
    answer = memplan.import_file(written(tmp_path, WRITING + TRAINING)).to_dict()
    training, lines = answer["training"], {one["key"]: one["line"] for one in answer["keys"]["used"]}
    assert (answer["model"]["given"], training["adapter"]["rank"], training["sequence_length"]) == (
        "Qwen/Qwen3-8B",
        16,
        1024,
    )
    assert (training["parallel"]["zero_stage"], training["parallel"]["data"]) == (2, 2)
    assert (lines["base_model"], lines["lora_r"], lines["zero_optimization.stage"]) == (5, 7, 14)
    assert (
        answer["needs"] == ["--micro-batch-size N: micro_batch_size is '$2' in run.sh:9"] or "$2" in answer["needs"][0]
    )


@pytest.mark.parametrize(
    "between",
    [
        "sed -i 's/8B/4B/' $OUT/job.yaml",
        "python make.py > $OUT/job.yaml",
        "python - <<E > $OUT/job.yaml\nprint(1)\nE",
        "if grep -q x y; then cat > $OUT/job.yaml <<E\nbase_model: gpt2\nE\nfi",
        "cp other.yaml $OUT/job.yaml",
        "./make.sh >> $OUT/job.yaml",
    ],
)
def test_a_file_that_something_else_writes_too_is_asked_for(tmp_path, between):
    answer = memplan.import_file(written(tmp_path, f"{WRITING}{between}\n{TRAINING}")).to_dict()
    assert answer["model"]["given"] is None
    assert any("job.yaml" in need and "--with FILE" in need for need in answer["needs"])


@pytest.mark.parametrize("name", ["axolotl.yaml", "llama-factory.yaml", "trl.yaml", "torchtune.yaml", "litgpt.yaml"])
@pytest.mark.parametrize("form", ["cat > {0} <<'EOF'\n{1}EOF\n", "cat <<'EOF' >{0}\n{1}EOF\n", "tee ./{0} <<'EOF' >/dev/null\n{1}EOF\n"])  # fmt: skip
def test_a_file_in_a_here_document_says_what_the_file_says(tmp_path, name, form):
    text = (EXAMPLES / name).read_text()
    (tmp_path / name).write_text(text)
    start = {"axolotl.yaml": "axolotl train", "llama-factory.yaml": "llamafactory-cli train", "trl.yaml": "trl sft --config",
             "torchtune.yaml": "tune run lora_finetune_single_device --config", "litgpt.yaml": "litgpt finetune_lora --config"}[name]  # fmt: skip
    apart = memplan.import_file(written(tmp_path, f"{start} {name}\n")).to_dict()
    (tmp_path / name).unlink()
    joined = memplan.import_file(written(tmp_path, f"{form.format(name, text)}{start} {name}\n")).to_dict()
    for part in ("training", "method", "needs", "model"):
        assert joined[part] == apart[part]


@pytest.mark.parametrize("inside", ["trl sft {0}", 'bash -lc "cd /w && trl sft {0}"'])
def test_variables_that_a_container_is_given_are_its_commands(tmp_path, inside):
    job = "--model_name_or_path gpt2 --max_length 64"
    given = "-e CUDA_VISIBLE_DEVICES=0,1,2 --env=PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    answer = memplan.import_file(
        written(tmp_path, f"docker run --gpus all {given} image {inside.format(job)}\n")
    ).to_dict()
    assert (answer["training"]["allocator"], answer["training"]["parallel"]["data"]) == ("expandable", 3)
    assert answer["keys"]["unknown"] == []


def test_what_is_wrong_in_a_here_document_is_said_with_its_line(tmp_path):
    with pytest.raises(InvalidFileError, match=r"run\.sh: what line 3 begins to write: job\.yaml"):
        memplan.import_file(written(tmp_path, "# one\ncat > job.yaml <<EOF\na: [1\nEOF\naxolotl train job.yaml\n"))


PIECES = st.sampled_from(
    ["python a.py ", "--x ", "$X", "${X:-1}", "${", "$((1+", "))", "$(", ")", "(", "'", '"', "`", "\\", "\n", "if ", "then ", "fi\n",
     "for x in ", "do ", "done\n", "case ", "esac", ";;", "A=(", "X=1 ", "[[ ", " ]]", "<<EOF\n", "EOF\n", "> a ", ">>", "|", "&&", "# ", "{ ", "}", "f() "]
)  # fmt: skip


@example("<<EOF\nEOF\n")
@settings(max_examples=300)
@given(st.lists(PIECES, max_size=25).map("".join) | st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    filled(text, Scope())
    with contextlib.suppress(InvalidFileError):
        shell_commands(text, "run.sh")
