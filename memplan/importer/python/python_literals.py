"""Python files, read as text: literals that are assigned, and literal keywords of calls; nothing is run."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from memplan.errors import InvalidFileError
from memplan.importer.python.imported_modules import configured, with_modules
from memplan.importer.python.python_classes import SETTINGS, bases, idle_functions, own_steps, returned_values
from memplan.importer.python.python_settings import (
    ARGV,
    LONGEST,
    Settings,
    by_argument,
    called_name,
    nodes_of,
    parameters,
    shown,
)
from memplan.importer.python.python_statements import first_turn, opened_files, set_variables, statements, trains_in
from memplan.importer.python.python_values import Files, literal, truth_of, value_of
from memplan.importer.python.python_words import CAPABILITY
from memplan.importer.sources.given_keys import Expression, GivenKeys


def _none(path: str) -> None:
    """Return nothing for every file."""


def python_keys(
    text: str,
    name: str,
    flags: Mapping[str, Any] | None = None,
    files: Files = _none,
    environment: Mapping[str, str] | None = None,
) -> GivenKeys:
    """Return the keywords of a file's calls as ``function.keyword``, of several calls the first's, and the literals of its assignments.

    A keyword that is no literal, nor a name that has one there, is an :class:`Expression`.

    Args:
        flags: What a command gives the program, which counts over the defaults of its own flags.
        files: What stands in a file of keys that the program loads, or in a module that it imports.
        environment: Variables that a command gives the program.

    Raises:
        InvalidFileError: It is not Python, or nested more deeply than Python itself can follow.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree, modules = with_modules(_tree(text), files, _tree)
            names = Names(tree, flags or {}, files, environment, modules)
            return _keys(tree, name, Names(tree, flags or {}, files, environment, modules, whole=names))
    except SyntaxError as error:
        raise InvalidFileError([f"{name}:{error.lineno or 1}: not Python: {error.msg}"]) from None
    except (ValueError, RecursionError, MemoryError):
        raise InvalidFileError([f"{name}:1: not Python that can be read"]) from None


