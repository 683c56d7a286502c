"""Whatever standard output is, the answer is there whole and the exit code says what it said, or there is an error.

The default run takes some of the commands and formats; the others::

    pytest -m slow tests/cli/test_streams.py
"""

import io
import json
import os
import pty
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest

from memplan.cli.commands.check import CheckFormat
from memplan.cli.main import COMMANDS
from memplan.report.document import Format

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.usefixtures("answered_once"),
]
"""A fork does nothing but run one command, in the thread that it was made in, and knows the answers that were given before it."""

RECORDS = Path(__file__).parents[1] / "records"
TABLES, CHECKS = get_args(Format), get_args(CheckFormat)
JOB = ("gpt2", "--gpu", "t4")
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 0.50 GiB is free. Of the "
    "allocated memory 6.00 GiB is allocated by PyTorch, and 0.10 GiB is reserved by PyTorch but unallocated."
)
EXAMPLES = Path(__file__).parent.parent / "trainers" / "examples"
ASKED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fit": (("fit", *JOB, "--config", "bf16-adamw"), TABLES),
    "max": (("max", "--config", "tier3", "--gpu", "rtx4090"), TABLES),
    "where": (("where", "llama-70b", "--config", "tier1", "--gpu", "h100"), TABLES),
    "frontier": (("frontier", *JOB), (*TABLES, "svg")),
    "suggest": (("suggest", *JOB), TABLES),
    "compare": (("compare", *JOB), TABLES),
    "recommend": (("recommend", "--gpu", "t4"), TABLES),
    "explain": (("explain", "gpt2"), TABLES),
    "report": (("report", *JOB), ()),
    "why": (("why", "gpt2", "--message", "train.log"), TABLES),
    "trace": (("trace", "--layers", "1", "--hidden", "64", "--heads", "2", "--vocab", "64", "-q"), TABLES),
    "validate": (("validate", "--calibrate", str(RECORDS)), TABLES),
    "import": (("import", str(EXAMPLES / "axolotl.yaml")), TABLES),
    "emit": (("emit", "gpt2", "--as", "trl", "--config", "bf16-adamw", "--gpu", "a100-80gb"), ()),
    "check": (("check", "budget.yaml"), CHECKS),
    "diff": (("diff", "base.json", "moved.json"), TABLES),
    "tables": (("tables", "s000.t15"), TABLES),
    "list": (("list", "gpus"), TABLES),
    "show": (("show", "gpt2"), TABLES),
    "schema": (("schema", "plan"), ()),
    "doctor": (("doctor",), TABLES),
    "lab": (("lab", "show", "orthogonality"), TABLES),
    "help": (("--help",), ()),
    "version": (("--version",), ()),
    "fit-help": (("fit", "--help"), ()),
}
"""A question to every command, and the formats that its answer has."""

CASES = [(name, form) for name, (_, forms) in ASKED.items() for form in forms or ("",)]
QUICK = [
    ("fit", "table"),
    ("check", "github"),
    ("list", "json"),
    ("frontier", "csv"),
    ("explain", "csv"),
    ("show", "md"),
    ("help", ""),
]

STREAMS = {
    "pipe": {},
    "closed": {},
    "full": {},
    "left": {},
    "terminal": {"TERM": "xterm-256color"},
    "terminal-dumb": {"TERM": "dumb"},
    "terminal-narrow": {"TERM": "dumb", "COLUMNS": "20"},
    "terminal-no-color": {"TERM": "xterm-256color", "NO_COLOR": "1"},
    "pipe-narrow": {"COLUMNS": "20"},
    "pipe-columns": {"COLUMNS": "²"},
    "pipe-ascii": {},
    "pipe-unbuffered": {},
}
"""What standard output is, and the environment then."""

BUDGET = """\
version: 1
budgets:
  - {name: fits, model: gpt2, config: fp32-adamw, gpu: t4}
  - {name: too large, model: gpt2, config: fp32-adamw, gpu: t4, limit: 1 GiB}
"""


