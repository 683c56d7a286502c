"""What an expression of a Python file comes to: literals, names that have one, and what is plainly computed of them; nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Protocol

from memplan.documents.loading import parse_document
from memplan.importer.python.python_paths import PathText, own_path
from memplan.importer.python.python_settings import ARGV, Settings, called_name, shown
from memplan.importer.python.python_words import (
    CAPABILITY,
    COMPARED,
    COMPUTED,
    CONVERTED,
    COUNTED,
    FILTER,
    LARGEST,
    LARGEST_VALUE,
    LOADED,
    MADE,
    MAPPED,
    METHODS,
    MOST_STEPS,
    NO,
    PROCESSES,
    SIGNATURE,
    VARIABLES,
    YES,
    constant_of,
)
from memplan.importer.sources.given_keys import Expression, Loaded

FAILURES = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError, SyntaxError, MemoryError)  # fmt: skip


class Known(Protocol):
    """What names of a file are known to be."""

    settings: Settings  # Flags and classes of settings
    environment: dict[str, str]  # Variables that the file sets, or is given
    modules: Mapping[str, int]  # Name of a module that the file imports -> the line at which that ends
    returns: Mapping[str, ast.expr]  # Function of the file -> what it returns in one place alone
    flags: Mapping[str, Any]  # What a command gives the program
    steps: int  # Expressions that were looked at
    files: Files  # What stands in a file that the program loads

    def file_of(self, node: ast.expr) -> ast.expr:
        """Return the call that opened the file which a name stands for, or else the expression itself."""

    def at(self, name: str, line: int) -> Any:
        """Return what a name is at a line, or an :class:`Expression`."""


Files = Callable[[str], Any]
"""Path of a file of keys that a program loads -> what it holds, or None."""


def literal(node: ast.expr, names: Known, line: int) -> Any:
    """Return a literal's value, or that of a name that was given one; else the expression."""
    try:
        return value_of(node, names, line)
    except FAILURES:
        return Expression(shown(node))


def truth_of(node: ast.expr, names: Known, line: int) -> bool | None:
    """Return whether a condition holds, or None where nobody can tell."""
    match node:
        case ast.UnaryOp(ast.Not(), operand):
            inner = truth_of(operand, names, line)
            return None if inner is None else not inner
        case ast.BoolOp(op, parts):
            decides = isinstance(op, ast.Or)
            results = [truth_of(part, names, line) for part in parts]
            return decides if decides in results else None if None in results else not decides
        case ast.Compare(left, [ast.Is() | ast.IsNot() as sign], [ast.Constant(None)]):
            value = literal(left, names, line)
            if isinstance(value, Expression) and not MADE.match(value):
                return None
            return (value is None) == isinstance(sign, ast.Is)
        case _:
            value = literal(node, names, line)
            if isinstance(value, Expression):
                return True if MADE.match(value) else None
            return bool(value)


def value_of(node: ast.expr, names: Known, line: int) -> Any:
    """Return what an expression comes to, or an :class:`Expression`.

    Raises:
        ValueError: Nobody can tell; and what else computing raises.
    """
    names.steps += 1
    if names.steps > MOST_STEPS:
        raise ValueError(node)
    read = _KINDS.get(type(node))
    value = ast.literal_eval(node) if read is None else read(node, names, line)
    plain = isfinite(value) if isinstance(value, float) else value is None or isinstance(value, str | int | list | dict)
    if not plain or _size(value) > LARGEST_VALUE:
        raise ValueError(node)
    return value


def _size(value: Any) -> int:
    """Return how many letters and items a value has, those of its parts with them; it stops where they are too many."""
    if isinstance(value, str):
        return len(value)
    total = 0
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        total += 1 + _size(part)
        if total > LARGEST_VALUE:
            break
    return total


def _known(node: ast.expr, names: Known, line: int) -> Any:
    """Return what a part of an expression comes to.

    Raises:
        ValueError: Nobody can tell.
    """
    value = value_of(node, names, line)
    if isinstance(value, Expression):
        raise ValueError(value)
    return value


def _attribute(node: ast.Attribute, names: Known, line: int) -> Any:
    if constant := constant_of(shown(node)):
        return constant
    if shown(node) == ARGV:
        return names.flags.get(ARGV, [""])
    if (end := names.modules.get(shown(node.value))) is not None:
        return names.at(node.attr, end)
    if (default := names.settings.get(shown(node))) is not None:
        return value_of(default, names, line)
    return _known(node.value, names, line)[node.attr]


