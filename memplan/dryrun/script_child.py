"""The process in which a script runs: ``python -m memplan.dryrun.script_child``, started by ``script_process``.

The script runs as ``python`` would run it: by its own name, with its own arguments, its folder first in the path.
"""

import copy
import ctypes
import logging
import os
import pickle
import re
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from memplan.allocator.settings import parse_alloc_conf
from memplan.dryrun.files.sandboxed_files import SandboxedFiles
from memplan.dryrun.libraries.compiled_modules import CompiledModules
from memplan.dryrun.libraries.library_changes import known_libraries
from memplan.dryrun.libraries.trainer_calls import TrainerCalls
from memplan.dryrun.machine.data_loaders import data_loaders
from memplan.dryrun.machine.known_values import KnownValues
from memplan.dryrun.machine.pretended_machine import pretended_machine
from memplan.dryrun.terms.other_programs import refuse_launcher
from memplan.dryrun.terms.outcome import Ending, Outcome, RefusedError, Request, RunsOut, StepsDoneError
from memplan.dryrun.terms.script_errors import how_it_failed
from memplan.dryrun.terms.script_lines import ScriptLines
from memplan.dryrun.watching.live_recorder import LiveRecorder
from memplan.dryrun.watching.watched_steps import WatchedSteps
from memplan.errors import CannotAnswerError
from memplan.trace.recording.assembly import assembled
from memplan.trace.recording.trace_result import Trace
from memplan.trace.recording.workspaces import cublas_workspace_bytes
from memplan.units import format_bytes

RECURRENT_NOTE = "recurrent layers run place by place, as torch's own do: what cuDNN, which a GPU has for them, keeps and takes is not known"
WHOLE_RUN_NOTE = (
    "no optimizer was stepped and no model's gradients were zeroed: all from the first forward on is one step"
)
UNCOUNTED = {
    r"convolution": "the workspaces that cuDNN takes for convolutions are not counted",
    r"_fft_": "the workspaces that cuFFT takes are not counted",
    r"_?linalg_(?!vector_norm|cross)|cholesky|geqrf|triangular_solve|lu_unpack": "what cuSOLVER and MAGMA take is not counted",
    r"_trilinear": "the products that nn.Bilinear forms inside one operator are not counted",
}
"""What is said of a step whose operators' names begin so: their libraries' workspaces follow from the card and the version."""


_DIES_WITH_ITS_PARENT = 1
"""``PR_SET_PDEATHSIG`` of Linux (prctl(2))."""


def main() -> None:
    """Run the script of the request in standard input; the outcome goes to the descriptor that is named."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):  # it ended while torch was loaded here
        return
    request: Request = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    descriptor = int(sys.argv[1])
    _deliver(run_here(request, descriptor), descriptor)


def _deliver(outcome: Outcome, descriptor: int) -> None:
    """Write what came of the run, and end the process."""
    sys.stdout.flush()  # whoever reads the outcome may end this process at once
    sys.stderr.flush()
    with os.fdopen(descriptor, "wb") as out:
        pickle.dump(outcome, out)
    os._exit(0)  # what the script left running ends with it


def run_here(request: Request, descriptor: int) -> Outcome:
    """Run a script in this process, and return what came of it; it is written at once where the script will not end."""
    started = time.monotonic()
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # tells of every error that it raises besides
    script = request.script if request.is_module else str(Path(request.script).resolve())
    lines = ScriptLines(script, _package_folder(script) if request.is_module else "")
    values = KnownValues(lines, "worst" if request.worst else "balanced")
    recorder = _recorder(request, lines)
    watched = WatchedSteps(recorder, request.steps)
    files = SandboxedFiles(request.scratch, lines, allow_writes=request.allow_writes)
    files.checkpoints.values = values.of
    notes, calls = list[str](), TrainerCalls()
    parts = _Parts(request, started, recorder, values, watched, files, notes, calls)
    watched.finish = lambda: _deliver(_outcome(parts, "done", ""), descriptor)
    ending, message = _ended(
        request,
        script,
        lines,
        (
            files.sandbox(),
            pretended_machine(recorder, values, kernels=request.kernels, ranks=request.ranks),
            data_loaders(request.synthetic),
            known_libraries(
                request.card.compute_capability, files, values, notes, calls, watched.computing_again, request.kernels
            ),
            watched.watching(),
            CompiledModules(request.card.compute_capability, values, notes).compiling(),
        ),
    )
    if ending == "ended" and watched.ended():
        notes.append(WHOLE_RUN_NOTE)
    return _outcome(parts, ending, message)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What has seen a run."""

    request: Request
    started: float
    recorder: LiveRecorder
    values: KnownValues
    watched: WatchedSteps
    files: SandboxedFiles
    notes: list[str]
    calls: TrainerCalls