def calls_of(text: str, name: str, files: Files, environment: Mapping[str, str] | None) -> tuple[ast.Module, Names]:
    """Return a file with its modules, and what its names are given, as :func:`python_keys` reads it.

    Raises:
        InvalidFileError: It is not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree, modules = with_modules(_tree(text), files, _tree)
            return tree, Names(tree, {}, files, environment, modules)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidFileError([f"{name}:1: not Python that can be read"]) from None


def _keys(tree: ast.Module, name: str, names: Names) -> GivenKeys:
    data: dict[str, Any] = {key: value for key, (_, value) in names.last().items() if not isinstance(value, Expression)}
    lines: dict[tuple[str | int, ...], int] = {(key,): names.last()[key][0] for key in data}
    for key, node in names.settings.single.items():  # how long rows are may be said by a flag alone
        if key.lower() in LENGTHS and isinstance(value := literal(node, names, node.lineno), int):
            data.setdefault(key, value)
            lines.setdefault((key,), node.lineno)
    calls: dict[str, None] = {}
    words, absent = [], []
    classes = bases(tree)
    for node in sorted(_calls(tree, names), key=lambda call: (call.lineno, call.col_offset)):
        called = called_name(node.func) if isinstance(node, ast.Call) else called_name(node)
        called = classes.get(called, called)
        if isinstance(node, ast.Call) and called not in calls:  # a later one loads what was trained, or trains again
            unread = _keywords(called, node, names, data, lines)
            absent += [f"what {text} gives {called} in {name}:{max(node.lineno, 1)}" for text in unread]
        if isinstance(node, ast.Call) and any(keyword.arg == "truncation" for keyword in node.keywords):
            _keywords(TOKENIZER, node, names, data, lines)
        calls[called] = None
        words.append(called)
    for called, key, given, line, inside in names.changed:
        known = data.get(called)
        if isinstance(known, dict):
            value = literal(given, names, line)
            either = inside and known.get(key) != value
            known[key] = Expression(f"{known.get(key, 'unset')} or {value}"[:LONGEST]) if either else value
            lines[called, key] = line
    words = [*(call for call in words if call), *_parsed_classes(tree, classes, names, data, lines)]
    taken = (node for node, *_ in statements(tree.body, names, inside=False, scope=""))
    absent += own_steps(tree, classes, words, taken)
    lines = {path: max(line, 1) for path, line in lines.items()}  # those of modules are below
    noted = tuple((one, value, f"the first of {count} in {name}:{line}") for one, value, count, line in names.turns)
    return GivenKeys(
        name, data, lines, "python", tuple(words), environment=names.environment, absent=tuple(absent), noted=noted
    )


LENGTHS = ("max_length", "max_seq_length", "max_seq_len", "max_len", "cutoff_len", "block_size", "model_max_length", "context_length", "seq_length", "seq_len")  # fmt: skip
"""Names of variables and arguments for how many tokens a program cuts its texts to, where it tokenizes them itself."""
TOKENIZER = "tokenizer"
"""What a call is named whose keywords cut texts to a length, whatever the name of its object is."""


def _parsed_classes(
    tree: ast.Module, classes: Mapping[str, str], names: Names, data: dict[str, Any], lines: dict[Any, int]
) -> Iterator[str]:
    """Yield classes of settings that transformers' parser makes of flags, with the defaults that a file's own gives them."""
    own = {
        node.name: {
            part.target.id
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }
        for node in nodes_of(tree)
        if isinstance(node, ast.ClassDef)
    }
    for node in nodes_of(tree):
        if not (isinstance(node, ast.Call) and called_name(node.func).endswith(("HfArgumentParser", "TrlParser"))):
            continue
        for part in [inner for given in node.args for inner in getattr(given, "elts", [given])]:
            given = called_name(part)
            called = classes.get(given, given)
            if not called.endswith(SETTINGS[:2]) or called in data:
                continue
            fields = names.settings.fields(given)
            of_class = own.get(given, set())
            others = set().union(*own.values()) - of_class
            data[called] = {key: literal(value, names, node.lineno) for key, value in fields.items() if key in of_class}
            data[called] |= {key: value for key, value in names.flags.items() if key not in (*others, ARGV)}
            lines |= {(called, key): getattr(fields.get(key), "lineno", 1) for key in data[called]}
            yield called


def _calls(tree: ast.Module, names: Names) -> Iterator[ast.Call | ast.Attribute]:
    """Yield the calls of a file, and where it sets ``requires_grad``, but for branches that are not taken and functions that are not called."""
    idle = idle_functions(tree)
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        freezes = isinstance(node, ast.Attribute) and node.attr == "requires_grad" and isinstance(node.ctx, ast.Store)
        if isinstance(node, ast.Call) or freezes:
            yield node  # type: ignore[misc]
        if isinstance(node, ast.If | ast.IfExp) and (test := truth_of(node.test, names, node.lineno)) is not None:
            parts = node.body if test else node.orelse
            nodes += [node.test, *(parts if isinstance(parts, list) else [parts])]
        elif node not in idle:
            nodes += ast.iter_child_nodes(node)


class Names:
    """What names are given, one assignment after the other."""

    def __init__(
        self,
        tree: ast.Module,
        flags: Mapping[str, Any],
        files: Files = _none,
        environment: Mapping[str, str] | None = None,
        modules: Mapping[str, int] | None = None,
        values: Mapping[str, Any] | None = None,
        whole: Names | None = None,
    ) -> None:
        """Read a file, with what :func:`python_keys` is given, where modules end, what names are before it, and the file as it was read once."""
        self.whole = whole or self
        self.opened = opened_files(tree)
        self.files = files
        self.given: dict[str, list[tuple[int, Any]]] = {name: [(0, value)] for name, value in (values or {}).items()}
        self.settings, self.defaults = Settings(tree, flags), parameters(tree, flags)
        self.returns: Mapping[str, ast.expr] = returned_values(tree, self.settings)
        self.environment = {**(environment or {}), **set_variables(tree)}
        self.modules = modules or {}
        self.changed: list[tuple[str, str, ast.expr, int, bool]] = []
        self.made: dict[str, str] = {}
        self.flags: Mapping[str, Any] = by_argument(nodes_of(tree), flags)
        self.steps, self.scope = 0, ""
        self.turns: list[tuple[str, str, int, int]] = []  # Loops that train: name, first value, turns and line
        self.scopes: dict[str, str] = {}  # Name -> the function that gave it something last
        self.given |= {name: [(line, values)] for name, line, values in configured(tree, files)}
        for node, inside, scope in statements(tree.body, self, inside=False, scope=""):
            self.scope = scope
            self._note_change(node, inside)
            if isinstance(node, ast.Expr):
                continue
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                value = literal(node.value, self, node.lineno)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                before = ast.Name(node.target.id, ast.Load())
                value = literal(ast.BinOp(before, node.op, node.value), self, node.lineno)
            elif isinstance(node, ast.For):
                value, count = first_turn(node.iter, self, node.lineno)
                if count > 1 and trains_in(node):
                    self.turns.append((shown(node.target), str(value)[:LONGEST], count, node.lineno))
            else:
                value = Expression(ast.unparse(node)[:LONGEST])
            targets: list[ast.AST] = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]  # type: ignore[assignment]
            for target in targets:
                self._assign(target, value, node.lineno, inside)

    def _assign(self, target: ast.AST, value: Any, line: int, inside: bool) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, line, value, inside)
            return
        parts = list(target.elts) if isinstance(target, ast.Tuple | ast.List) else []
        if isinstance(value, list) and len(value) == len(parts):
            for part, one in zip(parts, value, strict=True):
                self._assign(part, one, line, inside)
            return
        for place, named in enumerate(ast.walk(target)):
            if isinstance(named, ast.Name) and isinstance(named.ctx, ast.Store):
                capable = "get_device_capability" in str(value) and place == 1
                self._set(named.id, line, CAPABILITY if capable else Expression(named.id), inside)

    def _note_change(self, node: ast.stmt, inside: bool) -> None:
        """Note what is made of a class of settings, what its instance is given afterwards, and what a mapping is."""
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(function)) if called_name(function).endswith(INSTANCES):
                self.made[name] = called_name(function)
            case ast.Assign([ast.Attribute(ast.Name(name), key)], value) if name in self.made:
                self.changed.append((self.made[name], key, value, node.lineno, inside))
            case ast.Expr(ast.Call(ast.Name("setattr"), [ast.Name(name), ast.Constant(key), value])) if (
                name in self.made
            ):
                self.changed.append((self.made[name], str(key), value, node.lineno, inside))
            case ast.Assign([ast.Subscript(ast.Name(name), ast.Constant(key))], value):
                self._add(name, {key: literal(value, self, node.lineno)}, node.lineno, inside)
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "update"), values, keywords)):
                added = literal(ast.Call(ast.Name("dict", ast.Load()), values, keywords), self, node.lineno)
                if isinstance(added, dict):
                    self._add(name, added, node.lineno, inside)
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append" | "extend" as how), [item])):
                known, one = self.at(name, node.lineno), literal(item, self, node.lineno)
                further = [one] if how == "append" else one
                if isinstance(known, list) and isinstance(further, list):
                    self._set(name, node.lineno, [*known, *further], inside)
                elif isinstance(known, list):
                    self._set(name, node.lineno, Expression(shown(node.value)), inside)

    def _add(self, name: str, added: dict[Any, Any], line: int, inside: bool) -> None:
        """Note keys that a mapping is given after it is made; of those that may not be, another value is not known."""
        known = self.at(name, line)
        if isinstance(known, dict):
            unsure = {key: Expression(f"{key} or not") if inside and known.get(key) != value else value for key, value in added.items()}  # fmt: skip
            self.given[name].append((line, known | unsure))

    def _set(self, name: str, line: int, value: Any, inside: bool) -> None:
        """Note an assignment; of one that may not happen, the value is known where the name has it already, or no other."""
        earlier = self.given.setdefault(name, [])
        inside = inside or (self.scope != "" and self.scopes.get(name) != self.scope)
        self.scopes[name] = self.scope
        if inside and earlier and earlier[-1][1] != value:
            value = Expression(name)
        earlier.append((line, value))

    def file_of(self, node: ast.expr) -> ast.expr:
        """Return the call that opened the file which a name stands for where it is read, or else the expression itself."""
        name = shown(node)
        opened = [call for one, call in self.opened if one == name and call.lineno <= node.lineno]
        return opened[-1] if opened else node

    def at(self, name: str, line: int) -> Any:
        """Return what a name is at a line; where no statement gives it anything, what an argument of a function is by default."""
        values = [value for set_at, value in self.given.get(name, ()) if set_at < line]
        default = self.defaults.get(name) or self.settings.single.get(name)
        if values or default is None:
            return values[-1] if values else Expression(name)
        if (
            shown(default) == name
        ):  # handed on under its own name: what it is, where that is one thing in the whole file
            known = [] if self.whole is self else [value for _, value in self.whole.given.get(name, ())]
            return known[0] if known and all(value == known[0] for value in known) else Expression(name)
        if name in self.given and self.whole is self:
            return Expression(name)
        return value_of(default, self.whole, max(line, default.lineno))

    def last(self) -> dict[str, tuple[int, Any]]:
        """Return what names are in the end, and where they were given it."""
        return {name: values[-1] for name, values in self.given.items()}


_MAGIC = re.compile(r"^([ \t]*)[!%].*$", re.MULTILINE)
"""Lines of a notebook's cells that IPython runs, such as ``!pip install unsloth`` and ``%%capture``."""