def _subscript(node: ast.Subscript, names: Known, line: int) -> Any:
    if shown(node.value) == "os.environ":
        return names.environment[_known(node.slice, names, line)]
    if called_name(getattr(node.value, "func", node.value)).endswith("get_device_capability"):
        return CAPABILITY
    if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        default = names.settings.get(f"{shown(node.value)}.{node.slice.value}")
        if default is not None:
            return value_of(default, names, line)
    values = _known(node.value, names, line)
    return values[_known(node.slice, names, line)] if isinstance(values, dict | list) else Expression(shown(node))


def _call(node: ast.Call, names: Known, line: int) -> Any:
    called = called_name(node.func)
    if called.endswith(VARIABLES):
        return _variable(node, names, line)
    if called.endswith(COUNTED):
        return int(names.environment.get(PROCESSES, 1))
    if called.endswith((*YES, *NO)):
        return called.endswith(YES)
    if called.endswith(LOADED) and node.args:
        return _loaded(node.args[0], names, line)
    if called in MAPPED:
        return _mapping(node, names, line)
    if called in ("vars", "asdict") and len(node.args) == 1:
        given = names.settings.fields(shown(node.args[0]))
        return {key: literal(value, names, line) for key, value in given.items()} or Expression(shown(node))
    if called == "hasattr" and len(node.args) == 2:
        return True  # of the version that is read
    if called == "getattr":
        return _of_object(node, names, line)
    if called in ("max", "min") and node.args:
        return {"max": max, "min": min}[called](*(_known(part, names, line) for part in node.args))
    if called in CONVERTED and len(node.args) == 1:
        return CONVERTED[called](_known(node.args[0], names, line))
    if called.endswith("path_join"):
        return "/".join(_known(part, names, line) for part in node.args)
    if len(node.args) == 1 and FILTER.search(called) and isinstance(value := value_of(node.args[0], names, line), dict):
        return value
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and len(node.keywords) == 0:
        values = _known(node.func.value, names, line)
        parts = [_known(part, names, line) for part in node.args]
        return (
            getattr(values, node.func.attr)(*parts)
            if isinstance(values, str | dict | list)
            else Expression(shown(node))
        )
    if called.endswith(("ForCausalLM_from_pretrained", "ForSequenceClassification_from_pretrained")):
        given = {keyword.arg: literal(keyword.value, names, line) for keyword in node.keywords if keyword.arg}
        return Loaded(shown(node), given | ({"0": literal(node.args[0], names, line)} if node.args else {}))
    if (returned := names.returns.get(called)) is not None:
        return value_of(returned, names, returned.lineno)
    return Expression(shown(node))


def _loaded(node: ast.expr, names: Known, line: int) -> Any:
    """Return what stands in a text, or in a file that is loaded by its path or by what ``open`` returned for it.

    Raises:
        ValueError: Nobody can tell which it is, or it is not there.
    """
    node = names.file_of(node)
    if isinstance(node, ast.Call):  # open(path), path.open(), path.read_text()
        node = node.args[0] if called_name(node.func) == "open" and node.args else getattr(node.func, "value", node)
    text = str(_known(node, names, line))
    values = parse_document(text, "text").data if "\n" in text else names.files(text)
    if not isinstance(values, dict):
        raise ValueError(node)
    return values


def _variable(node: ast.Call, names: Known, line: int) -> Any:
    """Return what a variable of the environment is: what the file sets, or else its default."""
    name = literal(node.args[0], names, line)
    if name in names.environment:
        return names.environment[name]
    others = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
    return value_of(others[0], names, line) if others else Expression(shown(node))


def _of_object(node: ast.Call, names: Known, line: int) -> Any:
    """Return an attribute that a text names: of torch a dtype, of settings one of theirs, or else the default."""
    key = _known(node.args[1], names, line)
    if shown(node.args[0]) == "torch":
        return key
    default = names.settings.get(f"{shown(node.args[0])}.{key}", node.args[2] if len(node.args) > 2 else None)
    return Expression(shown(node)) if default is None else value_of(default, names, line)


