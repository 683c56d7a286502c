"""Budget files, and a run of ``memplan check`` on one, in a folder of its own."""

from pathlib import Path

import pytest

from .examples import TEN_JOBS


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return tmp_path


@pytest.fixture
def budget(folder, write):
    """Write the budget file that is checked by default."""
    return lambda text: write("memplan-budget.yaml", text)


@pytest.fixture
def one(budget):
    """Write a budget with one job of GPT-2 and further keys."""
    return lambda keys="": budget(
        f"version: 1\nbudgets:\n  - {{name: job, model: gpt2, config: fp32-adamw, gpu: t4{keys}}}\n"
    )


@pytest.fixture
def ten_jobs(budget) -> Path:
    return budget(TEN_JOBS)
