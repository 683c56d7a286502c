"""Python files, read as text: literals that are assigned, and literal keywords of calls; nothing is run."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from memplan.errors import InvalidFileError
from memplan.importer.sources.given_keys import Expression, GivenKeys
from memplan.importer.sources.python_settings import LONGEST, called_name, parameters, settings, shown


def python_keys(text: str, name: str) -> GivenKeys:
    """Return the keywords of a file's calls as ``function.keyword``, of several calls the first's, and the literals of its assignments.

    A keyword that is no literal, nor a name that has one there, is an :class:`Expression`.

    Raises:
        InvalidFileError: It is not Python, or nested more deeply than Python itself can follow.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _keys(*_tree(text), name)
    except SyntaxError as error:
        raise InvalidFileError([f"{name}:{error.lineno or 1}: not Python: {error.msg}"]) from None
    except (ValueError, RecursionError, MemoryError):
        raise InvalidFileError([f"{name}:1: not Python that can be read"]) from None


def _keys(tree: ast.Module, nodes: Sequence[ast.AST], name: str) -> GivenKeys:
    names = _Names(tree, nodes)
    data: dict[str, Any] = {key: value for key, (_, value) in names.last().items() if not isinstance(value, Expression)}
    lines: dict[tuple[str | int, ...], int] = {(key,): names.last()[key][0] for key in data}
    calls, absent = [], []
    for node in sorted(_calls(tree), key=lambda call: (call.lineno, call.col_offset)):
        called = called_name(node.func) if isinstance(node, ast.Call) else called_name(node)
        if isinstance(node, ast.Call) and called not in calls:  # a later one loads what was trained, or trains again
            unread = _keywords(called, node, names, data, lines)
            absent += [f"what {text} gives {called} in {name}:{node.lineno}" for text in unread]
        calls.append(called)
    for called, key, given, line, inside in names.changed:
        known = data.get(called)
        if isinstance(known, dict):
            value = _literal(given, names, line)
            either = inside and known.get(key) != value
            known[key] = Expression(f"{known.get(key, 'unset')} or {value}"[:LONGEST]) if either else value
            lines[called, key] = line
    words = tuple(call for call in calls if call)
    return GivenKeys(name, data, lines, "python", words, environment=_environment(nodes), absent=tuple(absent))


def _calls(tree: ast.Module) -> Iterator[ast.Call | ast.Attribute]:
    """Yield the calls of a file, and where it sets ``requires_grad``, but for those below ``if False:``."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        freezes = isinstance(node, ast.Attribute) and node.attr == "requires_grad" and isinstance(node.ctx, ast.Store)
        if isinstance(node, ast.Call) or freezes:
            yield node  # type: ignore[misc]
        match node:
            case ast.If(ast.Constant(value), _, otherwise) if not value:
                nodes += otherwise
            case _:
                nodes += ast.iter_child_nodes(node)


def _environment(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Return the variables that a file sets as ``os.environ["NAME"] = "..."``."""
    variables: dict[str, str] = {}
    for node in nodes:
        match node:
            case ast.Assign([ast.Subscript(of, ast.Constant(name))], ast.Constant(value)):
                if ast.unparse(of) == "os.environ":
                    variables[str(name)] = str(value)
    return variables


