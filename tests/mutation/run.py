"""Mutation testing of the formula: which small changes of a module does no test notice?

    python tests/mutation/run.py memplan/step/states --sample 8 --json results.json

Works on a copy of the tracked files, so that the working tree is never touched. Which tests run for a
folder or module, and which of cosmic-ray's operators mutate it, stands in ``[tool.memplan-mutation]`` of
pyproject.toml; without a name, all that stands there is mutated. A sample of each module is drawn with a
seed, the same one every time. Each mutant is tried in a forked process, in which third-party packages and
the catalog are loaded already. ``--again results.json`` tries those that survived an earlier run. A survivor that changed
what ``explained`` there names is told apart, with the reason. The exit code is 1 where another mutant survived, 3 where
not all could be tried in time.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import py_compile
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SECONDS_PER_MUTANT, TIMES_UNCHANGED = 300, 5
"""A mutant's tests end after so many seconds, or times as long as without it, whichever is more: it loops."""
MEMORY_BYTES = 8 * 2**30
Mutant = tuple[int, str, int]
"""Line, operator, and which of its occurrences in the module."""


def main() -> int:
    """Mutate modules one after the other, and print what survives."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["memplan-mutation"]
    given = _arguments()
    until = time.monotonic() + 60 * given.minutes
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="memplan-mutation-") as name:
        _copy_into(Path(name))
        os.chdir(name)
        _load(name, list(settings["tests"]))
        if given.again is not None:
            drawn = _again(json.loads(given.again.read_text(encoding="utf-8")))
        else:
            drawn = _drawn(_modules(given.names or list(settings["tests"])), settings["operators"], given)
        taken: dict[str, float] = {}
        for module, mutants in drawn.items():
            tests = settings["tests"][max((p for p in settings["tests"] if module.startswith(p)), key=len)]
            for path in set(tests) - set(taken):  # each once: many modules have some in common
                began = time.monotonic()
                if not _passes([path], 0):
                    raise SystemExit(f"{module}: its tests fail before anything is mutated: {path}")
                taken[path] = time.monotonic() - began
            limit = max(SECONDS_PER_MUTANT, TIMES_UNCHANGED * int(sum(taken[path] for path in tests)))
            results.append(_mutated(module, mutants, (tests, limit), until, settings["explained"]))
            if given.json is not None:
                given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    total = sum((Counter(result["outcomes"]) for result in results), Counter())
    tried = total["killed"] + total["survived"] + total["explained"]
    share, (least, most) = total["killed"] / max(1, tried), interval(total["killed"], tried)
    sys.stdout.write(
        f"{total['killed']} of {tried} killed, {share:.1%} ({least:.0%} to {most:.0%} at 95 % confidence); "
        f"{total['explained']} of the others explained, {total['untried']} untried\n"
    )
    return 1 if total["survived"] else 3 if total["untried"] else 0


def interval(killed: int, tried: int) -> tuple[float, float]:
    """Return the least and the greatest share of all mutants that a sample's share speaks for, at 95 % confidence.

    Source:
        E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    if not tried:
        return 0.0, 1.0
    z, share = 1.96, killed / tried
    middle, width = share + z * z / (2 * tried), z * ((share * (1 - share) + z * z / (4 * tried)) / tried) ** 0.5
    return (middle - width) / (1 + z * z / tried), (middle + width) / (1 + z * z / tried)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="folder or module, such as memplan/step/states")
    parser.add_argument("--minutes", type=float, default=600.0, help="for all of them (600)")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module, drawn at random (all)")
    parser.add_argument(
        "--total", type=int, default=0, help="mutants of all these modules together, drawn at random (all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--again", type=lambda text: Path(text).absolute(), help="try survivors of results once more")
    parser.add_argument("--json", type=lambda text: Path(text).absolute(), help="write the results to a file")
    return parser.parse_args()


