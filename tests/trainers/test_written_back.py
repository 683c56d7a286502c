"""Changes written back into a trainer's own file: exactly the intended lines, exactly the promised bytes."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan.documents.loading import parse_document
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.library.trainers.spliced_text import Edit, spliced

EXAMPLES = Path(__file__).parent / "examples"
JOBS = ("axolotl.yaml", "axolotl-full.yaml", "trl.yaml", "llama-factory.yaml")


def changed_lines(before, after):
    return [line for line in after.splitlines() if line not in before.splitlines()]


QUICK = [("trl.yaml", "rtx4090"), ("axolotl-full.yaml", "rtx4090")]
CASES = [
    (name, gpu) if (name, gpu) in QUICK else pytest.param(name, gpu, marks=pytest.mark.slow)
    for name in JOBS
    for gpu in ("rtx4090", "rtx3060")
]


@pytest.mark.parametrize(("name", "gpu"), CASES)
def test_what_is_written_needs_exactly_the_bytes_that_were_promised(tmp_path, cli, name, gpu):
    path = tmp_path / name
    text = (EXAMPLES / name).read_text()
    path.write_text(text)
    answer = cli("suggest", path, "--gpu", gpu, "--write", "--json").data
    assert memplan.plan(path, gpu=gpu).expected_bytes == answer["after"]["device_bytes"]
    before, after = (memplan.import_file(one).to_dict()["training"] for one in (EXAMPLES / name, path))
    steps = [one["micro_batch_size"] * one["gradient_accumulation_steps"] for one in (before, after)]
    assert steps[0] == steps[1]
    if path.read_text() != text:
        assert answer["after"]["verdict"] == "fits"
        assert path.with_name(f"{name}.bak").read_text() == text


def test_only_the_lines_of_the_intended_keys_change():
    answer = memplan.rewrite(EXAMPLES / "axolotl-full.yaml", gpu="rtx4090").rewritten
    keys = {line.partition(":")[0] for line in changed_lines(answer.before_text, answer.after_text)}
    assert keys <= {"chunked_cross_entropy", "micro_batch_size", "gradient_accumulation_steps"}


def test_a_search_simulates_each_text_once_and_the_answer_in_full(monkeypatch):
    from memplan.library.trainers import written_back

    real, seen = written_back.simulated, []
    monkeypatch.setattr(written_back, "simulated", lambda plan, **ways: seen.append((plan, ways)) or real(plan, **ways))
    file = EXAMPLES / "axolotl-full.yaml"
    answer = memplan.rewrite(file, gpu="rtx4090").rewritten
    quick, full = ([plan for plan, ways in seen if ("least" in ways) == kind] for kind in (True, False))
    assert len({id(plan) for plan in quick}) == len(quick) > 0
    assert [plan.setup.config.micro_batch_size for plan in full] == [
        one.setup.config.micro_batch_size for one in (answer.before, answer.after)
    ]
    seen.clear()
    memplan.rewrite(file, gpu="rtx3060")
    assert sum("least" in ways and plan.exceeds_device for plan, ways in seen) <= 1, "tensors alone are too much"
    again = real(full[1])
    assert (again.least_bytes, again.lower_bytes) == (answer.after.least_bytes, answer.after.lower_bytes)


def test_keywords_are_checked_before_the_file_is_read():
    with pytest.raises(InvalidFileError, match="gpus"):
        memplan.rewrite(EXAMPLES / "trl.yaml", gpu="rtx4090", gpus=len)


def test_a_job_that_fits_is_left_alone(cli):
    ran = cli("suggest", EXAMPLES / "trl.yaml", "--gpu", "a100-80gb")
    assert (ran.exit_code, ran.out.splitlines()[-1]) == (0, "It fits as it is.")


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_batch_is_kept_by_the_whole_one_where_a_trainer_has_no_key_for_accumulation(tmp_path, gpus):
    # LLaMA-Factory's v1 engine: global_batch_size alone, of all ranks
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: Qwen/Qwen3-0.6B\ntrain_dataset: a\noutput_dir: out\nmicro_batch_size: 4\ncutoff_len: 2048\n"
    )
    answer = memplan.rewrite(path, gpu="rtx4090", gpus=gpus).rewritten
    changed = changed_lines(answer.before_text, answer.after_text)
    assert sorted(changed)[0] == f"global_batch_size: {4 * gpus}"
    path.write_text(answer.after_text)
    after = memplan.import_file(path, gpus=gpus).to_dict()["training"]
    assert after["micro_batch_size"] * after["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(
    ("text", "edit", "wanted"),
    [
        ("a: 1 # one\nb: 2\n", Edit("a", "4", "a"), "a: 4 # one\nb: 2\n"),
        ("a:   1\n\nb: x\n", Edit("c", "true", "a"), "a:   1\nc: true\n\nb: x\n"),
        ("a: # none yet\nb: 2\n", Edit("a", "3", "b"), "a: 3 # none yet\nb: 2\n"),
        ('{\n  "a": 1,\n  "b": {"c": 2}\n}\n', Edit("d", "adamw", "a"), '{\n  "a": 1,\n  "d": "adamw",\n  "b": {"c": 2}\n}\n'),
        ('{"a": "x"}', Edit("a", "y", "a"), '{"a": "y"}'),
        ("a: 'x'\r\nb: 2\r\n", Edit("b", "3", "a"), "a: 'x'\r\nb: 3\r\n"),
    ],
)  # fmt: skip
def test_a_value_is_replaced_at_its_marks(text, edit, wanted):
    assert spliced(text, "job.yaml", edit) == wanted


WORDS = st.text("abcdefgh_", min_size=1, max_size=8)
COMMANDS = '{\n "commands": [\n  ["trl", "sft", "--a=1", "--b-c", "2", "--d"]\n ]\n}\n'


@pytest.mark.parametrize(
    ("name", "text", "edit", "wanted"),
    [
        ("a.yaml", "t:\n  a: 1 # one\nb: 2\n", Edit("t.a", "4", "b"), "t:\n  a: 4 # one\nb: 2\n"),
        ("a.yaml", "b: 2\nt:\n  a: 1\n", Edit("t.c", "4", "b"), "b: 2\nt:\n  a: 1\n  c: 4\n"),
        ("a.toml", "[t]\na = 1 # one\n[u]\na = 2\n", Edit("t.a", "4", "a"), "[t]\na = 4 # one\n[u]\na = 2\n"),
        ("a.toml", '[t]\r\na = "x # y"\r\n', Edit("t.a", "z", "a"), '[t]\r\na = "z"\r\n'),
        ("a.toml", "[t]\r\na = 1\r\n", Edit("t.c", "2", "a"), "[t]\r\na = 1\r\nc = 2\r\n"),
        ("a.json", '{\n\t"a":\t1\n}\n', Edit("a", "2", "a"), '{\n\t"a":\t2\n}\n'),
        ("a.toml", "[t]\n  a = 1\n[u]\n", Edit("t.c", "true", "a"), "[t]\n  a = 1\n  c = true\n[u]\n"),
        ("a.json", COMMANDS, Edit("a", "4", "x"), COMMANDS.replace("--a=1", "--a=4")),
        ("a.json", COMMANDS, Edit("b_c", "4", "x"), COMMANDS.replace('"2"', '"4"')),
        ("a.json", COMMANDS, Edit("e", "4", "b_c"), COMMANDS.replace('"2"', '"2", "--e", "4"')),
    ],
)
def test_nested_keys_tables_and_flags_are_edited_too(name, text, edit, wanted):
    assert spliced(text, name, edit) == wanted


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [("a.toml", "[t]\na = [1]\n", "t.a"), ("a.toml", "[[t]]\na = 1\n", "t.a"), ("a.json", COMMANDS, "d"), ("a.yaml", "t: {a: &x 1}\nb: *x\n", "t.a"), ("a.yaml", "a: 1\n---\na: 2\n", "a"), ("a.json", '{"commands": [["--a", ["b"]]]}', "a")],
)  # fmt: skip
def test_what_cannot_be_edited_by_itself_is_refused(name, text, key):
    with pytest.raises(CannotAnswerError):
        spliced(text, name, Edit(key, "4", "nothing"))


TABLES = st.lists(st.tuples(st.sampled_from("tuv"), WORDS, st.sampled_from(["1", '"x"', "true", "[1]", "'a # b'", '"""x"""', "{a = 1}", "1979-05-27"]), st.sampled_from(["", "  # a = 2"])), min_size=1, max_size=8, unique_by=lambda line: line[:2])  # fmt: skip


@given(TABLES, st.data())
def test_an_edit_of_toml_changes_one_key(lines, data):
    tables = {table: [line[1:] for line in lines if line[0] == table] for table, *_ in lines}
    text = "".join(
        f"[{table}]\n" + "".join(f"{key} = {value}{rest}\n" for key, value, rest in inner)
        for table, inner in tables.items()
    )
    table, key, *_ = data.draw(st.sampled_from(lines))
    try:
        changed = spliced(text, "job.toml", Edit(f"{table}.{key}", "7", "nothing"))
    except CannotAnswerError:
        return
    before, after = (tomllib.loads(one) for one in (text, changed))
    assert after == {**before, table: {**before[table], key: 7}}


@pytest.mark.parametrize("text", ["a: &x 1\nb: *x\n", "b: &x 1\na: *x\n", "a: ${b}\nb: 1\n", "a: [1]\n", "a: {b: 1}\n"])
def test_values_that_stand_for_others_are_not_edited(text):
    with pytest.raises(CannotAnswerError, match="stands for something else"):
        spliced(text, "job.yaml", Edit("a", "2", "b"))


VALUES = st.integers(0, 10**6) | st.sampled_from(
    ["bf16", "adamw_torch", "true", "2e-5", "'no'", "[1, 2]", "{x: 1}", ""]
)
LINES = st.lists(st.tuples(WORDS, VALUES, st.sampled_from(["", "  # why", "\n\n# next"])), min_size=1, max_size=8, unique_by=lambda line: line[0])  # fmt: skip


@given(LINES, st.data())
def test_an_edit_changes_one_key_and_no_other_line(lines, data):
    text = "".join(f"{key}: {value}{rest}\n" for key, value, rest in lines)
    key = data.draw(st.sampled_from([key for key, _, _ in lines]) | st.just("new_key"))
    try:
        changed = spliced(text, "job.yaml", Edit(key, "7", lines[0][0]))
    except CannotAnswerError:
        return
    before, after = (parse_document(one, "job.yaml").data for one in (text, changed))
    assert after == {**before, key: 7}
    assert len(changed_lines(text, changed)) <= 1


COMMAND = "trl sft --model_name_or_path Qwen/Qwen2.5-7B --max_length 512 \\\n  --per_device_train_batch_size 8\n"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [("run.sh", COMMAND, 2), ("sky.yaml", f"run: |\n  {COMMAND.replace('  --', '    --')}", 3)],
)
def test_of_a_command_it_says_where_its_flags_are(tmp_path, name, text, line):
    (tmp_path / name).write_text(text)
    with pytest.raises(CannotAnswerError, match=rf"said by per_device_train_batch_size in .*{name}:{line}"):
        memplan.rewrite(tmp_path / name, gpu="rtx4090")


def test_the_cost_of_a_smaller_micro_batch_says_how_many_times_it_was_divided(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text((EXAMPLES / "axolotl.yaml").read_text().replace("sequence_len: 4096", "sequence_len: 24576"))
    rewritten = memplan.rewrite(path, gpu="rtx4090").rewritten
    assert rewritten.after.setup.config.micro_batch_size == 1
    assert "four times the accumulation steps for the same batch" in rewritten.costs
