"""Mutation testing of the formula: which small changes of a module does no test notice?

    python tests/mutation/run.py memplan/step/states --sample 8 --json results.json

Works on a copy of the tracked files, so that the working tree is never touched. Which tests run for a
folder or module, and which of cosmic-ray's operators mutate it, stands in ``[tool.memplan-mutation]`` of
pyproject.toml; without a name, all that stands there is mutated. A sample of each module is drawn with a
seed, the same one every time. Each mutant is tried in a forked process, in which all modules and the catalog are loaded
already, and gets the changed code in place of a function's; what is changed outside of functions, or in what reads the
catalog, is tried first, before anything is loaded, with all of them; a function with those that come to it. The test that notices a mutant has to pass without it. ``--again
results.json`` tries those that survived an earlier run. A survivor that changed what ``explained`` there names is told
apart, with the reason. The exit code is 1 where another mutant survived, 3 where not all could be tried in time.
"""

import argparse
import compileall
import gc
import importlib
import inspect
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
from types import CodeType, FunctionType
from typing import Any

from covering import Chosen, Comes, Function, comes_to

ROOT = Path(__file__).parent.parent.parent
SECONDS_PER_TEST = 600
"""A test that takes longer is ended: the mutant loops."""
MEMORY_BYTES = 8 * 2**30
OPTIONS = ("-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not benchmark")
WITH_TORCH = "memplan/dryrun", "memplan/lab", "memplan/measure", "memplan/muon", "memplan/trace"
READ_THE_CATALOG = "memplan/catalog", "memplan/documents", "memplan/errors", "memplan/units"
Mutant = tuple[int, str, int]
"""Line, operator, and which of its occurrences in the module."""


def main() -> int:
    """Mutate modules one after the other, and print what survives."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["memplan-mutation"]
    given = _arguments()
    until = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="memplan-mutation-") as name:
        _copy_into(Path(name))
        os.chdir(name)
        if given.again is not None:
            drawn = _again(json.loads(given.again.read_text(encoding="utf-8")))
        else:
            drawn = _drawn(_modules(given.names or list(settings["tests"])), settings["operators"], given)
        trial = _Trial(settings["tests"], settings["explained"], until, given.json)
        _prepare(name)
        waiting = [(module, mutant) for module, mutant in drawn if not trial.try_one(module, mutant)]
        _load()
        trial.functions = _functions()
        for module, mutant in waiting:
            trial.try_one(module, mutant)
    total = sum((Counter(result["outcomes"]) for result in trial.results.values()), Counter())
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


def _prepare(folder: str) -> None:
    """Find modules in the copy, and import packages of others."""
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONPATH=folder, PYTHONDONTWRITEBYTECODE="mutants", OMP_NUM_THREADS="1")
    for package in ("pydantic", "pytest", "typer", "yaml"):
        importlib.import_module(package)
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("memplan", "tests")]
    assert not loaded, f"loaded before they are mutated: {loaded}"


def _load() -> None:
    """Import every module that needs no torch, and read the catalog; nothing else runs before a mutant does."""
    for path in _modules(["memplan"]):
        if not path.startswith(WITH_TORCH) and not path.endswith("__main__.py"):
            importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    from tests.jobs import shipped_catalog

    known = shipped_catalog()
    assert all((known.gpus, known.formats, known.gradients, known.optimizers, known.configs, known.stacks))


def _functions() -> Mapping[tuple[str, str, int], Sequence[FunctionType]]:
    """Return the functions that are loaded, by module, name and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for function in (one for one in gc.get_objects() if type(one) is FunctionType):
        code = function.__code__
        _, inside, module = code.co_filename.rpartition("/memplan/")
        if inside:
            found.setdefault((f"memplan/{module}", code.co_qualname, code.co_firstlineno), []).append(function)
    gc.freeze()
    return found


def _modules(names: Sequence[str]) -> list[str]:
    """Return the modules of folders, and those named, each once."""
    found = (
        path for name in names for path in ([Path(name)] if name.endswith(".py") else sorted(Path(name).rglob("*.py")))
    )
    return list(dict.fromkeys(str(path) for path in found))


