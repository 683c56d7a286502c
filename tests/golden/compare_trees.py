"""Do two trees of memplan answer alike? Run the commands of a list in both, and compare what they print.

    python tests/golden/compare_trees.py BEFORE_TREE AFTER_TREE [--only fit,max] [--ignore catalog_hash]

Each tree has one process of its own, which runs its entry point for every line of ``commands.txt``, as
if piped; both run in BEFORE_TREE, so that paths of files mean the same to both. A line is split as a shell
would: ``KEY=VALUE`` may stand before the command, ``< FILE`` behind it, and ``{out}`` is an empty folder
whose files belong to the answer. JSON is compared key by key, text line by line. The exit code is 1
where an answer differs.
"""

import argparse
import contextlib
import difflib
import gc
import importlib
import io
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

COMMANDS = Path(__file__).resolve().with_name("commands.txt")
MOST_LINES = 12
Answer = dict[str, Any]  # exit code, streams and written files of a command, and its seconds, which are not compared


def main() -> int:
    """Take the answers of both trees, and print what differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", type=Path, metavar="BEFORE_TREE")
    parser.add_argument("after", type=Path, metavar="AFTER_TREE")
    parser.add_argument("--commands", type=Path, default=COMMANDS, help="another list of commands")
    parser.add_argument("--only", default="", help="commands to run, such as fit,max")
    parser.add_argument("--ignore", default="", help="keys of JSON that may differ, such as catalog_hash")
    parser.add_argument("--take", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # what each tree's process does
    given = parser.parse_args()
    if given.take is not None:
        lines = [line for line in given.commands.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
        wanted = [line for line in lines if not given.only or set(given.only.split(",")) & set(line.split()[:2])]
        found = {line: answer(line, given.before) for line in wanted}
        given.take.write_text(json.dumps(found, indent=1), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        into, trees = Path(folder) / "answers.json", (given.before.resolve(), given.after.resolve())
        before, after = (taken(tree, given.commands, into, trees[0], given.only) for tree in trees)
    return told(before, after, frozenset(given.ignore.split(",")))


def taken(tree: Path, commands: Path, into: Path, folder: Path, only: str = "") -> dict[str, Answer]:
    """Return a tree's answers to commands that are run in ``folder``, from a process that imports memplan from it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MEMPLAN_", "GITHUB_", "NO_COLOR", "FORCE_"))}
    kept |= {"PYTHONPATH": os.pathsep.join(map(str, sources(tree))), "COLUMNS": "100", "PYTHONHASHSEED": "0"}
    options = [f"--commands={commands.resolve()}", f"--only={only}", f"--take={into}"]
    subprocess.run([sys.executable, __file__, tree, tree, *options], env=kept, cwd=folder, check=True)
    return dict(json.loads(into.read_text(encoding="utf-8")))


def sources(tree: Path) -> list[Path]:
    """Return the folders that a tree's package may lie in."""
    return [folder for folder in (tree, tree / "src") if (folder / "memplan").is_dir()]


def answer(line: str, tree: Path) -> Answer:
    """Run one command line by the entry point that ``[project.scripts]`` of this process's tree names."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, name = project["scripts"]["memplan"].split(":")
    run = getattr(importlib.import_module(module), name)
    place = str(sys.modules["memplan"].__file__)
    if not any(Path(place).is_relative_to(folder) for folder in sources(tree)):
        raise SystemExit(f"memplan was imported from {place}, not from {tree}")
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        words = shlex.split(line.replace("{out}", folder))
        variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
        words, stdin = words[len(variables) :], b""
        if "<" in words:
            words, stdin = words[: words.index("<")], Path(words[-1]).read_bytes()
        stack.enter_context(mock.patch.object(sys, "argv", ["memplan", *words]))
        stack.enter_context(mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")))
        stack.enter_context(mock.patch.dict(os.environ, {"PATH": "/nonexistent", **variables}))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        started, code = time.process_time(), None
        try:
            run()
        except SystemExit as left:
            code = left.code
        gc.enable()
        seconds = round(time.process_time() - started, 2)
        texts = {"stdout": out.getvalue(), "stderr": err.getvalue()}
        files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        texts |= {str(path).replace(folder, "{out}"): path.read_text(encoding="utf-8") for path in files}
        data = {key: _parsed(text.replace(folder, "{out}").replace(str(tree), "{tree}")) for key, text in texts.items()}
    return {"exit": code, **data, "seconds": seconds}


def _parsed(text: str) -> Any:
    """Return JSON as data, and other text as its lines."""
    with contextlib.suppress(ValueError):
        return {"json": json.loads(text), "characters": len(text)}
    return text.splitlines()


def differences(before: Any, after: Any, ignored: frozenset[str], where: str = "") -> Iterator[str]:
    """Yield what differs between two values, each with the keys that lead there."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (key for key in {**before, **after} if key not in ignored):
            pair = before.get(key, "(no key)"), after.get(key, "(no key)")
            yield from differences(*pair, ignored, f"{where}.{key}")
        if [key for key in before if key in after] != [key for key in after if key in before]:
            yield f"{where}: the same keys in another order"
    elif isinstance(before, list) and isinstance(after, list) and all(isinstance(x, str) for x in before + after):
        if before != after:
            changed = itertools.islice(difflib.unified_diff(before, after, lineterm="", n=0), 2, None)
            yield from (f"{where}: {line[:300]}" for line in changed if line[:2] != "@@")
    elif isinstance(before, list) and isinstance(after, list):
        for index, (one, other) in enumerate(itertools.zip_longest(before, after, fillvalue="(no item)")):
            yield from differences(one, other, ignored, f"{where}[{index}]")
    elif before != after or type(before) is not type(after):
        yield f"{where}: {json.dumps(before)[:120]} -> {json.dumps(after)[:120]}"


def told(before: dict[str, Answer], after: dict[str, Answer], ignored: frozenset[str]) -> int:
    """Print the commands whose answers differ, and return the exit code."""
    count = 0
    for line in {**before, **after}:
        found = list(differences(before.get(line), after.get(line), ignored | {"seconds"}))
        count += bool(found)
        if found:
            print(f"memplan {line}: {len(found)} differences", *found[:MOST_LINES], sep="\n    ")
    seconds = [sum(item["seconds"] for item in answers.values()) for answers in (before, after)]
    print(f"{count} of {len({**before, **after})} answers differ; {seconds[0]:.0f} s before, {seconds[1]:.0f} s after")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
