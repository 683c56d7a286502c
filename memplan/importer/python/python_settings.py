"""What a program in Python takes from elsewhere: flags, classes of settings, attributes and arguments, each by its default."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

FROM_FILES = ("parse_args_and_config", "parse_yaml_file", "parse_json_file")
"""Those of them that read a file of keys."""
PARSED = ("parse_args", "parse_known_args", "parse_args_into_dataclasses", *FROM_FILES)
"""Methods that return a program's flags: argparse's, and those of the parsers of transformers and TRL."""
ARGV = "sys.argv"
"""Where Python has a command's words; those that are no flags are named so among the flags."""
LONGEST = 60
"""Letters of an expression that a message shows."""
OPTIONS = ("Option", "Argument", "option")
"""Functions of typer and click whose default is that of an argument."""


@lru_cache(maxsize=2)
def nodes_of(tree: ast.Module) -> Sequence[ast.AST]:
    """Return all nodes of a file, level by level, as ``ast.walk`` does: of a long list a walk takes a second."""
    return tuple(ast.walk(tree))


class Settings:
    """What a program's flags and classes of settings are by default, under the names that hold them."""

    def __init__(self, tree: ast.Module, flags: Mapping[str, Any]) -> None:
        """Read a file.

        Args:
            tree: The file.
            flags: What a command gives the program, over its own defaults.
        """
        self.by_class: dict[str, dict[str, ast.expr]] = {}
        self.order: dict[str, list[str]] = {}  # Class -> its fields, as its own arguments are
        self.holders: dict[str, str] = {}  # Name -> the class that it is of, or nothing for a program's flags
        self.own = _attributes(tree)  # ``name.key`` -> what an instance alone is given
        nodes = nodes_of(tree)
        flags = by_argument(nodes, flags)
        defaults = [pair for node in nodes for pair in self._defaults(node)]
        self.holders |= dict.fromkeys(self.by_class, "") | {name: name for name in self.by_class}
        self._follow(nodes)
        for node in nodes:  # what is changed afterwards has two values
            match node:
                case ast.Assign([ast.Attribute(ast.Name(holder), name)], value) if holder in self.holders:
                    defaults.append((name, value))
                    self.by_class.get(self.holders[holder], {}).pop(name, None)
        texts: dict[str, set[str]] = {}
        for name, value in defaults:
            texts.setdefault(name, set()).add(shown(value))
        self.single = {name: value for name, value in defaults if len(texts[name]) == 1}
        given = {name: _constant(value) for name, value in flags.items() if isinstance(value, str | int | float)}
        self.single |= given
        for fields in self.by_class.values():
            fields |= {name: value for name, value in given.items() if name in fields}

    def get(self, path: str, default: ast.expr | None = None) -> ast.expr | None:
        """Return the default of ``args.key``, of which a program's flags and its classes have one alone."""
        holder, _, name = path.rpartition(".")
        if holder.endswith(tuple(f"{one}()" for one in PARSED)):
            return self.single.get(name, default)
        if path in self.own or holder not in self.holders:
            return self.own.get(path) or self._inner(holder, name) or default
        return self.by_class.get(self.holders[holder], {}).get(name) or self.single.get(name, default)

    def _inner(self, path: str, name: str) -> ast.expr | None:
        """Return a field of an instance that is itself a field, as ``cfg.lora.r`` is."""
        made = self.get(path) if "." in path else None
        if not isinstance(made, ast.Call) or (of := called_name(made.func)) not in self.by_class:
            return None
        given = _passed(made, self.order[of])
        return given.get(name) or self.by_class[of].get(name)

    def fields(self, holder: str) -> dict[str, ast.expr]:
        """Return all that a name holds."""
        if holder.endswith(tuple(f".{method}()" for method in PARSED)):  # vars(parser.parse_args())
            return self.single
        if holder not in self.holders:
            return {}
        return self.by_class.get(self.holders[holder]) or self.single

    def _defaults(self, node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
        """Yield the flags and fields that a node declares with their defaults."""
        if isinstance(node, ast.Call) and called_name(node.func).endswith("add_argument"):
            yield from _flag(node)
        elif isinstance(node, ast.Call) and "DEFINE_" in called_name(node.func) and len(node.args) > 1:
            self.holders["FLAGS"] = ""
            yield str(getattr(node.args[0], "value", "")), node.args[1]
        elif isinstance(node, ast.ClassDef):
            fields = self.by_class.setdefault(node.name, {})
            self.order[node.name] = [shown(part.target) for part in node.body if isinstance(part, ast.AnnAssign)]
            for part in node.body:
                name = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", None)
                value = _default(getattr(part, "value", None))
                if isinstance(name, ast.Name) and value is not None:
                    fields[name.id] = value
                    yield name.id, value

    def _follow(self, nodes: Sequence[ast.AST]) -> None:
        """Note the names that hold settings: what is made of those classes, or parsed, and arguments that are given one."""
        makers = self._makers(nodes)
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        functions = {name: node for node, name in _functions(nodes)}
        for node in assigned:
            if made := self._made(node.value, makers):
                names = [shown(part) for target in node.targets for part in getattr(target, "elts", [target])]
                called = called_name(made.func)
                of = makers.get(called, called if called in self.by_class else "")
                self.holders |= dict.fromkeys(names, of)
                given = [
                    *zip(self.order.get(of, ()), made.args, strict=False),
                    *((one.arg, one.value) for one in made.keywords),
                ]
                self.own |= {f"{name}.{key}": value for name in names for key, value in given if key}
        for one in nodes:
            if (
                isinstance(one, ast.arg)
                and one.annotation is not None
                and (of := shown(one.annotation)) in self.by_class
            ):
                self.holders[one.arg] = of
        pairs = [pair for node in functions.values() for pair in _defaulted(node)]
        pairs += [(shown(target), node.value) for node in assigned for target in node.targets if isinstance(node.value, ast.Name | ast.Attribute)]  # fmt: skip
        for call in calls:
            if (function := functions.get(last_part(call.func))) is not None:
                plain = [part.arg for part in (*function.args.posonlyargs, *function.args.args) if part.arg != "self"]
                pairs += [*zip(plain, call.args, strict=False), *((one.arg or "", one.value) for one in call.keywords)]
        texts = [(name, shown(value), value) for name, value in pairs if name]
        for _ in range(4):  # as far as they are handed on
            before = len(self.holders)
            for name, text, value in texts:
                if name not in self.holders and text in self.holders:
                    self.holders[name] = self.holders[text]
                elif (
                    name not in self.holders
                    and isinstance(value, ast.Call)
                    and called_name(value.func) in self.by_class
                ):
                    self.holders[name] = called_name(value.func)
            if len(self.holders) == before:
                return

    def _makers(self, nodes: Sequence[ast.AST]) -> dict[str, str]:
        """Return functions that return a program's flags, or an instance of a class of its own -> that class, or nothing."""
        makers: dict[str, str] = {}
        for node in (one for one in nodes if isinstance(one, ast.FunctionDef)):
            made: dict[str, ast.Call] = {}
            for part in ast.walk(node):
                if isinstance(part, ast.Assign) and (call := self._made(part.value, {})):
                    made |= {shown(target): call for target in part.targets}
            returned = [
                part.value for part in ast.walk(node) if isinstance(part, ast.Return) and part.value is not None
            ]
            for value in returned:
                if call := self._made(value, {}) or made.get(shown(value)):
                    called = called_name(call.func)
                    makers[node.name] = called if called in self.by_class else ""
        return makers

    def _made(self, node: ast.expr, makers: Mapping[str, str]) -> ast.Call | None:
        """Return the call that returns a program's flags, or makes an instance of a class of its own; None of any other value."""
        node = node.value if isinstance(node, ast.Subscript) else node
        if not isinstance(node, ast.Call):
            return None
        called = called_name(node.func)
        own = called in self.by_class and all(one.arg for one in node.keywords)  # what it unpacks may be anything
        return node if called.endswith(PARSED) or called in makers or own else None


def _defaulted(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of a function that have a default."""
    taken = function.args
    yield from ((one.arg, value) for one, value in zip(reversed(taken.args), reversed(taken.defaults), strict=False))
    yield from ((one.arg, value) for one, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if value)


def _attributes(tree: ast.Module) -> dict[str, ast.expr]:
    """Return ``self.key`` -> what methods give it, where they give it one thing alone."""
    given: dict[str, list[ast.expr]] = {}
    for node in nodes_of(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and shown(target.value) == "self":
                given.setdefault(shown(target), []).append(getattr(node, "value", None) or target)
    return {name: values[0] for name, values in given.items() if len({shown(value) for value in values}) == 1}


def _constant(value: Any) -> ast.Constant:
    return ast.Constant(value, lineno=1, col_offset=0)


def _flag(node: ast.Call) -> list[tuple[str, ast.expr]]:
    """Return the name under which an argument is stored, and its default."""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    name = _stored_name(node)
    switch = shown(given["action"]) if "action" in given else ""
    off = {"'store_true'": _constant(False), "'store_false'": _constant(True)}.get(switch)
    value = given.get("default", off)
    return [(name, value)] if value is not None and name else []


def by_argument(nodes: Sequence[ast.AST], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a command gives a program under the names that its parser stores them by: ``-r 8`` may be ``rank``.

    Args:
        flags: Values by their names with underscores, those of one letter with their dash.
    """
    stored: dict[str, tuple[str, bool | None]] = {}
    placed: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Call) and called_name(node.func).endswith(("add_argument", "option")) and node.args:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            names = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
            named, switch = _stored_name(node), shown(given["action"]) if "action" in given else ""
            placed += [named] if not any(text.startswith("-") for text in names) else []
            for text in names:
                on, _, off = text.partition("/")  # click's pair
                plain = on if len(on) == 2 else on.lstrip("-").replace("-", "_")
                stored[plain] = (named, False if "store_false" in switch else None)
                other = off.strip().lstrip("-").replace("-", "_") or (
                    f"no_{plain}" if "BooleanOptional" in switch else ""
                )
                stored |= {other: (named, False)} if other else {}
    places = {name: stored.get(name, (name, None)) for name in flags}
    words = dict(zip(placed, flags.get(ARGV, ())[1:], strict=False))
    return words | {named: flags[name] if fixed is None else fixed for name, (named, fixed) in places.items()}


def _stored_name(node: ast.Call) -> str:
    """Return the name under which an argument is stored."""
    names = [str(one.value).partition("/")[0] for one in node.args if isinstance(one, ast.Constant)]
    bare = next((name for name in names if not name.startswith("-")), "")  # what click calls the argument besides
    long = bare or next((name for name in names if name.startswith("--")), names[0] if names else "")
    named = {keyword.arg: keyword.value for keyword in node.keywords}.get("dest")
    return str(named.value) if isinstance(named, ast.Constant) else long.lstrip("-").replace("-", "_")


def _default(node: ast.expr | None) -> ast.expr | None:
    """Return what a class's body assigns; of a ``field``, or of an option, its default."""
    if not isinstance(node, ast.Call) or not called_name(node.func).endswith(("field", "Field", *OPTIONS)):
        return node
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    made = given.get("default_factory")
    first = node.args[0] if node.args and not called_name(node.func).endswith("option") else None
    if isinstance(made, ast.Name | ast.Attribute):
        return ast.Call(made, [], [], lineno=node.lineno, col_offset=node.col_offset)
    return made.body if isinstance(made, ast.Lambda) else given.get("default", first)


def parameters(tree: ast.Module, flags: Mapping[str, Any]) -> dict[str, ast.expr]:
    """Return arguments of functions -> what all calls give them, or their defaults, where that is one thing alone.

    Args:
        flags: What a command gives the program, and with it functions that it does not call itself, as fire's and typer's.
    """
    stated: dict[str, ast.expr] = {name: _constant(value) for name, value in by_argument(nodes_of(tree), flags).items()}
    calls: dict[str, list[ast.Call]] = {}
    methods: set[ast.AST] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            calls.setdefault(last_part(node.func), []).append(node)
        elif isinstance(node, ast.ClassDef):
            methods.update(node.body)
    given: dict[str, list[ast.expr | None]] = {}
    for function, name in _functions(nodes_of(tree)):
        taken = function.args
        plain = [*taken.posonlyargs, *taken.args]
        values = [None] * (len(plain) - len(taken.defaults)) + taken.defaults
        pairs = [*zip(plain, values, strict=True), *zip(taken.kwonlyargs, taken.kw_defaults, strict=True)]
        defaults = {one.arg: value and _default(value) for one, value in pairs}
        defaults.update(_options(function))
        own = [one.arg for one in plain if one.arg not in ("self", "cls")]
        called = [call for call in calls.get(name, ()) if function in methods or isinstance(call.func, ast.Name)]
        called = [call for call in called if call.args or call.keywords or not function.decorator_list]
        passed = [_passed(call, own) for call in called] or [stated]
        for one, default in defaults.items():
            given.setdefault(one, []).extend(
                None if "*" in by_name else by_name.get(one, default) for by_name in passed
            )
    known = {}
    for one, several in given.items():
        others = [value for value in several if value is None or shown(value) != one]  # handed on under the same name
        if others and others[0] is not None and len({value and shown(value) for value in others}) == 1:
            known[one] = others[0]
        elif not others and several and several[-1] is not None:
            known[one] = several[-1]
    return known


def _options(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Return what click's decorators say that arguments are by default."""
    flags = [flag for call in function.decorator_list if isinstance(call, ast.Call) and called_name(call.func).endswith("option") for flag in _flag(call)]  # fmt: skip
    return dict(flags)


def _functions(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield the functions of a file with the name under which each is called: one that makes instances has its class's."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    makers = {one: node.name for node in classes for one in node.body if getattr(one, "name", "") == "__init__"}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield node, makers.get(node, node.name)


def last_part(function: ast.expr) -> str:
    """Return the last part of a called function's name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


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
