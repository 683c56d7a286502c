"""One way in: nothing else opens files, and whatever a path names is read within bounds or refused in one line."""

import ast
import json
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import memplan
from memplan.documents import opening
from memplan.documents.opening import files_in, mapped, opened, path_kind, read_bytes, read_text, usable_path
from memplan.errors import InvalidFileError
from tests.sources import nodes

PACKAGE = Path(memplan.__file__).parent

ELSEWHERE = {
    ("trace/transformers_models.py", "from_pretrained"): "transformers reads the config that memplan has read before",
    (
        "trace/stacks/huggingface/built_model.py",
        "from_pretrained",
    ): "transformers reads the checkpoint that was just written",
    (
        "trace/stacks/huggingface/llamafactory_loop.py",
        "from_pretrained",
    ): "TRL puts a head of values on a model that is there already, and reads nothing",
    ("dryrun/stack_scripts/unsloth_sft.py", "from_pretrained"): "unsloth reads the config that was just written",
    ("dryrun/files/run_checkpoints.py", "open"): "a checkpoint of the script's, whose errors are the script's too",
    ("measure/child.py", "pickle.load"): "the task that the parent process sends through a pipe",
    ("dryrun/script_child.py", "pickle.load"): "the request that the parent process sends through a pipe",
    ("cli/completion.py", "read_text"): "our own files' names, for a shell that waits",
    ("cli/ui/application.py", "read_text"): "a page's own assets, which are part of the package",
    ("report/page/plan_sections.py", "read_text"): "a page's own assets, which are part of the package",
    ("documents/writing.py", "open"): "files that are written to, whose mode is a name",
    ("muon/checkpoints.py", "torch.load"): "torch's own format, read by torch with weights_only=True",
}
"""(module, call) that reads by itself -> why."""

READING = {"open", "read_text", "read_bytes", "mmap", "from_pretrained", "fromfile", "safe_open"}
LOADERS = {f"{module}.load" for module in ("json", "pickle", "torch", "yaml", "np", "numpy", "tomllib")}
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "devnull"}


def reading_calls(path: Path):
    """Yield the name of every call that opens a file for reading, other than through memplan.documents.opening."""
    ours = {
        name.asname or name.name
        for node in nodes(path, ast.ImportFrom)
        if node.module == "memplan.documents.opening"
        for name in node.names
    }
    for node in nodes(path, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        name = name if name != "load" else ast.unparse(node.func)
        if name in READING | LOADERS and not (isinstance(node.func, ast.Name) and name in ours) and not writes(node):
            yield name


def writes(call: ast.Call) -> bool:
    """Tell a call that only writes: by its mode, its flags, or because it syncs a folder."""
    texts = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    flags = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    modes = [text for text in texts if text and set(text) <= set("rwaxbt+")]
    folder = any(isinstance(node, ast.Name) and node.id == "folder" for node in ast.walk(call))
    return (
        any(set(mode) & set("wax") for mode in modes) or bool(flags & WRITING_FLAGS) or (folder and "O_RDONLY" in flags)
    )


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if "data" not in path.relative_to(PACKAGE).parts]


def test_no_other_module_opens_files_for_reading():
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in MODULES
        if path != Path(opening.__file__)
        for name in reading_calls(path)
    }
    assert found == set(ELSEWHERE)


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("open(p)", True),
        ("open(p, 'rb')", True),
        ("p.open()", True),
        ("p.read_text()", True),
        ("json.load(f)", True),
        ("np.fromfile(p)", True),
        ("open(p, 'w')", False),
        ("os.open(p, os.O_WRONLY | os.O_CREAT)", False),
        ("os.open(folder, os.O_RDONLY)", False),
        ("from memplan.documents.opening import read_text\nread_text(p)", False),
    ],
)
def test_the_search_for_reading_calls_finds_them(write, text, reads):
    assert bool(list(reading_calls(write("module.py", text)))) == reads


# ------------------------------------------------------------------ what a path may name
def refusal(read, *given) -> str:
    with pytest.raises(InvalidFileError) as caught:
        read(*given)
    assert len(caught.value.problems) == 1
    assert str(caught.value).isprintable()
    return str(caught.value)


def opening_of(path: Path) -> bytes:
    with opened(path) as file:
        return file.read()