def _copy_into(folder: Path) -> None:
    """Copy what git tracks, as it stands in the working tree; its bytecode is known by the source's hash."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / "memplan", quiet=2, invalidation_mode=mode)


def _load(folder: str, mutated: Sequence[str]) -> None:
    """Import what no mutant can change: packages of others, and the catalog and models under the formula."""
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=folder, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    import pytest
    import typer

    from tests.jobs import shipped_catalog

    catalog = shipped_catalog()
    kinds = (catalog.gpus, catalog.formats, catalog.gradients, catalog.optimizers, catalog.configs, catalog.stacks)
    assert all((pytest, typer, *(kind.entries for kind in kinds)))
    prefixes = tuple(name.removesuffix(".py").replace("/", ".") for name in mutated)
    loaded = [name for name in sys.modules if name.startswith(prefixes)]
    assert not loaded, f"loaded before they are mutated: {loaded}"


def _modules(names: Sequence[str]) -> list[str]:
    """Return the modules of folders, and those named, each once."""
    found = (
        path for name in names for path in ([Path(name)] if name.endswith(".py") else sorted(Path(name).rglob("*.py")))
    )
    return list(dict.fromkeys(str(path) for path in found))


def _drawn(modules: Sequence[str], operators: list[str], given: argparse.Namespace) -> dict[str, list[Mutant]]:
    """Return the mutants to try of each module, a sample where one is asked for."""
    found = {module: list(_mutants(Path(module).read_text(encoding="utf-8"), operators)) for module in modules}
    for module, mutants in found.items():
        if 0 < given.sample < len(mutants):
            found[module] = sorted(random.Random(f"{given.seed} {module}").sample(mutants, given.sample))
    pairs = [(module, mutant) for module, mutants in found.items() for mutant in mutants]
    sys.stdout.write(f"{len(pairs)} mutants of {len(modules)} modules\n")
    if 0 < given.total < len(pairs):  # in the order drawn, so that those that time is left for are a sample too
        pairs = random.Random(given.seed).sample(pairs, given.total)
    return {
        module: [mutant for owner, mutant in pairs if owner == module] for module in dict.fromkeys(m for m, _ in pairs)
    }


def _mutants(source: str, operators: list[str]) -> Iterator[Mutant]:
    """Yield every mutant of a module; a decorator's options are no arithmetic."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    lines, nodes = source.splitlines(), list(ast_nodes(get_ast(source)))
    for name in operators:
        operator = get_operator(f"core/{name}")()
        for occurrence, (start, _) in enumerate(place for node in nodes for place in operator.mutation_positions(node)):
            if not lines[start[0] - 1].startswith("@"):
                yield start[0], name, occurrence


def _again(results: Sequence[dict[str, Any]]) -> dict[str, list[Mutant]]:
    """Return the mutants that survived an earlier run, by what they change; their lines may have moved, or be gone."""
    found: dict[str, list[Mutant]] = {}
    for result in results:
        module, survivors = Path(result["module"]), {(one["operator"], one["change"]) for one in result["survivors"]}
        source = module.read_text(encoding="utf-8") if module.is_file() else ""
        mutants = _mutants(source, sorted({operator for operator, _ in survivors}))
        there = {(mutant[1], _changed(source, mutant)[1]): mutant for mutant in mutants}
        for operator, change in sorted(survivors - set(there)):
            sys.stdout.write(f"{module}: gone: {operator}: {change}\n")
        found |= {str(module): [there[one] for one in there if one in survivors]}
    return {module: mutants for module, mutants in found.items() if mutants}


def _changed(source: str, mutant: Mutant) -> tuple[str, str]:
    """Return a mutated source, and the line before and after."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    line, operator, occurrence = mutant
    changed = mutate_code(source, get_operator(f"core/{operator}")(), occurrence)
    before, after = (text.splitlines()[line - 1].strip() for text in (source, changed))
    return changed, f"{before}  ->  {after}"


def _mutated(
    module: str,
    mutants: Sequence[Mutant],
    tests: tuple[Sequence[str], int],
    until: float,
    explained: Mapping[str, str],
) -> dict[str, Any]:
    """Run mutants of a module, each under tests for so many seconds at most, until time is up, and say how they fared.

    Args:
        explained: Code whose change no test can notice -> why that is so.
    """
    path, outcomes, survivors = Path(module), Counter[str](), []
    source = path.read_text(encoding="utf-8")
    for mutant in mutants:
        if time.monotonic() > until:
            outcomes["untried"] += 1
            continue
        text, change = _changed(source, mutant)
        path.write_text(text, encoding="utf-8")
        survived = _passes(*tests)
        path.write_text(source, encoding="utf-8")
        before, _, after = change.partition("  ->  ")
        why = next((why for part, why in explained.items() if survived and before.count(part) > after.count(part)), "")
        outcomes["explained" if why else "survived" if survived else "killed"] += 1
        if survived:
            survivors.append({"line": mutant[0], "operator": mutant[1], "change": change, "explained": why})
    sys.stdout.write(f"{module}: {', '.join(f'{count} {outcome}' for outcome, count in sorted(outcomes.items()))}\n")
    for one in survivors:
        sys.stdout.write(f"  {module}:{one['line']}: {one['operator']}: {one['change']}  {one['explained']}\n")
    sys.stdout.flush()
    return {"module": module, "outcomes": dict(outcomes), "survivors": survivors}


def _passes(tests: Sequence[str], seconds: int) -> bool:
    """Tell whether tests pass, in a process of their own; the first that fails ends it, and so does the time limit, if not 0."""
    process = os.fork()
    if not process:
        code = 70
        try:
            signal.alarm(seconds)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            import pytest

            code = int(
                pytest.main(
                    [
                        "-q",
                        "-x",
                        "--tb=no",
                        "-p",
                        "no:cacheprovider",
                        "-p",
                        "no:xdist",
                        "-m",
                        "not slow and not benchmark",
                        *tests,
                    ]
                )
            )
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


if __name__ == "__main__":
    sys.exit(main())
