"""Statements of a Python file that give names values, in their order; loops are followed in their first turn."""

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from memplan.importer.python.python_settings import LONGEST, called_name, nodes_of, shown
from memplan.importer.python.python_values import Known, literal, truth_of
from memplan.importer.sources.given_keys import Expression


def set_variables(tree: ast.Module) -> dict[str, str]:
    """Return the variables that a file sets as ``os.environ["NAME"] = "..."``."""
    variables: dict[str, str] = {}
    for node in nodes_of(tree):
        match node:
            case ast.Assign([ast.Subscript(of, ast.Constant(name))], ast.Constant(value)):
                if ast.unparse(of) == "os.environ":
                    variables[str(name)] = str(value)
    return variables


def opened_files(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    """Return names of open files with the calls that opened them, in the order of their lines."""
    items = [item for node in nodes_of(tree) if isinstance(node, ast.With) for item in node.items]
    pairs = [(shown(one.optional_vars), one.context_expr) for one in items if one.optional_vars is not None]
    return sorted(((name, call) for name, call in pairs if isinstance(call, ast.Call)), key=lambda pair: pair[1].lineno)


def statements(
    body: Sequence[ast.stmt], names: Known, *, inside: bool, scope: str
) -> Iterator[tuple[ast.stmt, bool, str]]:
    """Yield statements that may set names, in their order, each with whether it stands inside a branch or loop, and its function.

    A branch whose condition is known, as those that ask for the GPU's compute capability are, is taken, and the other is not.
    """
    for node in body:
        if isinstance(node, ast.ClassDef):  # what a class holds are settings
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            yield from statements(methods, names, inside=inside, scope=scope)
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.Expr):
            yield node, inside, scope
        test = truth_of(node.test, names, node.lineno) if isinstance(node, ast.If) else None
        taken = test is not None
        own = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in ("body", "orelse", "finalbody"):
            below = getattr(node, part, None)
            if isinstance(below, list) and not (taken and (part == "body") is not test):
                plain = taken or own or isinstance(node, ast.With | ast.Try)
                name = f"{scope}.{node.name}:{node.lineno}" if own else scope  # type: ignore[attr-defined]
                yield from statements(below, names, inside=not own and (inside or not plain), scope=name)


TURNS = ("enumerate", "zip", "range", "product", "itertools_product", "tqdm")
"""Functions whose results a loop goes over."""
MOST_TURNS = 1_000_000


def _first_number(numbers: Sequence[Any]) -> tuple[int, int] | None:
    """Return the first of ``range(*numbers)`` and how many there are; None where that is nothing, an error, or more than any loop's."""
    if not all(type(one) is int for one in numbers):
        return None
    with suppress(TypeError, ValueError, OverflowError):
        turns = range(*numbers)
        return (turns[0], len(turns)) if 0 < len(turns) <= MOST_TURNS else None
    return None


def first_turn(node: ast.expr, names: Known, line: int) -> tuple[Any, int]:
    """Return what a loop gives its name in the first turn, and how many turns there are; an :class:`Expression` and 1 where nobody can tell."""
    unknown = Expression(f"for ... in {shown(node)}"[:LONGEST])
    called = called_name(node.func) if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.Call) and called in TURNS and node.args:
        if called == "range":
            numbers = [literal(part, names, line) for part in node.args]
            return _first_number(numbers) or (unknown, 1)
        firsts = [first_turn(part, names, line) for part in node.args[: 1 if called in ("enumerate", "tqdm") else None]]
        counts = [count for _, count in firsts]
        if called == "tqdm":
            return firsts[0]
        if called == "enumerate":
            return [0, firsts[0][0]], counts[0]
        total = 1
        for count in counts:
            total = min(total, count) if called == "zip" and total > 1 else total * count
        return [value for value, _ in firsts], min(total, MOST_TURNS)
    pairs = (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("items", "values")
    )
    values = literal(node.func.value if pairs else node, names, line)  # type: ignore[attr-defined]
    if isinstance(values, dict) and values:
        key, value = next(iter(values.items()))
        inner = value if pairs and node.func.attr == "values" else [key, value]  # type: ignore[attr-defined]
        return (inner if pairs else key), len(values)
    return (values[0], len(values)) if isinstance(values, list) and values else (unknown, 1)


def trains_in(loop: ast.For) -> bool:
    """Tell whether a loop starts a training in each turn."""
    calls = (called_name(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call))
    return any(
        one.endswith(("train", "Trainer", "run_exp", "sft_main", "run", "check_call", "system")) for one in calls
    )