class _Names:
    """What names are given, one assignment after the other."""

    def __init__(self, tree: ast.Module, nodes: Sequence[ast.AST]) -> None:
        self.given: dict[str, list[tuple[int, Any]]] = {}
        self.settings, self.defaults = settings(nodes), parameters(nodes)
        self.changed: list[tuple[str, str, ast.expr, int, bool]] = []
        self.made: dict[str, str] = {}
        for node, inside in _statements(tree.body, self, inside=False):
            self._note_change(node, inside)
            if isinstance(node, ast.Expr):
                continue
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                value = _literal(node.value, self, node.lineno)
            else:
                value = Expression(ast.unparse(node)[:LONGEST])
            targets: list[ast.AST] = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]  # type: ignore[assignment]
            for target in targets:
                for named in ast.walk(target):
                    if isinstance(named, ast.Name) and isinstance(named.ctx, ast.Store):
                        whole = isinstance(target, ast.Name)
                        self._set(named.id, node.lineno, value if whole else Expression(named.id), inside)

    def _note_change(self, node: ast.stmt, inside: bool) -> None:
        """Note what is made of a class of settings, and what its instance is given afterwards."""
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(function)) if called_name(function).endswith(SETTINGS):
                self.made[name] = called_name(function)
            case ast.Assign([ast.Attribute(ast.Name(name), key)], value) if name in self.made:
                self.changed.append((self.made[name], key, value, node.lineno, inside))
            case ast.Expr(ast.Call(ast.Name("setattr"), [ast.Name(name), ast.Constant(key), value])) if (
                name in self.made
            ):
                self.changed.append((self.made[name], str(key), value, node.lineno, inside))

    def _set(self, name: str, line: int, value: Any, inside: bool) -> None:
        """Note an assignment; of one that may not happen, the value is known where the name has it already, or no other."""
        earlier = self.given.setdefault(name, [])
        if inside and earlier and earlier[-1][1] != value:
            value = Expression(name)
        earlier.append((line, value))

    def at(self, name: str, line: int) -> Any:
        """Return what a name is at a line."""
        values = [value for set_at, value in self.given.get(name, ()) if set_at < line]
        return values[-1] if values else Expression(name)

    def default(self, name: str, line: int) -> Any:
        """Return what an argument of a function is by default, where no statement gives the name anything."""
        value = None if name in self.given else self.defaults.get(name)
        return Expression(name) if value is None else _literal(value, self, line)

    def last(self) -> dict[str, tuple[int, Any]]:
        """Return what names are in the end, and where they were given it."""
        return {name: values[-1] for name, values in self.given.items()}


