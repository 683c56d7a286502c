"""Whether a script expects to run out of memory: whether a handler of its own, or of accelerate's, would take the error."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType

_LIBRARIES = ("accelerate/utils/memory.py", "lightning/pytorch/tuner/", "pytorch_lightning/tuner/")
"""Whose handlers try again with a smaller batch."""
_CATCHES = frozenset({"OutOfMemoryError", "RuntimeError", "Exception", "BaseException", ""})
"""What takes the error by its class; the empty name is ``except`` without one."""
_MEANS_MEMORY = ("memory", "oom", "batch_size")
"""One of these is in what a handler of more than that one error does about it."""


def is_handled(frame: FrameType | None, is_own: Callable[[str], bool]) -> bool:
    """Tell whether ``torch.OutOfMemoryError``, raised where a frame is now, would be handled and not end the script.

    Args:
        frame: The innermost frame.
        is_own: Whether a file is the script's own.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if (is_own(file) or any(name in file for name in _LIBRARIES)) and _has_handler(file, frame.f_lineno):
            return True
        frame = frame.f_back
    return False


@cache
def _has_handler(file: str, line: int) -> bool:
    return any(
        node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0) and any(map(_handles, node.handlers))
        for node in _attempts(file)
    )


@cache
def _attempts(file: str) -> tuple[ast.Try, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Try))


def _handles(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler takes the error and goes on: one that ends by raising it again only says what happened."""
    names = set(_names(handler.type))
    if not names & _CATCHES or isinstance(handler.body[-1], ast.Raise) or _ends_script(handler.body[-1]):
        return False
    text = " ".join(map(ast.unparse, handler.body)).lower()
    return "OutOfMemoryError" in names or any(word in text for word in _MEANS_MEMORY)


def _names(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.Tuple):
        for item in node.elts:
            yield from _names(item)
    elif node is None:
        yield ""
    else:
        yield ast.unparse(node).rpartition(".")[2]


def _ends_script(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith(("sys.exit(", "exit(", "os._exit("))
