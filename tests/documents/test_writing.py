"""What is saved is there whole or not at all; what is printed is there whole, or there is an error."""

import ast
import contextlib
import io
import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import memplan
from memplan.documents import writing
from memplan.documents.writing import append_file, make_folder, write_answer, write_file, write_remark
from memplan.errors import InvalidFileError
from tests.sources import nodes


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix == ".tmp"]


@pytest.fixture
def old(tmp_path) -> Path:
    path = tmp_path / "base.json"
    path.write_text("old")
    return path


# ------------------------------------------------------------------ files
@pytest.mark.parametrize("write", [write_file, append_file])
def test_a_pipe_that_nobody_reads_from_is_not_waited_for(tmp_path, write):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidFileError, match="pipe: cannot be written: nobody reads from this pipe"):
        write(tmp_path / "pipe", "new")


@pytest.mark.parametrize("write", [write_file, append_file])
def test_a_pipe_that_is_read_gets_all(tmp_path, write):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        for _ in range(200):
            with contextlib.suppress(InvalidFileError):
                write(tmp_path / "pipe", "new" * 10_000)
                break
            select.select([], [], [], 0.05)  # until it has opened the pipe
        assert reader.stdout.read() == b"new" * 10_000


KILLED = """
import os, signal, sys
from pathlib import Path
from memplan.documents import writing

path, new = Path(sys.argv[1]), "new" * 50_000

def killed_after(lines):
    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != writing.__file__:
            return None
        lines -= event == "line"
        if lines < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    writing.write_file(path, new)
    os._exit(0)

for line in range(1000):
    path.write_text("old")
    child = os.fork() or killed_after(line)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(end, {"old": "old", new: "new"}[path.read_text()])
    if not end:
        break
"""


def test_a_writer_killed_at_any_line_leaves_the_old_file_or_the_new_one(old):
    ran = subprocess.run([sys.executable, "-c", KILLED, str(old)], capture_output=True, text=True, timeout=60)
    *killed, last = ran.stdout.splitlines()
    assert set(killed) == {f"{-signal.SIGKILL} old", f"{-signal.SIGKILL} new"}
    assert len(killed) > 30
    assert last == "0 new"


def test_an_interruption_cleans_up_after_itself(old, monkeypatch):
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(old, "new")
    assert old.read_text() == "old"
    assert left_behind(old.parent) == []


def test_a_link_is_followed_and_the_rights_of_the_old_file_are_kept(old, tmp_path):
    old.chmod(0o640)
    (tmp_path / "link.json").symlink_to(old)
    write_file(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (old.read_text(), stat.S_IMODE(old.stat().st_mode)) == ("new", 0o640)


def test_a_link_to_nothing_makes_what_it_leads_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "there").read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink()


def test_a_new_file_has_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "new", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127])
def test_a_name_as_long_as_names_can_be_is_written(tmp_path, name):
    write_file(tmp_path / name, "new")
    assert (tmp_path / name).read_text() == "new"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/full"), "No space left on device"),
    ],
    ids=["folder", "loop", "full"],
)
def test_what_cannot_take_a_file_is_refused_and_stays(tmp_path, made, reason):
    path = tmp_path / "there"
    made(path)
    before = path.lstat().st_ino
    with pytest.raises(InvalidFileError, match=f"there: cannot be written: {reason}"):
        write_file(path, "new")
    assert path.lstat().st_ino == before
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "reason"), [("no/folder", "No such file"), ("a\0b", "null byte"), ("x" * 256, "too long")]
)
def test_a_path_that_cannot_be_is_refused(tmp_path, name, reason):
    with pytest.raises(InvalidFileError, match=f"cannot be written: .*{reason}"):
        write_file(tmp_path / name, "new")


def test_a_file_that_may_not_be_written_is_refused_though_its_folder_may(old):
    if os.geteuid() == 0:
        pytest.skip("root may write everything")
    old.chmod(0o400)
    with pytest.raises(InvalidFileError, match="Permission denied"):
        write_file(old, "new")
    assert old.read_text() == "old"


def test_a_device_is_written_to_and_not_replaced():
    write_file(Path("/dev/null"), "new")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_what_cannot_be_encoded_leaves_the_old_file(old):
    with pytest.raises(InvalidFileError, match="cannot be written"):
        write_file(old, "\udc80")
    assert old.read_text() == "old"
    assert left_behind(old.parent) == []


def test_a_text_is_appended(old):
    append_file(old, " and new")
    assert old.read_text() == "old and new"


APPENDED = """
import resource, sys
from pathlib import Path
from memplan.documents.writing import append_file

resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
append_file(Path(sys.argv[1]), "new" * 50_000)
"""


def test_what_cannot_be_appended_whole_is_not_appended_at_all(old):
    ran = subprocess.run([sys.executable, "-c", APPENDED, str(old)], capture_output=True, text=True, timeout=60)
    assert "base.json: cannot be written: File too large" in ran.stderr
    assert old.read_text() == "old"