def _statements(body: Sequence[ast.stmt], names: _Names, *, inside: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield statements that may set names, in their order, each with whether it stands inside a branch, loop or function.

    A branch whose condition is known, as those that ask for the GPU's compute capability are, is taken, and the other is not.
    """
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.Expr):
            yield node, inside
        test = _literal(node.test, names, node.lineno) if isinstance(node, ast.If) else None
        taken = isinstance(test, bool)
        for part in ("body", "orelse", "finalbody"):
            below = getattr(node, part, None)
            if isinstance(below, list) and not (taken and (part == "body") is not test):
                plain = taken or isinstance(node, ast.With | ast.Try)
                yield from _statements(below, names, inside=inside or not plain)


_MAGIC = re.compile(r"^([ \t]*)[!%].*$", re.MULTILINE)
"""Lines of a notebook's cells that IPython runs, such as ``!pip install unsloth`` and ``%%capture``."""


def _tree(text: str) -> tuple[ast.Module, Sequence[ast.AST]]:
    """Return the parsed file, of a notebook's cells without IPython's own lines, and all its nodes, which take long to walk."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        plain = _MAGIC.sub(r"\1pass", text)
        if plain == text:
            raise
        tree = ast.parse(plain)
    nodes = [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value.bit_length() > MOST_BITS:
            raise SyntaxError("a number of thousands of digits", (None, node.lineno, None, None))
    return tree, nodes


MOST_BITS = 4_096
"""Of a whole number: Python refuses to write one of 4,300 digits out, which those in base 16 and 2 may have."""
VARIABLES = ("os_getenv", "environ_get", "os_environ_get")
"""Functions that return a variable of the environment, or their second argument where it is not set."""
FIRST = "0"
"""The keyword of what is given first, without one."""


def _keywords(
    called: str, node: ast.Call, names: _Names, data: dict[str, Any], lines: dict[tuple[str | int, ...], int]
) -> list[str]:
    """Take up the keywords of a call; return the mappings among them that settings may hold and nobody can tell."""
    given = [
        (keyword.arg, _literal(keyword.value, names, node.lineno), keyword.value.lineno) for keyword in node.keywords
    ]
    if called.endswith(("_from_pretrained", "Trainer")) and node.args:  # a model is often named without a keyword
        given.append((FIRST, _literal(node.args[0], names, node.lineno), node.lineno))
    unread = []
    for name, value, line in given if called else ():
        inner = data.setdefault(called, {})
        if not isinstance(inner, dict):
            continue
        if name is not None:
            inner[name], lines[called, name] = value, line
        elif isinstance(value, dict):
            inner.update(value)
        elif called.endswith(SETTINGS):
            unread.append(f"**{value}")
    return unread


SETTINGS = ("Config", "Arguments", "Trainer", "_from_pretrained", "_get_peft_model")
"""Ends of the names of what settings are given to."""


def _literal(node: ast.expr, names: _Names, line: int) -> Any:
    """Return a literal's value, or that of a name that was given one; else the expression."""
    try:
        return _value(node, names, line)
    except (ValueError, SyntaxError, TypeError, OverflowError, RecursionError, MemoryError):
        return Expression(shown(node))


def _value(node: ast.expr, names: _Names, line: int) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.at(node.id, line) if node.id in names.given else names.default(node.id, line)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr
    if isinstance(node, ast.Attribute) and (default := names.settings.get(shown(node))) is not None:
        return _value(default, names, line)
    if isinstance(node, ast.Subscript):
        values, key = _value(node.value, names, line), _value(node.slice, names, line)
        return values[key] if isinstance(values, dict) and key in values else Expression(shown(node))
    if isinstance(node, ast.Call) and len(node.args) == 2 and called_name(node.func).endswith(VARIABLES):
        return _value(node.args[1], names, line)
    if isinstance(node, ast.Call) and len(node.args) == 1 and called_name(node.func) in CONVERTED:
        value = _value(node.args[0], names, line)
        return value if isinstance(value, Expression) else CONVERTED[called_name(node.func)](value)
    if isinstance(node, ast.Call) and called_name(node.func).endswith(YES):
        return True
    if isinstance(node, ast.Call) and called_name(node.func) == "getattr" and len(node.args) == 2:  # of torch, a dtype
        return _value(node.args[1], names, line) if shown(node.args[0]) == "torch" else Expression(shown(node))
    if isinstance(node, ast.Compare) and "get_device_capability" in shown(node.left):
        return _is_capable(node)
    if isinstance(node, ast.BoolOp):
        parts = [_value(part, names, line) for part in node.values]
        known = all(isinstance(part, bool) for part in parts)
        return (all if isinstance(node.op, ast.And) else any)(parts) if known else Expression(shown(node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = _value(node.operand, names, line)
        return Expression(shown(node)) if isinstance(value, Expression) else not value
    if isinstance(node, ast.IfExp):
        test = _value(node.test, names, line)
        return (
            Expression(shown(node))
            if isinstance(test, Expression)
            else _value(node.body if test else node.orelse, names, line)
        )
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(item, names, line) for item in node.elts]
        return Expression(shown(node)) if any(isinstance(item, Expression) for item in items) else items
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {key.value: _literal(value, names, line) for key, value in pairs if isinstance(key, ast.Constant)}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add | ast.Sub | ast.FloorDiv):
        return _computed(node, _value(node.left, names, line), _value(node.right, names, line))
    return ast.literal_eval(node)


CONVERTED: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}
"""Conversions of a literal, such as that of a variable of the environment, which is text."""
YES = ("is_bfloat16_supported", "is_bf16_supported", "cuda_is_available")
"""Questions that a GPU of compute capability 8.0 and above answers with yes, as memplan takes it where a trainer asks."""


def _is_capable(node: ast.Compare) -> Any:
    """Return whether such a GPU's compute capability is at least what a program compares its first number with."""
    least = node.comparators[0]
    asks = isinstance(node.ops[0], ast.GtE) and isinstance(least, ast.Constant) and shown(node.left).endswith("[0]")
    return True if asks and isinstance(least, ast.Constant) and least.value in (7, 8) else Expression(shown(node))


def _computed(node: ast.BinOp, left: Any, right: Any) -> Any:
    """Return what whole numbers come to; nothing else is computed."""
    if type(left) is not int or type(right) is not int or max(abs(left), abs(right)) > 2**40:
        return Expression(shown(node))
    if isinstance(node.op, ast.FloorDiv):
        return left // right if right else Expression(shown(node))
    return (
        left * right
        if isinstance(node.op, ast.Mult)
        else left + right
        if isinstance(node.op, ast.Add)
        else left - right
    )