def _mapping(node: ast.Call, names: Known, line: int) -> Any:
    values = dict(_known(node.args[0], names, line)) if node.args else {}
    for keyword in node.keywords:
        if keyword.arg is None:
            values |= _known(keyword.value, names, line)
        else:
            values[keyword.arg] = literal(keyword.value, names, line)
    return values


def _dict(node: ast.Dict, names: Known, line: int) -> Any:
    values: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            values |= _known(value, names, line)
        else:
            values[_known(key, names, line)] = literal(value, names, line)
    return values


def _compare(node: ast.Compare, names: Known, line: int) -> Any:
    """Return whether a comparison holds; a GPU's compute capability is 8.0 or above."""
    left, sign = value_of(node.left, names, line), type(node.ops[0])
    if sign is ast.In and isinstance(left, str) and SIGNATURE.search(shown(node.comparators[0])):
        return True
    right = _known(node.comparators[0], names, line)
    if len(node.ops) > 1 or sign not in COMPARED:
        return Expression(shown(node))
    if left is CAPABILITY and right in (7, 8) and sign in (ast.GtE, ast.Lt):
        return sign is ast.GtE
    return Expression(shown(node)) if isinstance(left, Expression) else COMPARED[sign](left, right)


def _bool_op(node: ast.BoolOp, names: Known, line: int) -> Any:
    """Return what ``and`` and ``or`` come to, of which the first part that decides does."""
    decides = isinstance(node.op, ast.Or)
    value: Any = not decides
    for part in node.values:
        value = _known(part, names, line)
        if bool(value) is decides:
            return value
    return value


def _unary(node: ast.UnaryOp, names: Known, line: int) -> Any:
    value = _known(node.operand, names, line)
    return not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else value


def _choice(node: ast.IfExp, names: Known, line: int) -> Any:
    taken = truth_of(node.test, names, line)
    if taken is None:
        raise ValueError(node)
    return value_of(node.body if taken else node.orelse, names, line)


def _sequence(node: ast.List | ast.Tuple | ast.Set, names: Known, line: int) -> Any:
    items: list[Any] = []
    for item in node.elts:
        if isinstance(item, ast.Starred):
            items += _known(item.value, names, line)
        else:
            items.append(_known(item, names, line))
    return items


def _computed(node: ast.BinOp, names: Known, line: int) -> Any:
    """Return what numbers, texts and lists come to; nothing large is computed."""
    left, right = _known(node.left, names, line), _known(node.right, names, line)
    if isinstance(left, PathText) and isinstance(node.op, ast.Div):
        return left / right
    if isinstance(node.op, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
        return left | right
    numbers = all(type(part) in (int, float) and abs(part) < LARGEST for part in (left, right))
    joined = isinstance(node.op, ast.Add) and type(left) is type(right) and isinstance(left, str | list)
    if type(node.op) not in COMPUTED or not (numbers or joined) or (isinstance(node.op, ast.Pow) and right > 8):
        return Expression(shown(node))
    return COMPUTED[type(node.op)](left, right)


def _joined(node: ast.JoinedStr, names: Known, line: int) -> Any:
    parts = [
        str(_known(part.value if isinstance(part, ast.FormattedValue) else part, names, line)) for part in node.values
    ]
    return "".join(parts)


def _passed_on(node: ast.DictComp, names: Known, line: int) -> Any:
    """Return a mapping of which a comprehension leaves out what a class does not take."""
    of = node.generators[0].iter
    if shown(node.key) + ", " + shown(node.value) != shown(node.generators[0].target).strip("()"):
        raise ValueError(node)
    if not (isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr == "items"):
        raise ValueError(node)
    return {key: value for key, value in _known(of.func.value, names, line).items() if value is not None}


_KINDS: Mapping[type[ast.expr], Callable[[Any, Known, int], Any]] = {
    ast.Name: lambda node, names, line: own_path(node, names.modules) or names.at(node.id, line),
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Call: _call,
    ast.Dict: _dict,
    ast.Compare: _compare,
    ast.BoolOp: _bool_op,
    ast.UnaryOp: _unary,
    ast.IfExp: _choice,
    ast.List: _sequence,
    ast.Tuple: _sequence,
    ast.Set: _sequence,
    ast.BinOp: _computed,
    ast.JoinedStr: _joined,
    ast.DictComp: _passed_on,
}
