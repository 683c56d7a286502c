"""No dispatch over a catalog name, or over an algorithm's, outside the module that owns it: an entry carries its behaviour."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import memplan
from memplan.catalog.catalog import data_directory
from tests.jobs import yaml_data
from tests.sources import nodes

PACKAGE = Path(memplan.__file__).parent
DTYPES = frozenset(("fp32", "bf16", "fp16"))
"""torch's own dtypes, which compute_dtype, master_weights and kernels.loss name too."""

OWNERS = {
    "catalog/entries.py": "the fields of an entry and what they mean",
    "cli/training_options.py": "--qlora, --lora and --full, which stand for a config",
    "step/states/update_algorithms.py": "the forms of scratch memory and their events, by name",
    "library/runs/served_model.py": "dtypes of a cache of keys and values, as serving engines name them",
    "importer/python/python_words.py": "members of transformers' enumeration of optimizers",
    "trace/reference/run_options.py": "names of dtypes -> torch's",
    "trace/pretended_cuda/bitsandbytes_layers.py": "names of formats -> bitsandbytes' own",
}
"""Module -> what it owns that has a catalog name."""

OWN_NAMES = {
    "muon": "the bundled library names its formats and algorithms itself, and imports no catalog",
    "lab": "experiments are of named configs, formats and optimizers",
    "published": "the notes' tables are of named configs and cards",
    "report/experiments": "records of the lab, by what they measured",
}
"""Folder -> why its names are its own."""


@cache
def names() -> frozenset[str]:
    root = data_directory()
    found = {path.stem for path in (root / "configs" / "training").glob("*.yaml")}
    for file in ("gpu_catalog.yaml", *(f"configs/{kind}.yaml" for kind in ("weight_formats", "gradient_dtypes"))):
        found |= set(yaml_data(root / file))
    optimizers = yaml_data(root / "configs" / "optimizers.yaml")
    return frozenset(found | set(optimizers) | {entry["algorithm"] for entry in optimizers.values()}) - DTYPES


def strings(node: ast.AST) -> Iterator[str]:
    """Yield the strings that a value is compared with: itself, or those of a tuple, list or set."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for item in node.elts:
            yield from strings(item)
    elif isinstance(node, ast.Call):
        for item in node.args:
            yield from strings(item)


def dispatched(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what is compared with, matched against, or the key of a dictionary; and reads of ``.algorithm``."""
    values: list[tuple[int, ast.AST]] = []
    for node in nodes(path, ast.Compare):
        sides = [node.left, *node.comparators]
        values += [(node.lineno, side) for side in sides]
        if any(isinstance(side, ast.Attribute) and side.attr == "algorithm" for side in sides):
            yield node.lineno, ".algorithm"
    values += [(node.lineno, key) for node in nodes(path, ast.Dict) for key in node.keys if key is not None]
    values += [(node.lineno, node.value) for node in nodes(path, ast.MatchValue)]
    for line, value in values:
        yield from ((line, text) for text in strings(value))


FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not any(path.is_relative_to(PACKAGE / folder) for folder in (*OWN_NAMES, "data"))
]
READERS_OF_OTHERS = "model/readers"
"""Names in other people's files, which happen to be ours too."""


def test_no_module_dispatches_over_names_that_are_not_its_own():
    places = {path.relative_to(PACKAGE).as_posix(): path for path in FILES}
    found = [
        f"{place}:{line}: {text}"
        for place, path in places.items()
        if place not in OWNERS and not place.startswith(READERS_OF_OTHERS)
        for line, text in dispatched(path)
        if text in names() or text == ".algorithm"
    ]
    assert found == [], "say it in the entry, and read that"


def test_every_owner_still_owns_something():
    for place in OWNERS:
        assert [text for _, text in dispatched(PACKAGE / place) if text in names()], place
    assert all((PACKAGE / folder).is_dir() for folder in OWN_NAMES)


@pytest.mark.parametrize(
    "text",
    ['x == "muon-int8"', 'x in ("lion", "b")', '{"q4-0": 1}', 'e.algorithm != "y"', 'frozenset(("lion",)) == x'],
)
def test_the_search_finds_what_it_is_for(write, text):
    assert {found for _, found in dispatched(write("module.py", text))} & {*names(), ".algorithm"}
