"""What compiles a step is functions over values: classes inherit nothing, but for hooks around a step that do nothing by themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memplan.step

FILES = sorted(Path(memplan.step.__file__).parent.rglob("*.py"))
PLAIN_BASES = {"IntEnum", "NamedTuple", "Protocol"}
HOOKS = {"GatheredParameters", "list[Mark]"}
"""What tells of a step as it goes: whoever writes events down overrides that; a pipeline's rank, the order of its passes too."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_classes_are_values_and_enumerations(path):
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    assert {ast.unparse(base) for node in classes for base in node.bases} <= PLAIN_BASES | HOOKS