def _drawn(modules: Sequence[str], operators: list[str], given: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """Return the mutants to try, each with its module: a sample where one is asked for."""
    found = {module: list(_mutants(Path(module).read_text(encoding="utf-8"), operators)) for module in modules}
    for module, mutants in found.items():
        if 0 < given.sample < len(mutants):
            found[module] = sorted(random.Random(f"{given.seed} {module}").sample(mutants, given.sample))
    pairs = [(module, mutant) for module, mutants in found.items() for mutant in mutants]
    sys.stdout.write(f"{len(pairs)} mutants of {len(modules)} modules\n")
    if 0 < given.total < len(pairs):  # in the order drawn, so that those that time is left for are a sample too
        pairs = random.Random(given.seed).sample(pairs, given.total)
    return pairs


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


def _again(results: Sequence[dict[str, Any]]) -> list[tuple[str, Mutant]]:
    """Return the mutants that survived an earlier run, by what they change; their lines may have moved, or be gone."""
    found: list[tuple[str, Mutant]] = []
    for result in results:
        module, survivors = Path(result["module"]), {(one["operator"], one["change"]) for one in result["survivors"]}
        source = module.read_text(encoding="utf-8") if module.is_file() else ""
        mutants = _mutants(source, sorted({operator for operator, _ in survivors}))
        there = {(mutant[1], _changed(source, mutant)[1]): mutant for mutant in mutants}
        for operator, change in sorted(survivors - set(there)):
            sys.stdout.write(f"{module}: gone: {operator}: {change}\n")
        found += [(str(module), there[one]) for one in there if one in survivors]
    return found


def _changed(source: str, mutant: Mutant) -> tuple[str, str]:
    """Return a mutated source, and the line before and after."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    line, operator, occurrence = mutant
    changed = mutate_code(source, get_operator(f"core/{operator}")(), occurrence)
    before, after = (text.splitlines()[line - 1].strip() for text in (source, changed))
    return changed, f"{before}  ->  {after}"


class _Trial:
    """Tries mutants one by one, and says how they fared.

    Args:
        tests: Folder or module -> its tests.
        explained: Code whose change no test can notice -> why that is so.
        until: When no further mutant is begun.
        file: Gets the results after each mutant.

    Attributes:
        functions: Those that are loaded; none as long as nothing is.
    """

    def __init__(
        self, tests: Mapping[str, list[str]], explained: Mapping[str, str], until: float, file: Path | None
    ) -> None:
        self.tests, self.explained, self.until, self.file = tests, explained, until, file
        self.functions: Mapping[tuple[str, str, int], Sequence[FunctionType]] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self._pass: dict[str, bool] = {}
        self._comes: dict[str, Comes] = {}

    def try_one(self, module: str, mutant: Mutant) -> bool:
        """Try a mutant; return whether it was: one that a loaded function can take waits until all are."""
        path = Path(module)
        source = path.read_text(encoding="utf-8")
        text, change = _changed(source, mutant)
        try:
            bodies = None if module.startswith(READ_THE_CATALOG) else _changed_bodies(source, text)
        except SyntaxError:  # a star in a signature is no product
            self._note(module, "no program")
            return True
        if bodies is not None and not self.functions:
            return False
        keys = [(module, *key) for key in bodies or ()]
        swaps = [(one, bodies[key[1:]]) for key in keys if bodies for one in self.functions.get(key, ())]
        if time.monotonic() > self.until or (bodies and not swaps):
            self._note(module, "untried")
            return True
        tests = [module, *self.tests[max((name for name in self.tests if module.startswith(name)), key=len)]]
        path.write_text(text, encoding="utf-8")  # for processes that tests start
        failed = self._first_of_those_that_come_to(tests, keys, swaps) if swaps else _first_failure(tests, [])
        path.write_text(source, encoding="utf-8")
        if failed and not self._passes(failed):
            raise SystemExit(f"{module}: fails before anything is mutated: {failed}")
        before, _, after = change.partition("  ->  ")
        why = next((why for part, why in self.explained.items() if before.count(part) > after.count(part)), "")
        survivor = {"line": mutant[0], "operator": mutant[1], "change": change, "explained": why}
        self._note(module, "killed" if failed else "explained" if why else "survived", {} if failed else survivor)
        return True

    def _first_of_those_that_come_to(
        self, tests: Sequence[str], keys: Sequence[Function], swaps: Sequence[tuple[FunctionType, CodeType]]
    ) -> str:
        """Return the first test that fails of those that come to any of some functions, which have other code; of a file after another."""
        module, *files = tests
        for number, one in enumerate(files):
            if one not in self._comes:
                self._comes[one] = comes_to(one, self.functions, OPTIONS, [_Unhurried()])
            chosen = {test: took for key in keys for test, took in self._comes[one].get(key, {}).items()}
            if not number or chosen:
                failed = _first_failure([module, one][number > 0 :], swaps, Chosen(chosen, module))
                if failed:
                    return failed
        return ""

    def _passes(self, test: str) -> bool:
        if test not in self._pass:
            self._pass[test] = not _first_failure([test], [])
        return self._pass[test]

    def _note(self, module: str, outcome: str, survivor: Mapping[str, Any] | None = None) -> None:
        result = self.results.setdefault(module, {"module": module, "outcomes": {}, "survivors": []})
        result["outcomes"][outcome] = result["outcomes"].get(outcome, 0) + 1
        if survivor:
            result["survivors"].append(survivor)
            at = f"{module}:{survivor['line']}: {survivor['operator']}"
            sys.stdout.write(f"{outcome}: {at}: {survivor['change']}  {survivor['explained']}\n")
            sys.stdout.flush()
        if self.file is not None:
            self.file.write_text(json.dumps([*self.results.values()], indent=1) + "\n", encoding="utf-8")


def _changed_bodies(source: str, text: str) -> dict[tuple[str, int], CodeType] | None:
    """Return the functions that a mutated module has other code of, by name and first line; None where more is changed."""
    before, after = (_bodies(compile(one, "mutated", "exec")) for one in (source, text))
    if before[0] != after[0]:
        return None
    return {key: code for key, code in after[1].items() if code != before[1][key]}


def _bodies(code: CodeType) -> tuple[list[object], dict[tuple[str, int], CodeType]]:
    """Return what of a module runs as it is imported, and the bodies of its functions and methods."""
    run: list[object] = [code.co_code, code.co_names]
    bodies: dict[tuple[str, int], CodeType] = {}
    for part in code.co_consts:
        if not isinstance(part, CodeType):
            run.append(repr(part))
        elif part.co_flags & inspect.CO_OPTIMIZED and (part.co_name == "<lambda>" or part.co_name[0] != "<"):
            bodies[part.co_qualname, part.co_firstlineno] = part
        else:  # the body of a class, or what goes through a sequence
            inner, others = _bodies(part)
            run.append(inner)
            bodies |= others
    return run, bodies


def _first_failure(
    tests: Sequence[str], swaps: Sequence[tuple[FunctionType, CodeType]], chosen: Chosen | None = None
) -> str:
    """Return the first test that fails, or takes too long, in a process of its own; nothing where all pass.

    Args:
        swaps: Functions, and the code that they have there.
        chosen: Which of the tests are run; all where nothing is said.
    """
    read, write = os.pipe()
    process = os.fork()
    if not process:
        code = 70
        try:
            for function, body in swaps:
                function.__code__ = body
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            import pytest

            plugins = [_Told(write), *([] if chosen is None else [chosen])]
            code = int(pytest.main([*OPTIONS, "-x", *tests], plugins))
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as told:
        last = told.read().strip().rpartition("\n")[-1]
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return "" if status in (0, 5) else last or tests[-1]  # 5: a module without an example


class _Unhurried:
    """Lets hypothesis take its time: on a busy machine no mutant would survive."""

    def pytest_sessionstart(self) -> None:
        from hypothesis import HealthCheck, settings

        settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("unhurried")


class _Told(_Unhurried):
    """Says which test runs, or failed to be found."""

    def __init__(self, to: int) -> None:
        self._to = to

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        signal.alarm(SECONDS_PER_TEST)
        os.write(self._to, f"{nodeid}\n".encode())

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            os.write(self._to, f"{report.nodeid}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