@pytest.fixture
def hostile(tmp_path, write):
    """Paths that hold no regular file, and what is said of each."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
    write("file", "x")
    return {
        tmp_path / "pipe": "is a pipe",
        tmp_path / "socket": "is a socket",
        tmp_path / "loop": "not a usable path: Too many levels of symbolic links",
        tmp_path / "gone": "no such file",
        tmp_path / "folder": "is a directory",
        tmp_path / "file" / "below": "no such file",
        tmp_path / ("x" * 300): "not a usable path: File name too long",
        tmp_path / "nul\0": "not a usable path: embedded null byte",
        tmp_path / "half\udc80": "not a usable path: its name is not UTF-8",
        tmp_path / "line\nbreak\x1b[31m": r"line\nbreak\u001b[31m: no such file",
        Path("/dev/zero"): "is a device",
        Path("/dev/tty"): "is a device",
    }


def test_nothing_but_a_regular_file_is_opened(hostile):
    for read in (opening_of, read_bytes, read_text):
        for path, said in hostile.items():
            assert said in refusal(read, path), path


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "late")
    monkeypatch.setattr(opening, "path_kind", lambda path: "file")
    assert "is no longer a regular file" in refusal(read_text, tmp_path / "late")


def test_a_link_to_a_file_is_read(tmp_path, write):
    (tmp_path / "link").symlink_to(write("file", "text"))
    assert read_text(tmp_path / "link") == "text"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_refused(write):
    path = write("secret", "x")
    path.chmod(0)
    assert "Permission denied" in refusal(read_text, path)


def test_no_more_is_read_than_a_file_of_the_kind_can_have(write):
    half = 2**19
    assert "larger than 0.5 MiB: take less" in refusal(
        read_bytes, write("file", b"x" * (half + 1)), half, "", "take less"
    )
    assert read_bytes(write("file", b"x" * 10), 10) == b"x" * 10


@pytest.mark.parametrize("name", ["~nobody-has-this-name/x", "~nobody-has-this-name"])
def test_a_home_folder_that_is_none_is_refused(name):
    assert "not a usable path" in refusal(usable_path, name)


def test_a_file_of_another_kind_is_not_mapped(write):
    with (
        pytest.raises(InvalidFileError, match="not a GGUF file: it begins with b'GIF8'"),
        mapped(write("f", "GIF89"), b"GGUF", "GGUF"),
    ):
        pass


# ------------------------------------------------------------------ files that are no text
def safetensors() -> bytes:
    header = b'{"a": 1}'
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PK\x03\x04rest", "a ZIP archive, such as a PyTorch checkpoint"),
        (b"\x80\x02}q", "a pickle, such as a PyTorch checkpoint"),
        (b"\x80\x05\x95", "a pickle, such as a PyTorch checkpoint"),
        (b"GGUF\x03", "a GGUF file, whose name has to end in .gguf"),
        (safetensors(), "a safetensors file, whose name has to end in .safetensors"),
        (b"\x89HDF\r\n", "an HDF5 file"),
        (b"\x1f\x8b\x08", "a gzip archive"),
        (b"\xff\xfea", "not UTF-8 text (byte 0)"),
    ],
)
def test_a_file_that_is_no_text_is_called_what_it_is_with_what_to_give_instead(write, content, kind):
    said = refusal(read_text, write("file.pt", content), 2**20, "give a config")
    assert f"{kind}" in said
    assert said.endswith("; give a config")


def test_a_large_checkpoint_is_called_one_and_not_too_large(write):
    assert "a ZIP archive" in refusal(read_text, write("model.pt", b"PK\x03\x04" + bytes(100)), 50)


# ------------------------------------------------------------------ standard input
def test_standard_input_that_is_closed_is_refused():
    code = "from memplan.cli.main import run; run()"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    ran = subprocess.run(
        [sys.executable, "-c", code, "fit", "-", "--gpu", "rtx4090"],
        stdin=None, capture_output=True, text=True, env=environment, preexec_fn=lambda: os.close(0), check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (2, "memplan: <stdin>: standard input is closed\n")


def test_standard_input_is_bounded_too(cli):
    ran = cli("fit", "-", "--gpu", "rtx4090", stdin=b" " * (2**22 + 1))
    assert (ran.exit_code, ran.err) == (2, "memplan: <stdin>: larger than 4 MiB: no file of this kind is\n")


# ------------------------------------------------------------------ folders
def test_files_are_found_by_pattern_and_sorted(write, tmp_path):
    for name in ("b.json", "a.json", "c.txt", "deep/d.json"):
        write(name, "")
    os.mkfifo(tmp_path / "e.json")
    assert [path.name for path in files_in(tmp_path, "*.json")] == ["a.json", "b.json"]
    assert [path.name for path in files_in(tmp_path, "*.json", deep=True)] == ["a.json", "b.json", "d.json"]


def test_a_folder_without_end_is_refused(write, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "MAXIMUM_ENTRIES", 2)
    for name in "abc":
        write(name, "")
    assert "more than 2 files" in refusal(files_in, tmp_path, "*")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "cannot be listed: No such file" in refusal(files_in, tmp_path / "gone", "*")


# ------------------------------------------------------------------ through every command
ONE = ("fit", "gpt2", "--gpu", "rtx4090")
READERS: dict[str, tuple[str, ...]] = {
    "model": ("fit", "{}", "--gpu", "rtx4090"),
    "shown": ("show", "{}"),
    "config": (*ONE, "--config", "{}.yaml"),
    "catalog": ("list", "gpus", "--catalog", "{}"),
    "budget": ("check", "{}"),
    "baseline": ("diff", "{}", "{}"),
    "prices": ("where", "gpt2", "--price", "{}"),
    "profile": (*ONE, "--profile", "{}"),
    "record": ("validate", "--calibrate", "{}"),
    "history": ("trace", "--history", "{}"),
    "experiment": ("lab", "show", "{}"),
}


@pytest.fixture
def pipes(tmp_path):
    for name in ("pipe", "pipe.yaml"):
        os.mkfifo(tmp_path / name)
    return tmp_path / "pipe"


@pytest.mark.parametrize("kind", READERS)
def test_a_pipe_never_blocks(refused, pipes, kind):
    line = refused(*(part.replace("{}", str(pipes)) for part in READERS[kind]))
    assert f"{pipes}" in line
    assert "is a pipe" in line


@pytest.mark.parametrize("kind", READERS)
def test_a_name_that_no_file_can_have_is_refused(refused, kind):
    assert "File name too long" in refused(*(part.replace("{}", "x" * 300) for part in READERS[kind]))


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "config"])
def test_a_checkpoint_is_called_one(refused, tmp_path, kind):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("data.pkl", "x")
    line = refused(*(part.replace("{}", str(tmp_path / "model.pt")) for part in READERS[kind]))
    assert "a ZIP archive, such as a PyTorch checkpoint (.pt, .pth, .bin), which memplan never loads; " in line


def test_an_argument_that_is_not_utf_8_is_refused(refused):
    assert refused(*ONE, "--set", "allocator=\udcff") == (r"memplan: an argument is not UTF-8 text: allocator=\udcff")


def test_a_shard_whose_name_no_file_can_have_is_refused(refused, write):
    index = write("model.safetensors.index.json", json.dumps({"weight_map": {"a": "x" * 300 + ".safetensors"}}))
    assert "File name too long" in refused("show", index)


def test_a_safetensors_file_without_a_config_is_shown(cli, write):
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path = write("model.safetensors", len(header).to_bytes(8, "little") + header + b"1234")
    ran = cli("show", path, "--json")
    assert (ran.exit_code, ran.data["parameters"], ran.data["bytes_by_format"]) == (0, 2, {"bf16": 4})


@pytest.mark.parametrize("command", [("show",), ("fit", "--gpu", "rtx4090")])
def test_a_header_length_that_lies_is_a_damaged_file_with_and_without_a_config(refused, write, command):
    path = write("model.safetensors", (10**9).to_bytes(8, "little") + b"{}")
    assert "cut off, or no safetensors file" in refused(*command, path)


def test_path_kinds_are_told_apart_without_opening(hostile):
    kinds = {path_kind(path) for path, said in hostile.items() if "not a usable path" not in said}
    assert kinds == {"pipe", "socket", "nothing", "folder", "device"}


@pytest.mark.parametrize("words", [["check"], ["emit", "gpt2", "--config", "lora", "--gpu", "t4", "--as", "trl"]])
def test_a_working_folder_that_has_been_removed_is_said_in_a_line(tmp_path, monkeypatch, cli, words):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    answer = cli(*words)
    assert (answer.exit_code, answer.err.count("\n")) == (3 if "emit" in words else 2, 1)
    assert "the working directory has been removed" in answer.err