def test_a_folder_that_cannot_be_made_is_refused(old):
    with pytest.raises(InvalidFileError, match=r"base.json/in: cannot be made: Not a directory"):
        make_folder(old / "in")


# ------------------------------------------------------------------ streams
class Grudging(io.RawIOBase):
    """Takes three bytes at a time, and in between none at all."""

    def __init__(self, pipe: int) -> None:
        self.taken, self.calls, self.pipe = b"", 0, pipe

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.pipe

    def write(self, data) -> int | None:
        self.calls += 1
        if self.calls % 2:
            return None
        self.taken += bytes(data[:3])
        return len(data[:3])


@pytest.mark.parametrize("unbuffered", [False, True])
def test_an_answer_is_written_whole_however_little_is_taken_at_once(monkeypatch, unbuffered):
    read, write = os.pipe()
    raw = Grudging(write)
    buffer = raw if unbuffered else io.BufferedWriter(raw)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, "utf-8", write_through=unbuffered))
    write_answer("ünd " * 10)
    assert raw.taken == "ünd ".encode() * 10
    os.close(read), os.close(write)


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("utf-8", "éü", "éü"),
        ("latin-1", "éü", "éü"),
        ("ascii", "éü", r"\u00e9\u00fc"),
        ("latin-1", "é😀", r"\u00e9\ud83d\ude00"),
    ],
)
def test_a_character_that_the_terminal_lacks_is_shown_as_json_shows_it(monkeypatch, encoding, text, written):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding))
    write_answer(text)
    assert buffer.getvalue() == written.encode(encoding)


def test_what_nobody_hears_is_no_reason_to_fail(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        write_remark("a remark\n")
        monkeypatch.setattr(sys, "stderr", None)
        write_remark("a remark\n")


def test_what_others_print_is_escaped(capsys):
    with writing.guarded_streams():
        print("a\x1b[31m\n::error::x")
        print("\x07", file=sys.stderr)
    assert capsys.readouterr() == ("a\\u001b[31m\n\\u003a:error::x\n", "\\u0007\n")


# ------------------------------------------------------------------ nothing else writes
WRITERS = {
    *("write_text", "write_bytes", "savefig", "imsave", "print", "echo", "secho", "replace_file", "mkdir", "makedirs"),
    *("rename", "copy2", "copyfile", "move", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile"),
    *("dup", "dup2", "ftruncate"),
}
"""Functions that write, print, or put files in place, whosever they are."""

OF_MODULES = {
    ("os", "open"),
    ("os", "replace"),
    ("os", "write"),
    ("torch", "save"),
    ("json", "dump"),
    ("pickle", "dump"),
}
REASONS = {
    "documents/writing.py": "it is the writer",
    "cli/completion.py": "what a shell asks for, before anything else is imported",
    "cli/main.py": "typer.echo prints the version through the guarded stream",
    "documents/opening.py": "it opens for reading, and says with which flags",
    "dryrun/files/sandboxed_files.py": "files in the folder that stands in for where a script writes",
    "dryrun/files/sandboxed_paths.py": "a copy in that folder of a file that a script changes",
    "dryrun/script_child.py": "a pipe to the process that asked for the run",
    "dryrun/stack_scripts/unsloth_job.py": "a job and its model's config in a temporary folder, which goes with the trace",
    "dryrun/script_process.py": "a pipe to the process that runs the script",
    "dryrun/terms/script_errors.py": "a script's own traceback",
    "report/document.py": "rich prints into memory",
    "report/figures.py": "matplotlib draws into memory, and the writer saves that",
    "library/lookup/online_config.py": "a temporary folder, which goes with the process",
    "muon/checkpoints.py": "torch writes to the writer's file; the library makes its folder, and removes old files",
    "library/trainers/written_back.py": "a model's shapes in a temporary folder, which goes with the process",
    "measure/child.py": "a pipe to the process that measures",
    "measure/process.py": "a temporary file for what that process complains of",
}


def writes(call: ast.Call) -> bool:
    """Whether a call is one that writes: by its name, or an ``open`` of any kind whose mode is not for reading."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = function.value if isinstance(function, ast.Attribute) else None
    if isinstance(owner, ast.Attribute):  # sys.stdout.write
        return name == "write" and owner.attr in ("stdout", "stderr")
    if name in WRITERS or (getattr(owner, "id", ""), name) in OF_MODULES:
        return True
    texts = [a.value for a in [*call.args, *(k.value for k in call.keywords)] if isinstance(a, ast.Constant)]
    modes = [text for text in texts if isinstance(text, str) and set(text) <= set("rwaxbt+")]
    return name in ("open", "fdopen") and any(set(mode) & set("wax+") for mode in modes)


def test_nothing_is_written_but_by_the_writer():
    root = Path(memplan.__file__).parent
    found: dict[str, list[int]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in nodes(path, ast.Call):
            if writes(node):
                found.setdefault(path.relative_to(root).as_posix(), []).append(node.lineno)
    assert {name: lines for name, lines in found.items() if name not in REASONS} == {}
    assert REASONS.keys() - found.keys() == set(), "a reason that is needed no more"
