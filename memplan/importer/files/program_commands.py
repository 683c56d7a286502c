"""Commands that a program in Python starts, by ``subprocess`` or as a job of SageMaker's, as a shell script would have them; none is run."""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from memplan.catalog.catalog import data_directory
from memplan.catalog.shipped_tables import ShippedTables
from memplan.errors import InvalidFileError
from memplan.importer.files.script_commands import script_commands
from memplan.importer.python.python_literals import Names, calls_of
from memplan.importer.python.python_settings import called_name, nodes_of
from memplan.importer.python.python_values import Files, literal
from memplan.importer.sources.argument_vectors import CommandLine
from memplan.importer.sources.given_keys import Expression

_CALLED = re.compile(r"(?:^|_)(?:run|call|check_call|check_output|Popen|system|execvp|run_cmd|run_command|execute)$")
"""Functions whose first argument is a command: those of ``subprocess`` and ``os``, and a program's own of such names."""
STARTS = re.compile(r"subprocess|\bos\b|Popen|sagemaker|run_cmd|run_command|execute")
"""What a text holds that starts a command; one without is not looked through."""
_SPLITS = ("split", "shlex_split")
_UNKNOWN = re.compile(r"\$\{(\w+)\}")
"""What stands for a word that nobody can tell."""
ESTIMATORS = ("HuggingFace", "PyTorch")
"""Classes of SageMaker's that start a program with hyperparameters as its flags (sagemaker/huggingface/estimator.py, 2.x)."""


def program_commands(
    text: str, name: str, files: Files, environment: Mapping[str, str] | None
) -> tuple[CommandLine, ...]:
    """Return the commands that a program starts; words that nobody can tell are variables that nobody sets.

    Args:
        text: The program.
        name: What messages call it.
        files: What stands in a file beside it.
        environment: Variables that it has.

    Raises:
        InvalidFileError: A command is none that a shell can read.
    """
    tree, names = calls_of(text, name, files, environment)
    lines = [f"export {key}={shlex.quote(value)};" for key, value in names.environment.items() if key.isidentifier()]
    script, at = " ".join(lines), 1
    calls = (node for node in nodes_of(tree) if isinstance(node, ast.Call))
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        command = _estimated(call, names) or _started(call, names, tree)
        if command:
            script += "\n" * max(call.lineno - at, 1 if at > 1 else 0) + command.replace("\n", " ")
            at = max(call.lineno, at + 1)
    unknown = " ".join(sorted(set(_UNKNOWN.findall(script)) - names.environment.keys()))
    try:
        return script_commands(f"read {unknown};{script}\n" if unknown else f"{script}\n", name) if script else ()
    except InvalidFileError:
        return ()


def _started(call: ast.Call, names: Names, tree: ast.Module) -> str:
    """Return the command that a call starts, or nothing."""
    if not call.args or not _CALLED.search(called_name(call.func)):
        return ""
    given = list(_words(call.args[0], names, call.lineno, tree))
    return " ".join(given) if len(given) > 1 or " " in "".join(given) else ""


def _words(node: ast.expr, names: Names, line: int, tree: ast.Module) -> Iterator[str]:
    """Yield the words of a command, quoted as a shell has them; a text alone as it is."""
    if isinstance(node, ast.List | ast.Tuple):
        for item in node.elts:
            inner = item.value if isinstance(item, ast.Starred) else item
            value = literal(inner, names, line)
            listed = value if isinstance(value, list) else [value]
            yield from (_variable(one) if isinstance(one, Expression) else shlex.quote(str(one)) for one in listed)
        return
    if isinstance(node, ast.Call) and called_name(node.func).endswith(_SPLITS):
        node = (
            node.args[0] if called_name(node.func) == "shlex_split" and node.args else getattr(node.func, "value", node)
        )
    value = literal(node, names, line)
    if isinstance(value, list):
        yield from (shlex.quote(str(one)) for one in value)
    elif isinstance(value, str) and not isinstance(value, Expression):
        yield value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(_part(part, names, line) for part in node.values)
    elif isinstance(node, ast.Name) and (made := _only_value(node.id, tree)) is not None:
        yield from _words(made, names, made.lineno, tree)


def _part(node: ast.expr, names: Names, line: int) -> str:
    value = literal(node.value if isinstance(node, ast.FormattedValue) else node, names, line)
    return _variable(value).strip('"') if isinstance(value, Expression) else str(value)


def _variable(value: Expression) -> str:
    return '"${' + (re.sub(r"\W+", "_", value).strip("_")[:40] or "unknown") + '}"'


def _only_value(name: str, tree: ast.Module) -> ast.expr | None:
    """Return the only list or text that a name is ever given, which nothing adds to."""
    values: list[ast.expr] = []
    for node in nodes_of(tree):
        match node:
            case ast.Assign([ast.Name(one)], value) if one == name:
                values.append(value)
            case ast.AugAssign(ast.Name(one)) if one == name:
                return None
            case ast.Attribute(ast.Name(one), "append" | "extend" | "insert" | "remove" | "pop") if one == name:
                return None
    return values[0] if len(values) == 1 and isinstance(values[0], ast.List | ast.JoinedStr) else None


def _estimated(call: ast.Call, names: Names) -> str:
    """Return the command that SageMaker starts for an estimator: its program, with hyperparameters as flags."""
    given = {one.arg: literal(one.value, names, call.lineno) for one in call.keywords if one.arg}
    flags, program = given.get("hyperparameters"), given.get("entry_point")
    if called_name(call.func) not in ESTIMATORS or not isinstance(flags, dict) or not isinstance(program, str):
        return ""
    folder = given.get("source_dir")
    path = program if not isinstance(folder, str) or isinstance(folder, Expression) else f"{folder}/{program}"
    instance = ShippedTables(data_directory()).instance(str(given.get("instance_type", "")).removeprefix("ml."))
    launcher = ["python"]
    if given.get("distribution"):
        count = _variable(Expression("instance_type")) if instance is None else instance[1]
        launcher = ["torchrun", f"--nproc_per_node={count}", f"--nnodes={given.get('instance_count', 1)}"]
    elif instance is not None and instance[1] > 1:
        launcher = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(instance[1])))}", "python"]
    pairs = [[f"--{key}", _flag(value)] for key, value in flags.items() if value is not None and value != ""]
    return " ".join([*launcher, shlex.quote(path), *(word for pair in pairs for word in pair)])


def _flag(value: Any) -> str:
    return _variable(value) if isinstance(value, Expression) else shlex.quote(str(value))
