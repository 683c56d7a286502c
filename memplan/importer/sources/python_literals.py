"""Python files, read as text: literals that are assigned, and literal keywords of calls; nothing is run."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from memplan.errors import InvalidFileError
from memplan.importer.sources.given_keys import GivenKeys


def python_keys(text: str, name: str) -> GivenKeys:
    """Return the keywords of a file's calls as ``function.keyword``, and the literals of its assignments.

    Raises:
        InvalidFileError: It is not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _tree(text)
    except SyntaxError as error:
        raise InvalidFileError([f"{name}:{error.lineno or 1}: not Python: {error.msg}"]) from None
    except (ValueError, RecursionError, MemoryError):
        raise InvalidFileError([f"{name}:1: not Python that can be read"]) from None
    names: dict[str, Any] = {}
    data: dict[str, Any] = {}
    lines: dict[tuple[str | int, ...], int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _literal(node.value, names)
            if value is not _UNKNOWN:
                names[node.targets[0].id] = value
                data[node.targets[0].id], lines[(node.targets[0].id,)] = value, node.lineno
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.append(called := _called(node.func))
            _keywords(called, node, names, data, lines)
    return GivenKeys(name, data, lines, "python", tuple(call for call in calls if call))


_MAGIC = re.compile(r"^([ \t]*)[!%].*$", re.MULTILINE)
"""Lines of a notebook's cells that IPython runs, such as ``!pip install unsloth`` and ``%%capture``."""


def _tree(text: str) -> ast.Module:
    """Return the parsed file; where it is a notebook's cells, without IPython's own lines."""
    try:
        return ast.parse(text)
    except SyntaxError:
        plain = _MAGIC.sub(r"\1pass", text)
        if plain == text:
            raise
        return ast.parse(plain)


_UNKNOWN = object()
FIRST = "0"
"""The keyword of what is given first, without one."""


def _keywords(
    called: str, node: ast.Call, names: dict[str, Any], data: dict[str, Any], lines: dict[tuple[str | int, ...], int]
) -> None:
    given = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None]
    if called.endswith("_from_pretrained"):  # a model is often named without a keyword
        given += [(FIRST, node.args[0])] if node.args else []
    for name, expression in given if called else ():
        value = _literal(expression, names)
        inner = data.setdefault(called, {})
        if value is not _UNKNOWN and isinstance(inner, dict):
            inner[name], lines[called, name] = value, expression.lineno


def _called(function: ast.expr) -> str:
    """Return the last two parts of a called function's name, such as ``FastLanguageModel.from_pretrained``."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.append(function.id)
    return "_".join(reversed(parts[:2])) if parts else ""


def _literal(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return a literal's value, or that of a name that was given one."""
    try:
        return _value(node, names)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return _UNKNOWN


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add | ast.Sub | ast.FloorDiv):
        return _computed(node.op, _value(node.left, names), _value(node.right, names))
    return ast.literal_eval(node)


def _computed(operator: ast.operator, left: Any, right: Any) -> Any:
    """Return what whole numbers come to; nothing else is computed."""
    if type(left) is not int or type(right) is not int or max(abs(left), abs(right)) > 2**40:
        return _UNKNOWN
    if isinstance(operator, ast.FloorDiv):
        return left // right if right else _UNKNOWN
    return (
        left * right
        if isinstance(operator, ast.Mult)
        else left + right
        if isinstance(operator, ast.Add)
        else left - right
    )
