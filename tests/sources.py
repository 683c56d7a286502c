"""Modules of the package as trees, each parsed and walked once for all tests that read them."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)


@cache
def _by_kind(path: Path) -> dict[type[ast.AST], list[ast.AST]]:
    kinds: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        kinds[type(node)].append(node)
        for value in vars(node).values():
            if isinstance(value, list):
                todo += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                todo.append(value)
    return kinds


def nodes(path: Path, kind: type[Node]) -> list[Node]:
    """Return every node of a kind in a module, in no order."""
    return _by_kind(path).get(kind, [])
