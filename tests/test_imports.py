"""Imports go from a higher rank to a lower one, and torch lives in the side folders only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import memplan

ROOT = Path(memplan.__file__).parent
RANKS = [
    {"driver", "errors", "escaping", "torch_warnings", "units", "writing"},
    {"opening", "loading", "strict_json", "validation"},
    {"catalog", "model", "training"},
    {"readers", "architectures", "parallel", "setup"},
    {
        "forms",
        "reductions",
        "tape",
        "playback",
        "steppers",
        "states",
        "chunks",
        "update_rules",
        "updates",
        "allowances",
        "blocks",
        "head",
        "phases",
        "places",
        "sharding",
        "sharded",
        "adapters",
    },
    {"planner", "advice", "inverse", "published", "recommendations", "solver", "budget"},
    {"report"},
    {"cli", "testing"},
]
RANK = {part: rank for rank, parts in enumerate(RANKS) for part in parts}
SIDE = {"lab", "muon"}
CONFIGS_ARE_ENTRIES = ("catalog", "training")
"""The catalog holds training configs by name, so it reads their schema; nothing goes the other way."""
FILES = sorted(path for path in ROOT.rglob("*.py") if "data" not in path.relative_to(ROOT).parts)


def part_of(path: Path) -> str:
    """Return the file or folder of the package that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the modules that a file imports anywhere, even inside functions, each with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.module or "", node.lineno
            if node.module == "memplan":
                yield from ((f"memplan.{alias.name}", node.lineno) for alias in node.names)


def parts_imported(path: Path) -> Iterator[tuple[str, int]]:
    for module, line in imports(path):
        if module.startswith("memplan."):
            yield module.split(".")[1], line


def test_every_part_has_a_rank():
    parts = {part_of(path) for path in FILES} - {"__init__", "__main__", "_version"}
    assert parts <= set(RANK) | SIDE


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_from_a_higher_rank_to_a_lower_one(path):
    own = part_of(path)
    for part, line in parts_imported(path):
        where = f"{path.relative_to(ROOT)}:{line} imports memplan.{part}"
        if part == own or part in ("__version__", "__init__"):
            continue
        if own in SIDE:
            assert part in SIDE or RANK[part] <= 5, where
        elif own == "cli" or RANK.get(own, 0) == 7:
            assert part in RANK or part in SIDE, where
        else:
            assert part not in SIDE, where
            assert RANK[part] <= RANK[own], where
            assert RANK[own] != RANK[part] or RANK[own] != 2 or (own, part) == CONFIGS_ARE_ENTRIES, where


@pytest.mark.parametrize("rank", range(len(RANKS)))
def test_no_two_parts_of_one_rank_import_each_other_in_a_circle(rank):
    needs = {
        part: {p for f in FILES if part_of(f) == part for p, _ in parts_imported(f)} & RANKS[rank] - {part}
        for part in RANKS[rank]
    }
    while needs:
        free = {part for part, wanted in needs.items() if not wanted & needs.keys()}
        assert free, f"a circle among {sorted(needs)}"
        needs = {part: wanted for part, wanted in needs.items() if part not in free}


@pytest.mark.parametrize(
    "path", [p for p in FILES if part_of(p) not in SIDE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_torch_and_transformers_live_in_the_side_folders(path):
    assert not {module.split(".")[0] for module, _ in imports(path)} & {"torch", "transformers", "numpy", "triton"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_name_of_another_part_is_imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memplan."):
            private = [
                alias.name for alias in node.names if alias.name.startswith("_") and not alias.name.startswith("__")
            ]
            assert node.module.split(".")[1] == part_of(path) or not private, f"{path}:{node.lineno}: {private}"