def _tree(text: str) -> ast.Module:
    """Return the parsed file; where it is a notebook's cells, without IPython's own lines."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        plain = _MAGIC.sub(r"\1pass", text)
        if plain == text:
            raise
        tree = ast.parse(plain)
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value.bit_length() > MOST_BITS:
            raise SyntaxError("a number of thousands of digits", (None, node.lineno, None, None))
    return tree


MOST_BITS = 4_096
"""Of a whole number: Python refuses to write one of 4,300 digits out, which those in base 16 and 2 may have."""
INSTANCES = (*SETTINGS[:2], SETTINGS[-1])
"""Ends of the names of classes whose instances are given settings as attributes too."""
FIRST = "0"
"""The keyword of what is given first, without one."""
PLACED = ("_from_pretrained", "Trainer", "get_peft_model", "run_exp", "DictDefault", "_sdp", "SentenceTransformer")
"""Ends of the names of calls whose first arguments count without a keyword."""


def _keywords(
    called: str, node: ast.Call, names: Names, data: dict[str, Any], lines: dict[tuple[str | int, ...], int]
) -> list[str]:
    """Take up the keywords of a call; return the mappings among them that settings may hold and nobody can tell."""
    given = [
        (keyword.arg, literal(keyword.value, names, node.lineno), keyword.value.lineno) for keyword in node.keywords
    ]
    if called.endswith(PLACED) and node.args:  # a model is often named without a keyword
        placed = enumerate(node.args[:2])
        given += [(str(place), literal(part, names, node.lineno), node.lineno) for place, part in placed]
    unread = []
    for name, value, line in given if called else ():
        inner = data.setdefault(called, {})
        if not isinstance(inner, dict):
            continue
        if name is not None:
            inner[name], lines[called, name] = value, line
        elif isinstance(value, dict):
            inner.update(value)
        elif called.endswith(SETTINGS) and not (called.endswith("Trainer") and "data" in str(value)):
            unread.append(f"**{value}")
    return unread