def _outcome(run: _Parts, ending: Ending, message: str) -> Outcome:
    seconds, recorder, watched = time.monotonic() - run.started, run.recorder, run.watched
    if not recorder.events:
        return Outcome(ending, message, steps=watched.done, seconds=seconds)
    number, trace, peaks = _fullest(recorder, watched.vocab_size, watched.done if run.request.steady else None)
    return Outcome(
        ending=ending,
        message=message,
        trace=trace,
        reported_step=number,
        steps=watched.done,
        persistent_bytes=assembled(recorder, watched.vocab_size).persistent_bytes,
        model=watched.model,
        runs_out=recorder.runs_out,
        handled=tuple(recorder.handled),
        answers=tuple(run.values.answers.values()),
        skipped=tuple(run.files.skipped.items()),
        seconds=seconds,
        peaks=peaks,
        notes=(*run.notes, *_uncounted(trace, recurrent=watched.recurrent), *map(_handled, recorder.handled)),
        told=run.calls.told,
    )


def _uncounted(trace: Trace, *, recurrent: bool) -> list[str]:
    operators = {storage.operation for storage in trace.storages}
    notes = [note for names, note in UNCOUNTED.items() if any(re.match(names, name) for name in operators)]
    return [*([RECURRENT_NOTE] if recurrent else []), *notes]


def _handled(failed: RunsOut) -> str:
    where = f" at {failed.line}" if failed.line else ""
    return (
        f"the script ran out of memory{where} ({failed.operation}, {format_bytes(failed.requested_bytes)}) and went on, as it "
        "handles that itself; the peak is that of all its attempts"
    )


def _package_folder(module: str) -> str:
    """Return the folder of a module's package, where it is installed: its lines are told as a script's are."""
    package = module.partition(".")[0]
    spec = find_spec(package) if package != "torch" else None
    return (spec.submodule_search_locations or [""])[0] if spec else ""


def _recorder(request: Request, lines: ScriptLines) -> LiveRecorder:
    """Return what records the script's memory, of one rank where several share the job."""
    kind, cuda = LiveRecorder, request.kernels == "cuda"
    if request.ranks is not None:
        from memplan.dryrun.machine.pretended_ranks import RankRecorder

        kind = RankRecorder
    return kind(
        request.card,
        lines,
        parse_alloc_conf(request.alloc_conf),
        cublas_bytes=cublas_workspace_bytes(request.card.compute_capability) if cuda else 0,
        workspaces=cuda,
    )


def _ended(request: Request, script: str, lines: ScriptLines, contexts: Any) -> tuple[Ending, str]:
    """Run the script inside contexts; return how it ended, and why."""
    from contextlib import ExitStack

    def late(_: int, __: FrameType | None) -> None:
        where = lines.current()
        raise RefusedError(
            f"still running after {request.timeout:g} s{f', at {where}' if where else ''} (see: --timeout)"
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, request.timeout)
    try:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            _run(request, script)
    except StepsDoneError:
        return "done", ""
    except SystemExit as error:
        return ("ended", "") if error.code in (None, 0) else ("failed", f"it ended itself with {error.code!r}")
    except (RefusedError, CannotAnswerError) as error:
        own, text = lines.innermost_of(error.__traceback__), str(error)
        return "refused", f"{own}: {text}" if own and own not in text else text
    except BaseException as error:
        return how_it_failed(error, lines)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return "ended", ""


def _run(request: Request, script: str) -> None:
    folder = os.getcwd() if request.is_module else str(Path(script).parent)
    before = sys.argv, list(sys.path)
    sys.argv = [script, *request.arguments]
    sys.path[:0] = [folder]
    try:
        if request.is_module:
            refuse_launcher(script)
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _fullest(
    recorder: LiveRecorder, vocab_size: int, requested: int | None = None
) -> tuple[int, Trace, tuple[int, ...]]:
    """Return the step that needs most, the last of equals, or the one asked for; its trace; and the peak of each, with what comes before."""
    seen = copy.copy(recorder)  # what goes while it is summed up, cycles of the last step, is told to the other
    seen.events, seen.marks = list(recorder.events), list(recorder.marks)
    ends = [begin for begin, _ in seen.step_marks[1:]] + [len(seen.events)]
    peaks = _peaks(seen, ends)
    number = max(range(len(peaks)), key=lambda step: (peaks[step], step)) if requested is None else requested
    seen.steady_from, seen.steady_mark = seen.step_marks[number]
    if number + 1 < len(ends):
        event, mark = seen.step_marks[number + 1]
        del seen.events[event:], seen.marks[mark:]
        seen.records = seen.records[: 1 + max((index for _, index in seen.events), default=-1)]
    return number, assembled(seen, vocab_size), peaks


def _peaks(recorder: LiveRecorder, ends: list[int]) -> tuple[int, ...]:
    peaks, live, begin = [], 0, 0
    for end in ends:
        peak = live
        for allocates, index in recorder.events[begin:end]:
            record = recorder.records[index]
            if record.component != "library_workspaces":
                live += record.bytes if allocates else -record.bytes
                peak = max(peak, live)
        peaks.append(peak)
        begin = end
    return tuple(peaks)


if __name__ == "__main__":
    main()
