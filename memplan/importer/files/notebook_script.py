"""What the cells of a notebook tell a shell, as one script: lines that begin with ``!``, cells of a shell, files that cells write."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memplan.importer.python.python_literals import Names
from memplan.importer.python.python_values import literal
from memplan.importer.sources.given_keys import Expression

END = "END_OF_THE_FILE"
_LINE = re.compile(r"^[ \t]*!((?:.*\\\n)*.*)$", re.MULTILINE)
_SHELL = re.compile(r"\s*%%(?:bash|sh|shell|script +\w+)[^\n]*\n(.*)", re.DOTALL)
_FILE = re.compile(r"\s*%%(?:writefile|file) +(-a +)?([^\s]+)[ \t]*\n(.*)", re.DOTALL)
_FILLED = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
CONFIGURED = "DictDefault"
"""The class of axolotl's configuration, which its notebooks give to ``axolotl.train.train`` (axolotl 0.19: utils/dict.py)."""


def notebook_script(cells: Sequence[tuple[int, str]], values: Mapping[str, Any]) -> tuple[str, list[int]]:
    """Return a script of a notebook's cells, and for each of its lines the cell that it comes from.

    A configuration that a cell dumps as JSON or YAML is a here-document; one of axolotl's own class is too, with the command
    that trains by it.

    Args:
        cells: The cells of code with their numbers.
        values: Literals that the notebook's Python assigns; what ``{NAME}`` of a line for the shell stands for.
    """
    lines: list[str] = []
    numbers: list[int] = []
    for number, text in cells:
        for part in _parts(text, values):
            lines += (added := part.splitlines())
            numbers += [number] * len(added)
    return "\n".join(lines) + "\n", numbers


def _parts(text: str, values: Mapping[str, Any]) -> Iterator[str]:
    if shell := _SHELL.match(text):
        yield shell[1]
    elif file := _FILE.match(text):
        yield _document(file[2], file[3], ">>" if file[1] else ">")
    else:
        python = _LINE.sub("", re.sub(r"^[ \t]*[%?].*$", "", text, flags=re.MULTILINE))
        yield from _dumps(python, values)
        for line in _LINE.findall(text):
            yield _FILLED.sub(lambda match: _filled(match[1], values), line)


def _filled(name: str, values: Mapping[str, Any]) -> str:
    """Return what stands for ``{name}``: its literal, or a variable that nobody sets."""
    value = values.get(name)
    return f"${name}" if value is None or isinstance(value, Mapping | list) else str(value)


def _document(path: str, text: str, sign: str = ">") -> str:
    return f"cat {sign} '{path}' <<'{END}'\n{text.rstrip()}\n{END}\n"


def _dumps(python: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files that a cell's Python writes, and what axolotl's class is given."""
    try:
        tree = ast.parse(python)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    names = Names(tree, {}, values=values)
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.Call)):
        called = ast.unparse(node.func).rpartition(".")[2]
        if called == CONFIGURED and (given := _value(node, names)):
            yield f"{_document('config.yaml', json.dumps(given))}axolotl train config.yaml\n"
        elif called in ("dump", "safe_dump", "write") and len(node.args) >= 1 + (called != "write"):
            content, file = node.args[0], node.args[-1] if called != "write" else node.func.value  # type: ignore[attr-defined]
            target = names.file_of(file)
            path = _value(target.args[0], names) if isinstance(target, ast.Call) and target.args else None
            written = _value(content, names)
            if isinstance(path, str) and isinstance(written, dict | str):
                yield _document(path, written if isinstance(written, str) else json.dumps(written))


def _value(node: ast.expr | None, names: Names) -> Any:
    """Return what an expression is, of which a shell could not tell either what nobody can."""
    return None if node is None else _unknown(literal(node, names, node.lineno))


def _unknown(value: Any) -> Any:
    if isinstance(value, Expression):
        return f"${{{value}}}" if value.isidentifier() else f"$({value})"
    if isinstance(value, dict):
        return {key: _unknown(item) for key, item in value.items()}
    return [_unknown(item) for item in value] if isinstance(value, list) else value
