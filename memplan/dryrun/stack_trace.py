"""The trace of a stack's own training step: by a program around its code, or by a script as its users write one.

unsloth patches what it imports, asks which GPU there is and chooses by the memory that is free; so a script of it is run
whole, in a process of its own.
"""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from memplan.dryrun.script_process import run_script
from memplan.dryrun.stack_scripts.unsloth_job import PACKAGES, written_job
from memplan.dryrun.terms.outcome import Card, Request
from memplan.errors import CannotAnswerError
from memplan.trace.recording.trace_result import Trace
from memplan.trace.stacks import registry
from memplan.trace.stacks.registry import STEPS, StackInputs

SCRIPTED = ("unsloth",)
"""Stacks whose code is traced by a script."""
SCRIPT = Path(__file__).parent / "stack_scripts" / "unsloth_sft.py"
TIMEOUT_SECONDS = 900.0
CARD_BYTES = 80 * 1024**3
"""Memory of the card where nothing says which."""


def stack_trace(name: str, inputs: StackInputs, *, workspaces: bool = True) -> tuple[Trace, str]:
    """Return the trace of a stack's own training step, and what was run, in words.

    Args:
        workspaces: Whether what CUDA's libraries hold is added to the events; it is in no requested figure.

    Raises:
        CannotAnswerError: A package is missing, or the library cannot do the job.
    """
    if name not in SCRIPTED:
        return registry.trace_stack(name, inputs, workspaces=workspaces)
    if inputs.setup.config.parallel.gpus > 1:
        raise CannotAnswerError(f"parallel.data: the code of stack {name} is traced on one GPU only")
    packages = ", ".join(f"{package} {number}" for package, number in versions(name).items())
    total = inputs.card_bytes or CARD_BYTES
    with TemporaryDirectory(prefix="memplan-stack-") as folder:
        job = written_job(inputs, Path(folder))
        card = Card("NVIDIA GPU", inputs.compute_capability, total, total)
        request = Request(str(SCRIPT), card, (job,), steps=STEPS, timeout=TIMEOUT_SECONDS, steady=True)
        outcome = run_script(request, quiet=True)
    if outcome.trace is None or outcome.ending not in ("done", "ended"):
        raise CannotAnswerError(f"the code of stack {name} {outcome.ending}: {outcome.message}")
    return outcome.trace, f"TRL's SFTTrainer as {name} patches it, on {outcome.model} ({packages})"


def versions(name: str) -> dict[str, str]:
    """Return the versions of the packages that a stack's code imports, and of torch.

    Raises:
        CannotAnswerError: One is missing.
    """
    if name not in SCRIPTED:
        return registry.versions(name)
    result = {}
    for package in (*PACKAGES, "torch"):
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            raise CannotAnswerError(
                f"tracing stack {name} needs {package}: python tests/stacks/survey.py {name} --jobs 1 in a checkout of memplan"
            ) from None
    return result
