"""What lies beside a program and is its own: modules that it imports, put in front of it, and the file that Hydra gives it."""

import ast
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from memplan.errors import InvalidFileError
from memplan.importer.python.python_classes import LIBRARIES
from memplan.importer.python.python_settings import called_name, nodes_of
from memplan.importer.sources.given_keys import GivenKeys
from memplan.importer.sources.included_files import interpolated, merged

MOST_MODULES, MOST_LETTERS = 10, 2**18
"""Modules of a program that are read, those that they import with them, and letters of them together."""
APART = 1_000_000
"""Lines between a module's and those behind it; no file that is read has as many."""
Tree = Callable[[str], ast.Module]
"""A file's text -> what stands in it."""


def with_modules(tree: ast.Module, files: Callable[[str], Any], parsed: Tree) -> tuple[ast.Module, dict[str, int]]:
    """Return a program with the modules beside it in front, whose lines are below 1, and names of modules -> where each ends.

    Args:
        files: What stands in a file beside the program: of Python its text.
        parsed: What parses it.
    """
    modules: dict[str, ast.Module] = {}
    aliases: dict[str, str] = {}
    renamed: dict[str, str] = {}
    waiting, left = [tree], MOST_LETTERS
    while waiting and len(modules) < MOST_MODULES:
        for module, names, others in _imported(waiting.pop(0)):
            path = module.replace(".", "/")
            text = None if module in modules else files(f"{path}.py") or files(f"{path}/__init__.py")
            if isinstance(text, str) and (left := left - len(text)) > 0 and (inner := _parsed(text, parsed)):
                modules[module] = inner
                waiting.append(inner)
            aliases |= dict.fromkeys(names, module)
            renamed |= others if module in modules else {}
    body = [_same(name, other) for name, other in renamed.items()]
    ends = {module: (1 - 2 * place) * APART // 2 for place, module in enumerate(modules, 1)}
    for place, inner in enumerate(modules.values(), 1):
        for node in nodes_of(inner):
            if isinstance(node, ast.expr | ast.stmt | ast.arg | ast.keyword | ast.excepthandler):
                node.lineno -= place * APART
        body = [*inner.body, *body]
    own = {name: ends[of] for name, of in aliases.items() if of in ends}
    return ast.Module([*body, *tree.body], []) if modules else tree, own


def _parsed(text: str, parsed: Tree) -> ast.Module | None:
    try:
        return parsed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the program is read without it
        return None


def _same(name: str, other: str) -> ast.stmt:
    """Return the statement that gives a name what another has."""
    return ast.increment_lineno(ast.parse(f"{name} = {other}"), -1).body[0]


def _imported(tree: ast.Module) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """Yield the modules that a file imports, of no library that is read, with names that stand for each and for what is in it."""
    several: list[tuple[str, list[str], dict[str, str]]]
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            several = [(one.name, [one.asname or one.name], {}) for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = f"{node.module}." if node.module else ""
            several = [(f"{above}{one.name}", [one.asname or one.name], {}) for one in node.names if one.name != "*"]
            renamed = {one.asname: one.name for one in node.names if one.asname}
            several = [(node.module, [], renamed), *several] if node.module else several
        else:
            continue
        yield from (one for one in several if one[0].partition(".")[0] not in LIBRARIES)


def configured(tree: ast.Module, files: Callable[[str], Any]) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Yield the arguments that Hydra gives functions, with the line and the keys of the file that it reads for them."""
    for node in (one for one in nodes_of(tree) if isinstance(one, ast.FunctionDef) and one.args.args):
        for call in node.decorator_list:
            if not (isinstance(call, ast.Call) and called_name(call.func) == "hydra_main"):
                continue
            given = {one.arg: getattr(one.value, "value", None) for one in call.keywords}
            folder, name = given.get("config_path"), str(given.get("config_name") or "")
            data = _composed(f"{folder}/" if folder else "", name.removesuffix(".yaml"), files)
            if data is not None:
                with suppress(InvalidFileError):  # references that lead back to themselves
                    yield node.args.args[0].arg, node.lineno, interpolated(GivenKeys(name, data, {})).data


def _composed(folder: str, name: str, files: Callable[[str], Any]) -> Mapping[str, Any] | None:
    """Return the keys of a file with those that its ``defaults`` name in its folder: ``- model: small`` is ``model/small.yaml``."""
    own = files(f"{folder}{name}.yaml")
    if not isinstance(own, Mapping):
        return None
    data: dict[str, Any] = {}
    for one in own.get("defaults") or ():
        for group, chosen in one.items() if isinstance(one, Mapping) else ((None, one),):
            inner = files(f"{folder}{group}/{chosen}.yaml" if group else f"{folder}{chosen}.yaml")
            if isinstance(inner, Mapping):
                data = merged(data, {group: inner} if group else inner)
    return merged(data, {key: value for key, value in own.items() if key != "defaults"})
