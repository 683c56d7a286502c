"""The installed command, in a process of its own: exit codes, pipes, and what it imports."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("memplan")
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="memplan is not installed beside this interpreter")

FIT = ("fit", "gpt2", "--gpu", "rtx4090", "--config", "bf16-adamw")


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment | options.pop("env", {}),
        **options,
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (FIT, 0),
        (("fit", "llama-8b", "--gpu", "rtx4090", "--config", "bf16-adamw"), 1),
        (("fit", "llama-9b", "--gpu", "rtx4090"), 2),
        (("fit", "--nonsense"), 2),
        ((*FIT[:-1], "qlora", "--set", "parallel.tensor=2"), 3),
    ],
    ids=["fits", "no", "unknown", "usage", "cannot"],
)
def test_exit_codes(arguments, code):
    ran = run(*arguments)
    assert ran.returncode == code
    assert bool(ran.stdout) == (code < 2)
    assert bool(ran.stderr) == (code >= 2)


def test_the_command_works_from_any_directory(tmp_path):
    assert run("list", "configs", cwd=tmp_path).stdout == run("list", "configs", cwd="/").stdout


def test_a_small_dumb_terminal_gets_the_same_bytes():
    assert run(*FIT, env={"COLUMNS": "40", "TERM": "dumb", "NO_COLOR": "1"}).stdout == run(*FIT).stdout


def test_a_locale_without_utf_8_is_no_trouble():
    ran = run(*FIT, env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert (ran.returncode, ran.stderr) == (0, "")
    for command in (("list", "gpus"), ("explain", "gpt2"), ("doctor",), ("show", "llama-8b", "--json")):
        assert run(*command, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}).returncode == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_reader_that_stops_early_leaves_no_traceback():
    script = f"set -o pipefail; '{PROGRAM}' explain llama-8b --json | head -c 10; echo; echo ${{PIPESTATUS[0]}} >&2"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in ran.stderr
    assert "Exception" not in ran.stderr
    assert ran.stderr.strip() in ("0", "141")


def test_a_full_disk_is_one_readable_line():
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with open("/dev/full", "w") as full:
        environment = {"PATH": os.environ["PATH"]}
        ran = subprocess.run(
            [PROGRAM, *FIT], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
        )
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert ran.stderr.startswith("memplan: ")
    assert ran.stderr.count("\n") == 1


IMPORTS = """
import sys
sys.argv = ["memplan", "fit", "llama-8b", "--gpu", "rtx4090"]
from memplan.cli.main import run
try:
    run()
except SystemExit as left:
    assert not left.code, left.code
found = {name.split(".")[0] for name in sys.modules} & {"torch", "pydantic", "transformers", "numpy", "jsonschema"}
if "typer._adapters" in sys.modules:  # typer from 0.26 on reads arguments with pydantic
    found.discard("pydantic")
from memplan.documents.schemas import _adapter
assert _adapter.cache_info().currsize == 0, "files of ours went through pydantic"
sys.exit(f"imported: {sorted(found)}" if found else 0)
"""


def test_a_plan_imports_no_torch_and_validates_no_file_of_ours():
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("FITS  ")
