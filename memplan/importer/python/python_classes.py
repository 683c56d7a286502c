"""Classes and functions of a Python file: what they are made of, what they do otherwise, what they return, and which nothing calls."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from memplan.importer.python.python_settings import Settings, called_name, last_part, nodes_of, shown

SETTINGS = ("Config", "Arguments", "Trainer", "_from_pretrained", "_get_peft_model", "SentenceTransformer")
"""Ends of the names of what settings are given to."""
LIBRARIES = (
    "transformers",
    "sentence_transformers",
    "trl",
    "peft",
    "unsloth",
    "bitsandbytes",
    "liger_kernel",
    "swift",
    "llamafactory",
    "axolotl",
)
"""Libraries whose classes are read; another module's may have the same names."""


def bases(tree: ast.Module) -> dict[str, str]:
    """Return classes of a file -> what they are made of, as far as that is no class of the file; names that modules give others.

    A class of a module that is no library of those stands under that module's name.
    """
    first: dict[str, str] = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef) and node.bases:
            first[node.name] = called_name(node.bases[0])
        elif isinstance(node, ast.ImportFrom):
            others = (node.module or ".").partition(".")[0] not in LIBRARIES
            for one in node.names:
                if others and one.name.endswith(SETTINGS[:3]) and one.name not in first:
                    first[one.asname or one.name] = f"{node.module}:{one.name}"
                elif not others:
                    first[one.asname or one.name] = one.name
    for _ in range(4):
        first = {name: first.get(base, base) if base != name else base for name, base in first.items()}
    return first


OWN = ("compute_loss", "training_step", "create_optimizer")
"""Methods of a trainer that decide what a step holds, where a class of the program's own has them."""
REPLACED = ("lm_head", "embed_tokens", "layers")
"""Parts of a model that a program may put others in the place of."""
SHAPES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "sliding_window", "attention_dropout", "tie_word_embeddings", "output_hidden_states", "output_attentions")  # fmt: skip
"""Keys of a model's configuration that decide what a step holds."""
WEIGHTS = ("parameters", "named_parameters", "modules", "named_modules", "children", "named_children")
"""Methods whose results a program goes through to cast some of them."""


def own_steps(
    tree: ast.Module, classes: Mapping[str, str], words: Sequence[str], statements: Iterable[ast.stmt]
) -> Iterator[str]:
    """Yield what a trainer of the program's own computes otherwise than the class that it is made of, and what a program changes of a model.

    Args:
        statements: Those of the program, without branches that are not taken.
    """
    idle = {part for one in idle_functions(tree) for part in ast.walk(one)}
    yield from dict.fromkeys(change for one in statements if one not in idle for change in _changes(one))
    for node in nodes_of(tree):
        if (
            isinstance(node, ast.ClassDef)
            and classes.get(node.name, "").endswith("Trainer")
            and classes[node.name] in words
        ):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name in OWN:
                    yield f"what {node.name}.{part.name} holds: it is the program's own, in place of its trainer's; memplan run executes it"


def _changes(statement: ast.stmt) -> Iterator[str]:
    """Yield what a statement makes of a model that was loaded, which no argument of its trainer says."""
    line = max(statement.lineno, 1)
    value = getattr(statement, "value", None)
    for target in statement.targets if isinstance(statement, ast.Assign) else []:
        if isinstance(target, ast.Attribute) and target.attr in REPLACED and not shown(target).startswith("self."):
            yield f"a model as it was loaded: the program replaces {shown(target)} in line {line}"
        elif isinstance(target, ast.Attribute) and target.attr in SHAPES and _configures(target.value, value):
            yield f"a model as it is published: the program sets {shown(target)} in line {line}"
    if isinstance(statement, ast.For) and isinstance(statement.iter, ast.Call):
        names = {shown(name) for name in getattr(statement.target, "elts", [statement.target])}
        own = last_part(statement.iter.func) in WEIGHTS
        if own and any(_casts(part, names) for part in ast.walk(statement)):
            yield f"weights in the dtype in which they were loaded: the program casts some of them in line {line}"
    if isinstance(value, ast.Call) and _casts(value, {"model"}) and last_part(value.func) == "to":
        yield f"a model in the dtype in which it was loaded: the program casts it in line {line}; dtype of from_pretrained is read"


def _configures(holder: ast.expr, value: ast.expr | None) -> bool:
    """Tell whether a model's configuration is given something, by its name, and not switched off."""
    off = isinstance(value, ast.Constant) and value.value in (None, False)
    return shown(holder).rpartition(".")[2].endswith("config") and not shown(holder).startswith("self") and not off


def _casts(node: ast.AST, names: set[str]) -> bool:
    """Tell whether a call casts what one of these names holds, or its data, to another dtype."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    if shown(node.func.value).removesuffix(".data").removesuffix(".weight") not in names:
        return False
    given = [shown(one) for one in (*node.args, *(keyword.value for keyword in node.keywords))]
    to = node.func.attr == "to" and any(re.search(r"float|half|dtype", one) for one in given)
    return to or node.func.attr in ("float", "half", "bfloat16")


def idle_functions(tree: ast.Module) -> set[ast.AST]:
    """Return functions of a program that nothing in it names; none of a module, which others call."""
    starts = any(isinstance(node, ast.If) and "__name__" in shown(node.test) for node in tree.body)
    if not (starts or any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in tree.body)):
        return set()
    named = {node.id for node in nodes_of(tree) if isinstance(node, ast.Name)}
    return {
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name not in named and not node.decorator_list
    }


def returned_values(tree: ast.Module, settings: Settings) -> dict[str, ast.expr]:
    """Return functions -> the expression that each returns, where that stands in one place; of a class's own, with that class's name.

    An instance of its class that a method makes, as of keys in a file, is a mapping of the fields.
    """
    methods = {one: node.name for node in nodes_of(tree) if isinstance(node, ast.ClassDef) for one in node.body}
    values: dict[str, ast.expr] = {}
    for node in nodes_of(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
        value, of = returned[0] if len(returned) == 1 else None, methods.get(node, "")
        if isinstance(value, ast.Call) and called_name(value.func) in ("cls", of) and not value.args:
            fields = [ast.keyword(name, default) for name, default in settings.by_class.get(of, {}).items()]
            value = ast.copy_location(ast.Call(ast.Name("dict", ast.Load()), [], [*fields, *value.keywords]), value)
        if value is not None:
            values[f"{of}_{node.name}" if of else node.name] = value
    return values
