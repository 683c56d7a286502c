"""Mutation testing of the formula: which small changes of a module does no test notice?

    python tests/mutation/run.py memplan/step/states/model_states.py memplan/step/states/muon_scratch.py --minutes 20 --sample 60

Works on a copy of the tracked files, so that the working tree is never touched. Which tests run for a
module, and which operators mutate it, stands in ``[tool.memplan-mutation]`` of pyproject.toml; without
a module, all of them are mutated. A sample is drawn with a seed, the same one every time. The exit
code is 1 where a mutant survived, 3 where not all could be tried in time.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SECONDS_PER_MUTANT = 300
SESSION = "session.sqlite"


@dataclass(frozen=True)
class Survivor:
    """A mutant that all tests passed with."""

    line: int
    operator: str
    change: str


@dataclass(frozen=True)
class Result:
    """How the mutants of a module fared; ``outcomes`` counts killed, survived, incompetent and untried ones."""

    module: str
    outcomes: Counter[str]
    survivors: tuple[Survivor, ...]


def main() -> int:
    """Mutate modules one after the other, and print what survives."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["memplan-mutation"]
    given = _arguments(settings["tests"])
    results = []
    for module in given.modules or settings["tests"]:
        with tempfile.TemporaryDirectory(prefix="memplan-mutation-") as name:
            copy = _copied(Path(name))
            result = _mutated(copy, module, settings, given)
        results.append(result)
        _say(result)
    if given.json is not None:
        data = [
            {"module": r.module, "outcomes": dict(r.outcomes), "survivors": [vars(s) for s in r.survivors]}
            for r in results
        ]
        given.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    total = sum((result.outcomes for result in results), Counter())
    return 1 if total["survived"] else 3 if total["untried"] else 0


def _arguments(known: dict[str, list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="such as memplan/step/states/model_states.py")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each module (60)")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module, drawn at random (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--json", type=Path, help="write the results to a file")
    given = parser.parse_args()
    for module in given.modules:
        if module not in known:
            parser.error(f"{module}: no tests are named for it in pyproject.toml; there are {', '.join(known)}")
    return given


def _copied(folder: Path) -> Path:
    """Copy what git tracks, as it stands in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def _mutated(copy: Path, module: str, settings: dict[str, Any], given: argparse.Namespace) -> Result:
    """Run the mutants of a module in a copy, until time is up."""
    command = f"{sys.executable} -m pytest -q -x {' '.join(settings['tests'][module])}"
    if subprocess.run(command.split(), cwd=copy, capture_output=True, check=False, env=_environment(copy)).returncode:
        raise SystemExit(f"{module}: its tests fail before anything is mutated: {command}")
    (copy / "cosmic-ray.toml").write_text(
        f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = {SECONDS_PER_MUTANT}.0\nexcluded-modules = []\n'
        f'test-command = {json.dumps(command)}\n[cosmic-ray.distributor]\nname = "local"\n',
        encoding="utf-8",
    )
    program = [str(Path(sys.executable).parent / "cosmic-ray")]
    subprocess.run([*program, "init", "cosmic-ray.toml", SESSION], cwd=copy, check=True, capture_output=True)
    _drawn(copy, module, settings["operators"], given)
    try:
        subprocess.run(
            [*program, "exec", "cosmic-ray.toml", SESSION],
            cwd=copy, check=True, capture_output=True, env=_environment(copy), timeout=60 * given.minutes,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{module}: {given.minutes:g} minutes are up\n")
    return _result(copy / SESSION, module)


def _environment(copy: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def _drawn(copy: Path, module: str, operators: list[str], given: argparse.Namespace) -> None:
    """Leave the mutants of the named operators in a session, or a sample; a decorator's options are no arithmetic."""
    from cosmic_ray.work_db import WorkDB, use_db

    lines = (copy / module).read_text(encoding="utf-8").splitlines()
    with use_db(copy / SESSION, WorkDB.Mode.open) as work:
        items = [
            item
            for item in work.work_items
            for mutation in item.mutations
            if mutation.operator_name.removeprefix("core/") in operators
            and not lines[mutation.start_pos[0] - 1].startswith("@")
        ]
        items.sort(key=lambda item: _place(item.mutations[0]))
        drawn = random.Random(given.seed).sample(items, given.sample) if 0 < given.sample < len(items) else items
        work.clear()
        work.add_work_items(drawn)


def _place(mutation: Any) -> tuple[Any, ...]:
    return mutation.start_pos, mutation.operator_name, mutation.occurrence


def _result(session: Path, module: str) -> Result:
    from cosmic_ray.work_db import WorkDB, use_db

    outcomes: Counter[str] = Counter()
    survivors = []
    with use_db(session, WorkDB.Mode.open) as work:
        for item, result in work.completed_work_items:
            outcome = result.test_outcome.value if result.test_outcome is not None else "incompetent"
            outcomes[outcome] += 1
            if outcome == "survived":
                mutation = item.mutations[0]
                operator = mutation.operator_name.removeprefix("core/")
                survivors.append(Survivor(mutation.start_pos[0], operator, _change(result.diff or "")))
        outcomes["untried"] = len(list(work.pending_work_items))
    return Result(module, outcomes, tuple(sorted(survivors, key=lambda survivor: survivor.line)))


def _change(diff: str) -> str:
    """Return the lines that a diff takes out and puts in, side by side."""
    lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return "  ->  ".join(line[1:].strip() for line in lines)


def _say(result: Result) -> None:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.outcomes.items()) if count)
    sys.stdout.write(f"{result.module}: {counts}\n")
    for survivor in result.survivors:
        sys.stdout.write(f"  {result.module}:{survivor.line}: {survivor.operator}: {survivor.change}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
