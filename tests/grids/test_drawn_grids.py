"""Grids of many kinds, each as its peak and a digest of all its figures: a change of the formula that moves any of them is noticed.

The grids were drawn once and kept. That figures are right is held by what was traced and measured
(``test_megatron_peaks.py``, ``test_megatron_measured.py``); ``pytest tests/grids --update-golden`` rewrites the digests.
"""

import json
from hashlib import sha256
from pathlib import Path

import memplan
from memplan.errors import MemplanError

FILE = Path(__file__).with_name("drawn_grids.json")


def answer_of(grid) -> str:
    """Return the expected bytes of a grid's fullest rank and a digest of all figures and sentences, or why there is none."""
    try:
        answer = memplan.plan_grid(grid["model"], gpu="h100-sxm-80gb", gpus=grid["gpus"], set=grid["set"])
    except MemplanError as error:
        return f"refused: {error}"
    plan = answer.plan
    ends = plan.fullest_rank, plan.fullest_at_least, plan.persistent_bytes, plan.least_bytes, plan.upper_bytes
    ranks = [plan.rank(number) for number in {0, grid["gpus"] // 2, grid["gpus"] - 1}]
    figures = plan.grid, plan.stages, plan.steps, plan.outside, plan.verdict, ends, ranks, answer.notes
    return f"{plan.expected_bytes} {sha256(repr(figures).encode()).hexdigest()[:12]}"


def test_drawn_grids_say_what_they_said(request):
    grids = json.loads(FILE.read_text(encoding="utf-8"))
    answers = [answer_of(grid) for grid in grids]
    if request.config.getoption("--update-golden"):
        grids = [{**grid, "answer": answer} for grid, answer in zip(grids, answers, strict=True)]
        FILE.write_text("\n".join(["[", ",\n".join(map(json.dumps, grids)), "]", ""]), encoding="utf-8")
    assert answers == [grid.get("answer") for grid in grids]
