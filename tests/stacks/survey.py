"""Make the environment that environments.yaml lists for a stack, and run the survey of that stack in it.

python tests/stacks/survey.py torchtitan --jobs 60 --seed 1
python tests/stacks/survey.py torchtitan --jobs 60 --seed 2026 --record tests/stacks/records/torchtitan.json
"""

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
OWN = ("typer", "rich", "pydantic", "pyyaml")


def main() -> int:
    """Return the exit status of the survey."""
    listed = yaml.safe_load((FOLDER / "environments.yaml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack", choices=sorted(listed))
    parser.add_argument("--folder", type=Path, default=ROOT / ".stacks", help="where environments are made")
    options, rest = parser.parse_known_args()
    python = environment(options.folder / options.stack, **listed[options.stack])
    stack, _, version = options.stack.partition(".")
    at = ["--at", version.partition(".")[0].replace("-", ".")] if version[:1].isdigit() else []
    command = [str(python), "-W", "ignore", "-m", "tests.survey.stacks", "--stack", stack, *at, *rest]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode


def environment(folder: Path, packages: list[str], without_dependencies: Sequence[str] = ()) -> Path:
    """Return the interpreter of an environment with these packages, made once."""
    python, done = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join((*packages, *without_dependencies, *OWN))
    if not (done.is_file() and done.read_text(encoding="utf-8") == wanted):
        venv.create(folder, with_pip=True)
        alone = [["--no-deps", "--ignore-requires-python", package] for package in without_dependencies]
        for group in (*([package] for package in packages), *alone, list(OWN)):
            subprocess.run([str(python), "-m", "pip", "install", "-q", *group], check=True)
        done.write_text(wanted, encoding="utf-8")
    return python


if __name__ == "__main__":
    sys.exit(main())