@dataclass(frozen=True)
class Ended:
    exit_code: int
    out: bytes
    err: str


@pytest.fixture
def workplace(tmp_path, monkeypatch, cli) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "budget.yaml").write_text(BUDGET)
    cli("check", "budget.yaml", "--update-baseline", "--baseline", "base.json")
    base = json.loads((tmp_path / "base.json").read_text())
    base["rows"][0]["device_bytes"] += 1
    (tmp_path / "moved.json").write_text(json.dumps(base))
    (tmp_path / "train.log").write_text(OUT_OF_MEMORY)
    return tmp_path


def standard_output(stream: str) -> tuple[int, int | None]:
    """Return the descriptor to write to, and the one to read from."""
    kind = stream.partition("-")[0]
    if kind == "terminal":
        read, write = pty.openpty()
        return write, read
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY), None
    read, write = os.pipe()
    if kind == "left":
        os.close(read)
        return write, None
    return write, read


def ended(arguments: tuple[str, ...], stream: str) -> Ended:
    """Run a command in a fork of this process with such a standard output."""
    out, reading = standard_output(stream)
    heard, err = os.pipe()
    child = os.fork()
    if not child:
        _become(arguments, stream, out, err)
    os.close(out), os.close(err)
    answer = b"" if reading is None else _all(reading)
    remarks = _all(heard).decode()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(code, b"" if stream == "closed" else answer.replace(b"\r\n", b"\n"), remarks)


def _all(descriptor: int) -> bytes:
    """Return what is read until the other end is closed, which a terminal calls an error."""
    parts = []
    try:
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except OSError:
        pass
    os.close(descriptor)
    return b"".join(parts)


def _become(arguments: tuple[str, ...], stream: str, out: int, err: int) -> None:
    from memplan.cli.main import run

    code = 99
    try:
        os.environ |= {"PATH": "/nonexistent", **STREAMS[stream]}
        os.dup2(out, 1), os.dup2(err, 2), os.close(out), os.close(err)
        encoding = "ascii" if stream.endswith("ascii") else "utf-8"
        bare = stream.endswith("unbuffered")
        sys.stdout = os.fdopen(1, "w", encoding=encoding) if not bare else _unbuffered()
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        if stream == "closed":
            os.close(1)
            sys.stdout = None
        sys.argv = ["memplan", *arguments]
        run()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 98
    finally:
        os._exit(code)


def _unbuffered():
    return io.TextIOWrapper(io.FileIO(1, "w"), "utf-8", write_through=True)


def asked(name: str, form: str) -> tuple[str, ...]:
    arguments, _ = ASKED[name]
    return (*arguments, "--format", form) if form else arguments


def held(name: str, form: str, cli) -> None:
    """Hold every kind of standard output against a plain pipe."""
    cli(*asked(name, form))  # for all forks
    plain = ended(asked(name, form), "pipe")
    assert plain.exit_code in (0, 1), plain.err
    assert plain.out.endswith(b"\n")
    for stream in ("closed", "full"):
        ran = ended(asked(name, form), stream)
        assert (ran.exit_code, ran.err.count("\n")) == (2, 1 + plain.err.count("\n")), f"{stream}: {ran}"
        assert ran.err.splitlines()[-1].startswith("memplan: standard output: cannot be written: ")
    assert ended(asked(name, form), "left") == Ended(plain.exit_code, b"", plain.err)
    assert ended(asked(name, form), "pipe-unbuffered") == plain
    for stream in STREAMS:
        if stream.startswith(("terminal", "pipe-")) and stream != "pipe-unbuffered":
            ran = ended(asked(name, form), stream)
            assert (ran.exit_code, ran.err) == (plain.exit_code, plain.err), stream
            _check_text(ran.out, plain.out, stream, form)


