"""What a program in Python takes from elsewhere: flags, classes of settings, attributes and arguments, each by its default."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

PARSED = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
"""Methods that return a program's flags: argparse's, and transformers' ``HfArgumentParser``'s."""
LONGEST = 60
"""Letters of an expression that a message shows."""


def settings(nodes: Sequence[ast.AST]) -> dict[str, ast.expr]:
    """Return ``args.key`` -> its default, of a program's flags and of classes that hold settings; none of one that has two.

    Flags are arguments of ``add_argument``, whose results ``parse_args`` returns; a class holds what its body assigns, by
    itself or as the default of a ``field``.

    Args:
        nodes: All of a file's, level by level.
    """
    defaults: list[tuple[str, ast.expr]] = []
    holders: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and called_name(node.func).endswith("add_argument"):
            defaults += _flag(node)
        elif isinstance(node, ast.ClassDef):
            holders.add(node.name)
            for part in node.body:
                name = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", None)
                value = _default(getattr(part, "value", None))
                defaults += [(name.id, value)] if isinstance(name, ast.Name) and value is not None else []
    for node in nodes:
        if isinstance(node, ast.Assign) and _source(node.value, holders):
            holders |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    for node in nodes:  # what is changed afterwards has two values
        match node:
            case ast.Assign([ast.Attribute(ast.Name(holder), name)], value) if holder in holders:
                defaults.append((name, value))
    texts = {name: {shown(value) for other, value in defaults if other == name} for name, _ in defaults}
    known = {f"{holder}.{name}": value for holder in holders for name, value in defaults if len(texts[name]) == 1}
    return known | _attributes(nodes)


def _attributes(nodes: Sequence[ast.AST]) -> dict[str, ast.expr]:
    """Return ``self.key`` -> what methods give it, where they give it one thing alone."""
    given: dict[str, list[ast.expr]] = {}
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and shown(target.value) == "self":
                given.setdefault(shown(target), []).append(getattr(node, "value", None) or target)
    return {name: values[0] for name, values in given.items() if len({shown(value) for value in values}) == 1}


def _source(node: ast.expr, classes: Collection[str]) -> bool:
    """Tell whether a value is a program's flags, or an instance of a class that is made without arguments."""
    node = node.value if isinstance(node, ast.Subscript) else node
    if not isinstance(node, ast.Call):
        return False
    called = called_name(node.func)
    return called.endswith(PARSED) or (called in classes and not node.args and not node.keywords)


def _flag(node: ast.Call) -> list[tuple[str, ast.expr]]:
    """Return the name under which an argument is stored, and its default."""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    names = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
    long = next((name for name in names if name.startswith("--")), names[0] if names else "")
    named = given.get("dest")
    name = str(named.value) if isinstance(named, ast.Constant) else long.lstrip("-").replace("-", "_")
    switch = shown(given["action"]) if "action" in given else ""
    off = {"'store_true'": ast.Constant(False), "'store_false'": ast.Constant(True)}.get(switch)
    value = given.get("default", off)
    return [(name, value)] if value is not None and name else []


def _default(node: ast.expr | None) -> ast.expr | None:
    """Return what a class's body assigns, of a ``field`` its default."""
    if isinstance(node, ast.Call) and called_name(node.func).endswith("field"):
        return next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
    return node


def parameters(nodes: Sequence[ast.AST]) -> dict[str, ast.expr]:
    """Return arguments of functions -> their defaults, where all functions that have one agree and no call gives another."""
    calls: dict[str, list[ast.Call]] = {}
    for node in nodes:
        if isinstance(node, ast.Call):
            calls.setdefault(ast.unparse(node.func).rpartition(".")[2], []).append(node)
    defaults: list[tuple[str, ast.expr | None]] = []
    for function, name in _functions(nodes):
        given = function.args
        plain = [*given.posonlyargs, *given.args]
        own = [one.arg for one in plain if one.arg not in ("self", "cls")]
        passed = {one for call in calls.get(name, ()) for one in _passed(call, own)}
        values = [None] * (len(plain) - len(given.defaults)) + given.defaults
        pairs = zip([*plain, *given.kwonlyargs], [*values, *given.kw_defaults], strict=True)
        defaults += [(one.arg, None if {one.arg, "*"} & passed else value) for one, value in pairs]
    texts = {name: {value and shown(value) for other, value in defaults if other == name} for name, _ in defaults}
    return {name: value for name, value in defaults if value is not None and len(texts[name]) == 1}


def _functions(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield the functions of a file with the name under which each is called: one that makes instances has its class's."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    makers = {one: node.name for node in classes for one in node.body if getattr(one, "name", "") == "__init__"}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield node, makers.get(node, node.name)


def _passed(call: ast.Call, names: list[str]) -> Iterator[str]:
    """Yield the arguments that a call gives, and ``*`` where it gives some that nobody can tell."""
    unpacked = any(isinstance(one, ast.Starred) for one in call.args)
    yield from ("*",) if unpacked else names[: len(call.args)]
    yield from (one.arg or "*" for one in call.keywords)


def called_name(function: ast.expr) -> str:
    """Return the last two parts of a called function's name, such as ``FastLanguageModel.from_pretrained``."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.append(function.id)
    return "_".join(reversed(parts[:2])) if parts else ""


def shown(node: ast.expr) -> str:
    """Return an expression as a message shows it."""
    try:
        return ast.unparse(node)[:LONGEST]
    except (RecursionError, MemoryError):
        return "an expression"
