"""What compiles a step is functions over values: its classes are values, enumerations and protocols, and inherit nothing else."""

import ast
from pathlib import Path

import memplan.step
from tests.sources import nodes

FILES = sorted(Path(memplan.step.__file__).parent.rglob("*.py"))
PLAIN_BASES = {"IntEnum", "NamedTuple", "Protocol"}


def test_classes_are_values_and_enumerations():
    bases = [
        (path.stem, ast.unparse(base)) for path in FILES for one in nodes(path, ast.ClassDef) for base in one.bases
    ]
    assert [(stem, base) for stem, base in bases if base not in PLAIN_BASES] == []