def _check_text(out: bytes, plain: bytes, stream: str, form: str) -> None:
    text = out.decode("ascii" if stream.endswith("ascii") else "utf-8")
    if stream != "terminal":
        assert "\x1b" not in text, stream
    if form in ("json", "sarif", "gitlab"):
        assert json.loads(text) == json.loads(plain), stream
    elif stream.startswith("terminal") or "narrow" in stream:
        assert sorted(_numbers(text)) == sorted(_numbers(plain.decode())), stream
    elif stream == "pipe-columns":
        assert out == plain


def _numbers(text: str) -> list[str]:
    """Return the whole numbers of four digits and more, which no fold may cut."""
    return re.findall(r"\d[\d,]{4,}", text)


def test_every_command_that_ends_is_asked_in_every_format_it_has():
    assert {arguments[0] for arguments, _ in ASKED.values()} - {"--help", "--version"} == COMMANDS.keys() - {
        "ui",
        "run",
    }  # tests/dryrun


@pytest.mark.parametrize(("name", "form"), QUICK, ids=lambda part: part)
def test_whatever_standard_output_is(workplace, cli, name, form):
    held(name, form, cli)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [case for case in CASES if case not in QUICK], ids=lambda part: part)
def test_whatever_standard_output_is_for_every_command_and_format(workplace, cli, name, form):
    if name == "trace":
        pytest.importorskip("torch")
    held(name, form, cli)


# ------------------------------------------------------------------ from the very start of a process
def process(
    *arguments: object, closed: tuple[int, ...] = (), most_bytes: int = 0, **options
) -> subprocess.CompletedProcess:
    """Run a command in a process that is started with closed streams, or with little room for files."""

    def before() -> None:
        for descriptor in closed:
            os.close(descriptor)
        if most_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    command = [sys.executable, "-c", "from memplan.cli.main import run; run()", *map(str, arguments)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **options.pop("env", {})}
    return subprocess.run(command, preexec_fn=before, env=environment, timeout=60, **options)


LIST = ("list", "gpus", "--json")


@pytest.mark.parametrize("arguments", [LIST, ("--help",), ("list",)], ids=" ".join)
def test_a_closed_standard_output_is_an_error_in_one_line(arguments):
    ran = process(*arguments, closed=(1,), stderr=subprocess.PIPE)
    assert ran.returncode == 2
    assert ran.stderr.startswith(b"memplan: ") or arguments == ("list",)


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_a_file_is_written_whatever_else_is_closed(tmp_path, closed):
    assert process(*LIST, "-o", tmp_path / "all.json", closed=closed).returncode == 0
    assert json.loads((tmp_path / "all.json").read_text())["kind"] == "gpus"


def test_an_error_that_nobody_hears_keeps_its_exit_code():
    assert process("fit", "no-such-model", closed=(2,), stdout=subprocess.PIPE).returncode == 2
    with open("/dev/full", "w") as full:
        assert process("fit", "no-such-model", stdout=subprocess.PIPE, stderr=full).returncode == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_that_a_disk_takes_half_of_is_an_error(tmp_path, unbuffered):
    """A write may succeed and take fewer bytes than it was given; without buffers, Python leaves it at that."""
    with open(tmp_path / "half.json", "w") as file:
        ran = process(*LIST, most_bytes=4096, stdout=file, stderr=subprocess.PIPE, env={"PYTHONUNBUFFERED": unbuffered})
    assert ran.returncode == 2
    assert ran.stderr == b"memplan: standard output: cannot be written: File too large\n"


def test_a_file_that_a_disk_has_no_room_for_is_left_as_it_was(tmp_path):
    path = tmp_path / "all.json"
    path.write_text("old")
    ran = process(*LIST, "-o", path, most_bytes=4096, stderr=subprocess.PIPE)
    assert (ran.returncode, path.read_text()) == (2, "old")
    assert os.listdir(tmp_path) == ["all.json"]


def test_a_reader_that_stops_early_changes_no_verdict():
    command = (
        f"'{sys.executable}' -c 'from memplan.cli.main import run; run()' fit llama-70b --gpu t4 --json | head -c 1"
    )
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, b"{", b"")
