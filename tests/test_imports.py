"""The layout: imports go one way, folders are small, names are unique, and torch lives in the side folders only."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import memplan
from tests.sources import nodes

ROOT = Path(memplan.__file__).parent
FLOORS = [
    {"errors"},
    {"documents", "units"},
    {"allocator", "catalog", "host", "importer", "model"},
    {"muon", "training"},
    {"step"},
    {"plan", "trace"},
    {"budget", "dryrun", "failure", "measure", "published", "solver"},
    {"lab", "report"},
    {"library"},
    {"cli", "testing"},
]
"""Parts of the package by what they may import: those of lower floors."""
FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
TORCH = {"dryrun", "lab", "measure", "muon", "trace"}
ENTRIES = {"library", "cli"}
"""What may import a part that needs torch, inside a function."""
FACES = {"__init__", "__main__"}
MODULES_IN_A_FOLDER = 10
LINES_IN_A_FILE = 350
LINES_IN_A_FUNCTION = 50
MOST_PARAMETERS = 10
OTHERS_SIGNATURES = {
    "flash_attention_2.py",
    "flash_attn_package.py",
    "triton_codecs.py",
    "triton_formats.py",
    "triton_grids.py",
    "triton_kernels.py",
}
"""Modules whose functions take what another library passes, or are kernels, which take no values."""
NO_NAMES = {"asked", "found", "held", "kept"}
"""Words that say what was done to a value and not what it is."""
FILES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "data")


def part_of(path: Path) -> str:
    """Return the file or folder of the package that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Return the modules that a file imports anywhere, even inside functions, each with its line."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes(path, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
    for node in nodes(path, ast.ImportFrom):
        assert node.level == 0, f"{path}:{node.lineno}: a relative import"
        yield node.module or "", node.lineno
        yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def parts_imported(path: Path) -> Iterator[tuple[str, int]]:
    for module, line in imports(path):
        if module.startswith("memplan.") and not module.startswith("memplan.__"):
            yield module.split(".")[1], line


def test_there_are_ten_floors():
    assert len(FLOORS) <= 10


def test_every_part_has_a_floor():
    assert {part_of(path) for path in FILES} - FACES - {"_version"} == set(FLOOR)


def test_imports_go_down():
    for path in FILES:
        own = part_of(path)
        for part, line in parts_imported(path):
            where = f"{path.relative_to(ROOT)}:{line} imports memplan.{part}"
            if own in FACES or part == own or part not in FLOOR:
                continue
            assert FLOOR[part] <= FLOOR[own], where
            assert part not in TORCH or own in TORCH | ENTRIES, where


@pytest.mark.parametrize("floor", range(len(FLOORS)))
def test_no_two_parts_of_one_floor_import_each_other_in_a_circle(floor):
    no_circle({part: {p for f in FILES if part_of(f) == part for p, _ in parts_imported(f)} for part in FLOORS[floor]})


def test_no_two_folders_import_each_other_in_a_circle():
    folders = {path.parent for path in FILES} - {ROOT}

    def folder_of(module: str) -> Path | None:
        path = ROOT.parent.joinpath(*module.split("."))
        return path.parent if path.with_suffix(".py").exists() else path if path in folders else None

    found = {folder: {folder_of(m) for f in FILES if f.parent == folder for m, _ in imports(f)} for folder in folders}
    faces = {folder: {folder_of(m) for m, _ in imports(folder / "__init__.py")} for folder in folders}
    no_circle({folder: wanted - faces[folder] for folder, wanted in found.items()})


def no_circle(needs):
    """Fail where some of ``needs`` can only be met in a circle."""
    while needs:
        free = {one for one, wanted in needs.items() if not (wanted - {one}) & needs.keys()}
        assert free, f"a circle among {sorted(map(str, needs))}"
        needs = {one: wanted for one, wanted in needs.items() if one not in free}


def test_every_module_of_the_formula_has_tests_for_its_mutants():
    settings = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["memplan-mutation"]
    named = {*settings["tests"], *(path for paths in settings["tests"].values() for path in paths)}
    assert not {path for path in named if not (ROOT.parent / path).exists()}
    parts = {"allocator", "catalog", "importer", "model", "plan", "solver", "step", "training"}
    formula = [path for path in FILES if part_of(path) in parts]
    mutated = [(ROOT.parent / name) for name in settings["tests"]]
    assert not [path for path in formula if not any(path.is_relative_to(name) for name in mutated)]


def test_a_folder_has_few_modules():
    modules = Counter(path.parent for path in FILES if path.stem not in FACES)
    assert {folder: count for folder, count in modules.items() if count > MODULES_IN_A_FOLDER} == {}


def test_a_file_has_few_lines():
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in FILES}
    assert {path: count for path, count in lines.items() if count > LINES_IN_A_FILE} == {}


def test_a_function_has_few_lines_and_parameters():
    for path in FILES:
        for node in nodes(path, ast.FunctionDef):
            assert node.end_lineno - node.lineno < LINES_IN_A_FUNCTION, f"{path}:{node.lineno}: {node.name}"
            arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            several = [name for name in arguments if name not in ("self", "cls")]
            assert len(several) <= MOST_PARAMETERS or path.name in OTHERS_SIGNATURES, (
                f"{path}:{node.lineno}: {node.name}"
            )


def test_no_file_name_occurs_twice():
    names = Counter(path.stem for path in FILES if path.stem not in FACES)
    assert [name for name, times in names.items() if times > 1] == []


def test_torch_and_transformers_live_in_the_side_folders():
    heavy = {"torch", "transformers", "numpy", "triton"}
    elsewhere = [path for path in FILES if part_of(path) not in TORCH]
    assert [p for p in elsewhere if {module.split(".")[0] for module, _ in imports(p)} & heavy] == []


def test_no_private_name_of_another_part_is_imported():
    for path, node in ((file, node) for file in FILES for node in nodes(file, ast.ImportFrom)):
        if (node.module or "").startswith("memplan."):
            private = [
                alias.name for alias in node.names if alias.name.startswith("_") and not alias.name.startswith("__")
            ]
            assert node.module.split(".")[1] == part_of(path) or not private, f"{path}:{node.lineno}: {private}"


def test_values_are_named_for_what_they_are():
    for path in FILES:
        classes = nodes(path, ast.ClassDef)
        fields = {one.target for cls in classes for one in cls.body if isinstance(one, ast.AnnAssign)}  # keys of files
        named = [(one, one.arg) for one in nodes(path, ast.arg)]
        named += [
            (one, one.id) for one in nodes(path, ast.Name) if isinstance(one.ctx, ast.Store) and one not in fields
        ]
        named += [(one, one.attr) for one in nodes(path, ast.Attribute) if isinstance(one.ctx, ast.Store)]
        named += [(one, one.name.strip("_").lower()) for one in (*classes, *nodes(path, ast.FunctionDef))]
        assert [f"{path}:{node.lineno}: {name}" for node, name in named if name in NO_NAMES] == []


def test_arguments_that_a_docstring_describes_are_there():
    for path in FILES:
        for node in (*nodes(path, ast.ClassDef), *nodes(path, ast.FunctionDef)):
            if isinstance(node, ast.ClassDef):
                makers = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            else:
                makers = [node]
            if makers and (
                listed := re.search(r"^Args:\n((?: .*\n?|\n)*)", ast.get_docstring(node) or "", re.MULTILINE)
            ):
                named = {one.arg for one in ast.walk(makers[0].args) if isinstance(one, ast.arg)}
                assert not set(re.findall(r"^    (\w+): ", listed[1], re.MULTILINE)) - named, f"{path}:{node.lineno}"
