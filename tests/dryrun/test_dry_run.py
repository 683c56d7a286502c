"""``memplan run``: a script runs unchanged, what it needs is what it would need, and its failures can be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import memplan

SCRIPTS = Path(__file__).parent / "scripts"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memplan", "run", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)


def written(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def test_a_loop_runs_unchanged_and_is_told_where_it_would_run_out(tmp_path):
    script = str(SCRIPTS / "nanogpt_loop.py")
    ran = run(tmp_path, script, "--gpu-memory", "0.5GiB", "--json", "--steps", "2", "--", "--dtype", "float16")
    assert ran.returncode == 1, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["steps"] == 2
    assert answer["verdict"] == "no"
    out = answer["runs_out"]
    assert out["line"].startswith("scripts/nanogpt_loop.py:")
    assert "CUDA out of memory. Tried to allocate" in out["message"]
    assert "step 1: loss" in ran.stderr
    weights = sum(size["bytes"] for size in answer["components"] if size["name"] == "weights")
    assert weights == 4 * (512 * 128 + 64 * 128 + 2 * (12 * 128 * 128 + 9 * 128) + 2 * 128)
    assert answer["persistent_bytes"] >= 4 * weights
    assert {"forward", "loss backward", "second backward", "gradient clipping", "optimizer step"} <= {
        instant["name"] for instant in answer["instants"]
    }
    assert any(file["file"] == "out/ckpt.pt" and file["bytes"] >= 3 * weights for file in answer["not_written"])
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_run_is_refused_before_torch_is_loaded(tmp_path):
    with pytest.raises(memplan.InvalidFileError, match="no such script"):
        memplan.run(tmp_path / "nothing.py")
    script = tmp_path / written(tmp_path, "")
    with pytest.raises(memplan.InvalidFileError, match="ranks are counted from 0"):
        memplan.run(script, gpus=2, rank=2)
    with pytest.raises(memplan.UnknownNameError, match="h100"):
        memplan.run(script, gpu="h1000")


TRAINS = """
import torch
weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
optimizer = torch.optim.SGD([weight])
for _ in range(9):
    (weight @ weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FAILURES = {
    "bug": ("import torch\ntorch.zeros(2, 3, device='cuda') @ torch.zeros(2, 3, device='cuda')\n", 2, "script.py:2"),
    "syntax": ("def broken(:\n", 2, "SyntaxError"),
    "ends": ("raise SystemExit('no data')\n", 2, "no data"),
    "endless": ("while True:\n    pass\n", 3, "still running after 4 s"),
    "untrained": ("import torch\ntorch.zeros(9, device='cuda')\n", 3, "no optimizer was stepped"),
    "nothing": ("print('hello')\n", 3, "no tensor was on the GPU"),
    "forks": ("import os\nos.fork()\n", 3, "starts a process of its own"),
    "operator": (
        "import torch\n@torch.library.custom_op('mine::double', mutates_args=())\n"
        "def double(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
        "torch.ops.mine.double(torch.ones(2, device='cuda'))\n",
        3,
        "register_fake('mine::double')",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_one_readable_line(tmp_path, name):
    text, code, said = FAILURES[name]
    ran = run(tmp_path, written(tmp_path, text), "--timeout", "4" if name == "endless" else "60")
    assert ran.returncode == code, ran.stderr
    assert said in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr or code == 2
    assert "memplan/" not in ran.stderr
    assert not ran.stdout


@pytest.mark.slow
def test_a_loop_without_modules_is_told_too(tmp_path):
    ran = run(tmp_path, written(tmp_path, TRAINS), "--json", "--gpu", "rtx4090")
    answer = json.loads(ran.stdout)
    assert (answer["steps"], answer["verdict"]) == (3, "fits")
