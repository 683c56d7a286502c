"""Conditions that are asked only in order to raise an error, ``if (x < 0).any(): raise ...``, or to have converged."""

from __future__ import annotations

import ast
import linecache
from functools import cache
from types import FrameType

_SEARCHES = "/torch/optim/lbfgs.py"
"""Where torch leaves a loop, or returns, when it has converged."""


def harmless_answer(frame: FrameType | None) -> bool | None:
    """Return the answer by which the condition that a frame asks raises nothing, or nothing where it decides something else.

    A search of torch's own (L-BFGS) goes on by it until it has taken the iterations that it may.
    """
    return None if frame is None else _answer(frame.f_code.co_filename, frame.f_lineno)


@cache
def _answer(file: str, line: int) -> bool | None:
    for node in _checks(file):
        if node.test.lineno <= line <= (node.test.end_lineno or 0):
            return isinstance(node, ast.Assert) is not isinstance(node.test, ast.UnaryOp)
    return None


@cache
def _checks(file: str) -> tuple[ast.If | ast.Assert, ...]:
    """Return the assertions of a file, and the conditions behind which an error is raised and nothing else done."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    ends = (ast.Raise, ast.Break, ast.Return) if file.endswith(_SEARCHES) else ast.Raise
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Assert)]
    return tuple(node for node in nodes if isinstance(node, ast.Assert) or isinstance(node.body[-1], ends))
