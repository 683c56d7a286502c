"""The wheel holds the package and its data, and what is installed from it answers from any folder."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ("memplan", "configs", "gpu_catalog.yaml", "pyproject.toml", "README.md", "LICENSE")

pytest.importorskip("build")
pytest.importorskip("hatchling")


def _run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("MEMPLAN_CATALOG", "PYTHONPATH")}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this tree, built where nothing is left behind in it."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel installed in it; what it depends on is found beside this interpreter."""
    folder = tmp_path_factory.mktemp("installed")
    _run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder)
    return folder


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_holds_all_the_data(wheel):
    names = set(_names(wheel))
    data = [ROOT / "gpu_catalog.yaml", *(ROOT / "configs").rglob("*.yaml")]
    assert len(data) > 100
    assert [p for p in data if f"memplan/data/{p.relative_to(ROOT).as_posix()}" not in names] == []


def test_wheel_holds_every_module_and_the_marker_of_typed_packages(wheel):
    names = set(_names(wheel))
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "memplan").rglob("*.py")}
    assert modules - names == set()
    assert "memplan/py.typed" in names


def test_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in _names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"memplan"}
    kinds = {Path(name).suffix for name in _names(wheel) if name.startswith("memplan/")}
    assert kinds <= {".py", ".typed", ".yaml", ".json", ".md", ".svg", ".css", ".js", ""}
    assert {name for name in _names(wheel) if name.startswith("memplan/") and not Path(name).suffix} == {
        "memplan/report/page/assets/uplot/LICENSE"
    }


def test_wheel_holds_the_licence_and_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        paths = [name for name in archive.namelist() if "dist-info" in name]
        text = {path.split("/", 1)[1]: archive.read(path).decode() for path in paths}
    assert "The memplan authors" in text["licenses/LICENSE"]
    assert "memplan = memplan.cli.completion:run" in text["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in text["METADATA"]


def test_planning_needs_four_packages(installed):
    (found,) = distributions(name="memplan", path=[str(installed)])
    needed = [line for line in found.requires or () if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in needed) == ["pydantic", "pyyaml", "rich", "typer"]


def test_installed_command_answers_from_another_folder(installed, tmp_path):
    command = installed / "bin" / "memplan"
    arguments = ("fit", "llama-8b", "--gpu", "rtx4090", "--json")
    result = _run(sys.executable, command, *arguments, cwd=tmp_path, PYTHONPATH=str(installed))
    answer = json.loads(result.stdout)
    assert answer["schema"] == "memplan/fit/1"
    assert {row["model"]["parameters"] for row in answer["rows"]} == {8_030_261_248}


def test_installed_command_uses_its_own_data(installed, tmp_path):
    command = installed / "bin" / "memplan"
    result = _run(sys.executable, command, "doctor", "--json", cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(json.loads(result.stdout)["catalog"]["path"]) == installed / "memplan" / "data"


def test_source_tree_finds_its_data_from_another_folder(tmp_path):
    code = "from memplan.catalog.catalog import data_directory; print(data_directory())"
    result = _run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert Path(result.stdout.strip()) == ROOT


def test_editable_install_reads_the_source_tree(tmp_path):
    """``pip install -e`` leaves a copy of the data beside a link; the tree's own data are the ones to read."""
    target = tmp_path / "target"
    flags = ("--no-deps", "--no-index", "--no-build-isolation", "--target", target)
    _run(sys.executable, "-m", "pip", "install", *flags, "--editable", ROOT, cwd=tmp_path)
    code = (
        f"import site, sys; before = len(sys.path); site.addsitedir({str(target)!r}); "
        "sys.path[:] = sys.path[before:] + sys.path[:before]; "  # ahead of a memplan that this interpreter may have
        "from memplan.catalog.catalog import data_directory; print(data_directory())"
    )
    result = _run(sys.executable, "-c", code, cwd=tmp_path)
    assert Path(result.stdout.strip()) == ROOT
