"""Reports format plans and never make them: every module of theirs is imported with the planner absent."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import memplan.report

ROOT = Path(memplan.report.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = [".".join(("memplan.report", *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES]
PLANNERS = ("memplan.plan.planner", "memplan.plan.suggested.suggestions", "memplan.step.instants", "memplan.solver")
"""What computes plans."""

SCRIPT = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({PLANNERS!r}):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name.removesuffix(".__init__"))
"""


def test_every_report_is_imported_with_the_planner_absent():
    result = subprocess.run([sys.executable, "-c", SCRIPT, *MODULES], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert len(MODULES) > 30


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that are imported anywhere below a node, functions included, but not for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom):
            yield child.module or ""
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        else:
            yield from imported(child)


def test_a_report_imports_no_step_no_solver_and_no_planner():
    refused = (*PLANNERS, "memplan.step", "memplan.plan.memory_plan", "memplan.plan.sizes.largest_model")
    modules = [(path, name) for path in FILES for name in imported(ast.parse(path.read_text(encoding="utf-8")))]
    assert [(path, name) for path, name in modules if name.startswith(refused)] == []
