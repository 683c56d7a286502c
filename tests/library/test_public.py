"""The package as a stranger meets it: light to import, names that are there, functions that folders do not hide."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import memplan
from tests.test_imports import FILES, ROOT, parts_imported

FUNCTIONS = tuple(name for name in memplan.__all__ if inspect.isfunction(getattr(memplan, name)))
QUESTION = "memplan.plan('gpt2', gpu='rtx4090', config='lora').verdict"
USE = """\
import memplan

plan = memplan.plan("gpt2", gpu="rtx4090", config="lora", set={"adapter.rank": 8})
size: int = plan.components["logits"]
formula: str = plan.components["logits"].formula
for suggestion in plan.suggestions:
    change: str = suggestion.change
cells: dict[tuple[int, int], memplan.Verdict] = memplan.frontier("gpt2", batches=[1]).verdicts
value: int = memplan.largest("gpt2", of="batch").values["rtx4090"]
row: str = memplan.largest(gpu="rtx4090").rows[0].setup.name
difference: int | None = memplan.trace("gpt2").difference_bytes
"""
MISUSE = """\
import memplan

memplan.plan("gpt2", gpu=4090)
memplan.plan("gpt2", batch=4)
memplan.trace("gpt2").verdict
memplan.plans
"""


def python(*arguments: str, **keywords: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False, **keywords
    )


def test_every_public_name_is_there():
    assert [name for name in memplan.__all__ if getattr(memplan, name) is None] == []
    assert {*memplan.__all__} <= {*dir(memplan)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_takes_returns_and_raises(name):
    function = getattr(memplan, name)
    doc = inspect.getdoc(function) or ""
    assert all(f"\n{section}:\n" in doc for section in ("Args", "Raises", "Example")), doc
    assert inspect.signature(function).return_annotation


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = memplan.plans  # type: ignore[attr-defined]


def loaded(code: str) -> set[str]:
    """Return the modules that code in a fresh interpreter loads."""
    ran = python("-c", f"import sys\n{code}\nprint(*sys.modules, sep='\\n')")
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_import_loads_next_to_nothing():
    modules = loaded("import memplan")
    assert {name for name in modules if name.startswith("memplan")} == {"memplan"}
    assert not {name.partition(".")[0] for name in modules} & {"torch", "pydantic", "typer", "rich", "yaml", "numpy"}


def test_a_plan_needs_no_torch_and_no_command_line():
    modules = loaded(f"import memplan\n{QUESTION}")
    assert not {name.partition(".")[0] for name in modules} & {"torch", "typer", "rich", "numpy", "transformers"}
    assert not any(name.startswith("memplan.cli") for name in modules)


@pytest.mark.parametrize("name", ["plan", "trace"])
def test_a_folder_does_not_hide_the_function_of_the_same_name(name):
    code = f"import memplan.{name}\nfrom memplan.plan.planner import CompiledPlan\nprint(type(memplan.{name}).__name__)"
    assert python("-c", code).stdout == "function\n"


def test_nothing_outside_the_command_line_imports_it():
    outside = [path for path in FILES if path.relative_to(ROOT).parts[0] not in ("cli", "__main__.py")]
    assert [path for path in outside if "cli" in {part for part, _ in parts_imported(path)}] == []


def test_commands_plan_nothing_themselves():
    commands = [path for path in FILES if path.relative_to(ROOT).parts[0] == "cli"]
    assert [path for path in commands if {"plan", "step"} & {part for part, _ in parts_imported(path)}] == []


def test_python_dash_m_is_the_command():
    ran = python("-m", "memplan", "fit", "gpt2", "--gpu", "rtx4090", "--config", "lora", "-q")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("FITS: GPT-2")
    assert python("-m", "memplan", "fit", "gpt3", "--gpu", "rtx4090").returncode == 2


@pytest.mark.slow
def test_a_type_checker_sees_the_types(tmp_path):
    pytest.importorskip("mypy")
    files = {"use.py": USE, "misuse.py": MISUSE}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ran = {name: python("-m", "mypy", "--strict", str(tmp_path / name), cwd=Path(ROOT).parent).stdout for name in files}
    assert "Success" in ran["use.py"], ran["use.py"]
    errors = [line.split("[")[-1] for line in ran["misuse.py"].splitlines() if ": error: " in line]
    assert errors == ["arg-type]", "call-arg]", "attr-defined]", "attr-defined]"]


def test_a_shipped_config_takes_the_stacks_own_format() -> None:
    """torchtune has torchao's NF4 alone: ``qlora`` is planned with it there, unless another is set by name."""
    asked = {"gpu": "rtx4090", "config": "qlora", "stack": "torchtune"}
    assert "nf4-torchao" in memplan.plan("llama-3.1-8b", **asked).to_dict()["training"]["weights"].values()
    with pytest.raises(memplan.CannotAnswerError, match="does not train over weights in nf4-dq"):
        memplan.plan("llama-3.1-8b", **asked, set={"weights.hidden_matrix": "nf4-dq"})


@pytest.mark.parametrize("stack", ["trl", "plain-loop@4.51", "axolotl", "unsloth"])
@pytest.mark.parametrize("role", ["embedding", "head", "expert_matrix", "router", "default"])
def test_libraries_quantise_the_matrices_of_layers_alone(stack: str, role: str) -> None:
    said = "quantises the matrices of layers alone.* set weights.hidden_matrix"
    with pytest.raises(memplan.CannotAnswerError, match=said):
        memplan.plan("llama-3.1-8b", gpu="h100", config="qlora", stack=stack, set={f"weights.{role}": "nf4-dq"})
