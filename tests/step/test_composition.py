"""What compiles a step is functions over values: its classes are values, enumerations and protocols, and inherit nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import memplan.step

FILES = sorted(Path(memplan.step.__file__).parent.rglob("*.py"))
PLAIN_BASES = {"IntEnum", "NamedTuple", "Protocol"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_classes_are_values_and_enumerations(path):
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    assert {ast.unparse(base) for node in classes for base in node.bases} <= PLAIN_BASES
