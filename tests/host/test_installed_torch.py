"""torch without numpy is no reason for a warning, and no bug where warnings are errors."""

import subprocess
import sys

import pytest

WITHOUT_NUMPY = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def run(program: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", "-c", WITHOUT_NUMPY + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_torch_alone_warns_so_that_there_is_something_to_ignore():
    assert "Failed to initialize NumPy: No module named 'numpy'" in run("import torch").stderr


@pytest.mark.one_in(4)
@pytest.mark.parametrize("package", ["trace.reference.decoder", "lab.training.loop", "measure.task", "muon"])
def test_a_missing_numpy_is_not_mentioned(package):
    ran = run(f"import memplan.{package}, torch; torch.zeros(2).sum().item()")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_any_other_failure_of_numpy_is_heard():
    program = "import memplan.lab, warnings; warnings.warn('Failed to initialize NumPy: _ARRAY_API not found')"
    assert "UserWarning: Failed to initialize NumPy: _ARRAY_API" in run(program).stderr
