"""Shells complete names of models, GPUs, configs and stacks, and that imports nothing that takes time."""

import os
import subprocess
import sys
from importlib import import_module
from inspect import signature

import pytest

from memplan.cli import completion
from memplan.cli.main import COMMANDS

ASKED = [
    ("memplan fit llama-3.1-8", {"llama-3.1-8b"}),
    ("memplan fit --qlora --gpu rtx409", {"rtx4090", "rtx4090-laptop"}),
    ("memplan fit gpt2 -g h20", {"h200", "h200-sxm-141gb", "h200-nvl-141gb"}),
    ("memplan fit gpt2 --config ql", {"qlora"}),
    ("memplan compare gpt2 -c tier", {"tier1", "tier2", "tier3"}),
    ("memplan fit gpt2 --stack torch", {"torchtitan", "torchtune"}),
    ("memplan explain LLAMA-8", {"llama-8b"}),
    ("memplan fit no-such-model", set()),
]


@pytest.mark.parametrize(("line", "expected"), ASKED, ids=[line for line, _ in ASKED])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_name_is_completed(monkeypatch, capsys, shell, line, expected):
    monkeypatch.setenv(completion.VARIABLE, f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    completion.run()
    out = capsys.readouterr().out
    found = out.removeprefix("_arguments '*: :((").removesuffix("))'\n").replace('"', "").replace("_files", "").split()
    assert set(found) >= expected
    assert bool(found) == bool(expected)
    assert all(name.lower().startswith(line.split()[-1].lower()) for name in found)


@pytest.mark.parametrize(
    "line", ["memplan", "memplan fi", "memplan fit gpt2 --gp", "memplan fit gpt2 ", "memplan list "]
)
def test_what_is_no_name_is_left_to_the_command(line):
    words = line.split(" ")[1:]
    assert completion.completed(words[:-1], words[-1] if words else "") is None


def test_the_names_are_the_catalogs_own(catalog):
    known = {"models": catalog.models, "gpus": catalog.gpus, "configs": catalog.configs, "stacks": catalog.stacks}
    for kind, section in known.items():
        assert set(section.entries) <= completion.names(kind)
        assert all(name in section for name in completion.names(kind))


def test_every_command_that_takes_a_model_completes_its_name():
    functions = {
        name: getattr(import_module(f"memplan.cli.{at}"), f"{name}_command") for name, (at, _) in COMMANDS.items()
    }
    taking = [name for name, one in functions.items() if name != "lab" and "model" in signature(one).parameters]
    assert taking == completion.MODEL_COMMANDS


def test_completing_imports_the_standard_library_alone():
    script = "import sys, memplan.cli.completion; print({'typer', 'pydantic', 'yaml', 'rich'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize("out", [">&-", "> /dev/full", "< /dev/null 1<&0"])
def test_names_that_nobody_can_be_told_are_no_fault(out):
    environment = {
        **os.environ,
        completion.VARIABLE: "complete_bash",
        "COMP_WORDS": "memplan fit ll",
        "COMP_CWORD": "2",
    }
    command = f"'{sys.executable}' -m memplan {out}"
    ran = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_a_shell_that_does_not_say_what_is_typed_is_told_so(monkeypatch, capsys):
    from memplan.cli import completion

    monkeypatch.setenv("_MEMPLAN_COMPLETE", "complete_bash")
    monkeypatch.delenv("COMP_WORDS", raising=False)
    with pytest.raises(SystemExit, match="2"):
        completion.run()
    assert capsys.readouterr().err.startswith("memplan: completion: ")
