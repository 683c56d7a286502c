"""What a program in Python takes from elsewhere: flags, classes of settings, attributes and arguments, each by its default."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

PARSED = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", "parse_args_and_config")
"""Methods that return a program's flags: argparse's, and those of the parsers of transformers and TRL."""
LONGEST = 60
"""Letters of an expression that a message shows."""
OPTIONS = ("Option", "Argument", "option")
"""Functions of typer and click whose default is that of an argument."""


def settings(tree: ast.Module, flags: Mapping[str, Any]) -> dict[str, ast.expr]:
    """Return ``args.key`` -> its default, of a program's flags and of classes that hold settings; none of one that has two.

    Flags are arguments of ``add_argument``, whose results ``parse_args`` returns; a class holds what its body assigns, by
    itself or as the default of a ``field``.

    Args:
        flags: What a command gives the program, over those defaults.
    """
    defaults: list[tuple[str, ast.expr]] = []
    classes: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called_name(node.func).endswith("add_argument"):
            defaults += _flag(node)
        elif isinstance(node, ast.Call) and called_name(node.func).partition("DEFINE_")[1] and len(node.args) > 1:
            defaults.append((str(getattr(node.args[0], "value", "")), node.args[1]))
            classes.add("FLAGS")
        elif isinstance(node, ast.ClassDef):
            classes.add(node.name)
            for part in node.body:
                name = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", None)
                value = _default(getattr(part, "value", None))
                defaults += [(name.id, value)] if isinstance(name, ast.Name) and value is not None else []
    holders, own = _holders(tree, classes)
    for node in ast.walk(tree):  # what is changed afterwards has two values
        match node:
            case ast.Assign([ast.Attribute(ast.Name(holder), name)], value) if holder in holders:
                defaults.append((name, value))
    texts: dict[str, set[str]] = {}
    for name, value in defaults:
        texts.setdefault(name, set()).add(shown(value))
    single = {name: value for name, value in defaults if len(texts[name]) == 1}
    single |= {name: ast.Constant(value) for name, value in flags.items() if isinstance(value, str | int | float)}
    return {f"{holder}.{name}": value for holder in holders for name, value in single.items()} | own | _attributes(tree)


def _holders(tree: ast.Module, classes: set[str]) -> tuple[set[str], dict[str, ast.expr]]:
    """Return names that hold settings: those classes, what is made of them, or parsed, and arguments that are given one.

    And what an instance is given when it is made, as ``name.key``.
    """
    holders, own = set(classes), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (made := _source(node.value, classes)):
            names = {shown(part) for target in node.targets for part in getattr(target, "elts", [target])}
            holders |= names
            own |= {f"{name}.{one.arg}": one.value for name in names for one in made.keywords if one.arg}
    functions = {
        name: [part.arg for part in (*node.args.posonlyargs, *node.args.args)] for node, name in _functions(tree)
    }
    for _ in range(4):  # as far as they are handed on
        before = len(holders)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (names := functions.get(ast.unparse(node.func).rpartition(".")[2])):
                plain = names[1:] if names[:1] == ["self"] else names
                pairs = [*zip(plain, node.args, strict=False), *((one.arg, one.value) for one in node.keywords)]
                holders |= {str(name) for name, value in pairs if name and shown(value) in holders}
            elif isinstance(node, ast.Assign) and shown(node.value) in holders:
                holders |= {shown(target) for target in node.targets}
            elif isinstance(node, ast.arg) and node.annotation is not None and shown(node.annotation) in classes:
                holders.add(node.arg)
        if len(holders) == before:
            break
    return holders, own


def _attributes(tree: ast.Module) -> dict[str, ast.expr]:
    """Return ``self.key`` -> what methods give it, where they give it one thing alone."""
    given: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and shown(target.value) == "self":
                given.setdefault(shown(target), []).append(getattr(node, "value", None) or target)
    return {name: values[0] for name, values in given.items() if len({shown(value) for value in values}) == 1}


def _source(node: ast.expr, classes: set[str]) -> ast.Call | None:
    """Return the call that returns a program's flags, or makes an instance of a class of its own; None of any other value."""
    node = node.value if isinstance(node, ast.Subscript) else node
    if not isinstance(node, ast.Call):
        return None
    called = called_name(node.func)
    return node if called.endswith(PARSED) or (called in classes and not node.args) else None


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
    """Return what a class's body assigns; of a ``field``, or of an option, its default."""
    if not isinstance(node, ast.Call) or not called_name(node.func).endswith(("field", "Field", *OPTIONS)):
        return node
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    made = given.get("default_factory")
    first = node.args[0] if node.args and not called_name(node.func).endswith("option") else None
    return made.body if isinstance(made, ast.Lambda) else given.get("default", first)


def parameters(tree: ast.Module) -> dict[str, ast.expr]:
    """Return arguments of functions -> what all calls give them, or their defaults, where that is one thing alone."""
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.setdefault(ast.unparse(node.func).rpartition(".")[2], []).append(node)
    given: dict[str, list[ast.expr | None]] = {}
    for function, name in _functions(tree):
        taken = function.args
        plain = [*taken.posonlyargs, *taken.args]
        values = [None] * (len(plain) - len(taken.defaults)) + taken.defaults
        defaults = {one.arg: value for one, value in zip(plain, values, strict=True)}
        defaults |= {one.arg: value for one, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True)}
        defaults = {one: value and _default(value) for one, value in defaults.items()} | _options(function)
        own = [one.arg for one in plain if one.arg not in ("self", "cls")]
        passed = [_passed(call, own) for call in calls.get(name, ())] or [{}]
        for one, default in defaults.items():
            given.setdefault(one, []).extend(
                None if "*" in by_name else by_name.get(one, default) for by_name in passed
            )
    known = {}
    for one, several in given.items():
        others = [value for value in several if value is None or shown(value) != one]  # handed on under the same name
        if others and others[0] is not None and len({value and shown(value) for value in others}) == 1:
            known[one] = others[0]
    return known


def _options(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return what click's decorators say that arguments are by default."""
    flags = [flag for call in function.decorator_list if isinstance(call, ast.Call) and called_name(call.func).endswith("option") for flag in _flag(call)]  # fmt: skip
    return dict(flags)


def _functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield the functions of a file with the name under which each is called: one that makes instances has its class's."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    makers = {one: node.name for node in classes for one in node.body if getattr(one, "name", "") == "__init__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, makers.get(node, node.name)


def _passed(call: ast.Call, names: list[str]) -> dict[str, ast.expr]:
    """Return the arguments that a call gives, and ``*`` where it gives some that nobody can tell."""
    unpacked = next((one for one in call.args if isinstance(one, ast.Starred)), None)
    plain = {"*": unpacked} if unpacked else dict(zip(names, call.args, strict=False))
    return {**plain, **{one.arg or "*": one.value for one in call.keywords}}


def called_name(function: ast.expr) -> str:
    """Return the last two parts of a called function's name, such as ``FastLanguageModel.from_pretrained``; of a class its own name."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.append(function.id)
    return "_".join(reversed(parts[: 1 if parts and parts[0][:1].isupper() else 2]))


def shown(node: ast.expr) -> str:
    """Return an expression as a message shows it."""
    try:
        return ast.unparse(node)[:LONGEST]
    except (RecursionError, MemoryError):
        return "an expression"
