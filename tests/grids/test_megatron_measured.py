"""What Megatron-LM's ranks keep and take, beside what its authors measured on GPUs: see megatron-measured.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

RECORD = yaml.safe_load((Path(__file__).parent / "megatron-measured.yaml").read_text())
COMMON, TESTS = RECORD["common"], RECORD["tests"]
SET_WORKSPACES = 2 * 32 * 2**20
"""CUBLAS_WORKSPACE_CONFIG=:4096:8, eight buffers of 4,096 KiB for each of two handles."""


def planned(cli, folder: Path, test: dict) -> dict[str, int]:
    """Return what the last rank keeps, and a step takes besides, with cuBLAS's workspaces as the test has them."""
    flags = {f"--{name}": value for name, value in {**COMMON, **test["flags"]}.items() if value is not None}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({"MODEL_ARGS": flags}))
    data = cli("fit", file, "--gpu", test.get("gpu", "h100"), "--gpus", test.get("gpus", 8), "--json").data
    stage = data["stages"][-1]
    own = next(line["bytes"] for line in data["rank"]["components"] if line["name"] == "library_workspaces")
    below = stage["persistent_bytes"] + (own if test.get("own_cublas") else SET_WORKSPACES)
    names = ("lasting_step", "least_activation", "step", "most_step")
    return {name: below + stage[f"{name}_bytes"] for name in names}


@pytest.mark.parametrize("name", TESTS)
def test_what_was_measured_is_what_is_planned(cli, tmp_path, name):
    """What is allocated as a step is logged is what is planned, but for up to 1 MiB that the allocator hands out more for a large tensor, and
    what is routed to a rank's experts; the peak lies in its interval.
    """
    test = TESTS[name]
    plan = planned(cli, tmp_path, test)
    assert -0.006 < (test["allocated"] - plan["lasting_step"]) / test["allocated"] < 0.013
    assert plan["least_activation"] < test["most"] < plan["most_step"]
    own_modules, routed = test["flags"].get("transformer-impl") == "local", "num-experts" in test["flags"]
    assert abs(plan["step"] / test["most"] - 1) < (0.18 if own_modules else 0.08 if routed else 0.05)
