"""What commands print, to the letter: review a change here as you would code.

``pytest tests/golden --update-golden`` rewrites the expected files.
"""

import difflib
import re
from pathlib import Path

import pytest

EXPECTED = Path(__file__).with_name("expected")

CASES = {
    "fit.txt": ("fit", "llama-8b", "--gpu", "rtx4090"),
    "fit-config.txt": ("fit", "llama-8b", "--gpu", "rtx4090", "--config", "bf16-adamw"),
    "fit-config.json": ("fit", "gpt2", "--gpu", "t4", "--config", "tier1", "--json"),
    "max.txt": ("max", "--config", "tier3", "--gpu", "rtx4090"),
    "max.json": ("max", "--gpu", "rtx4090", "--json"),
    "where.txt": ("where", "llama-70b", "--checkpointing", "full", "--gpu", "h100"),
    "explain.txt": ("explain", "gpt2", "--config", "tier1"),
    "tables.txt": ("tables", "s000.t15"),
    "max-accounting.txt": ("max", "--config", "tier3", "--accounting", "notes-scale"),
    "list.txt": ("list", "gradients"),
    "show.txt": ("show", "iq3-xxs"),
    "show.json": ("show", "qwen2.5-0.5b", "--json"),
}

CHANGING = [
    (re.compile(r'"catalog_hash": "[0-9a-f]{64}"'), '"catalog_hash": "(of the catalog)"'),
    (re.compile(r'"memplan_version": "[^"]+"'), '"memplan_version": "(of the release)"'),
]
"""What changes with every edit of the catalog and every release, and what stands for it here."""


def settled(text: str) -> str:
    for pattern, replacement in CHANGING:
        text = pattern.sub(replacement, text)
    return text


@pytest.mark.parametrize("name", CASES)
def test_a_command_prints_what_it_printed_when_it_was_reviewed(cli, request, name):
    ran = cli(*CASES[name])
    assert ran.err == ""
    assert ran.exit_code in (0, 1)
    path, found = EXPECTED / name, settled(ran.out)
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    diff = difflib.unified_diff(expected.splitlines(), found.splitlines(), str(path), "printed now", lineterm="")
    if found != expected:
        pytest.fail("\n".join([*diff, "", "pytest tests/golden --update-golden accepts it"]), pytrace=False)


def test_every_expected_file_belongs_to_a_case():
    assert {path.name for path in EXPECTED.glob("*")} <= set(CASES)
