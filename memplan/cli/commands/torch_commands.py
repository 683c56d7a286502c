"""``memplan trace``, ``run`` and ``validate``: what torch and a script of one's own would do to memory, and whether that is so."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import memplan
from memplan.allocator.settings import parse_alloc_conf
from memplan.catalog.config_keys.parallel_keys import MAXIMUM_GPUS
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import (
    DeviceOptions,
    ModelOptions,
    OutputOptions,
    PlotOptions,
    TorchDevice,
    argument,
    option,
)
from memplan.cli.output import emit, show
from memplan.cli.training_options import TrainingOptions, job_options
from memplan.documents.frozen_values import dataclass
from memplan.documents.writing import say, write_file
from memplan.errors import InvalidFileError
from memplan.host.this_machine import require_torch
from memplan.report.figures import check_drawable

_VALIDATE = "Validate"
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """What is measured and how, or which records are read instead."""

    device: Annotated[
        TorchDevice | None, option(_VALIDATE, "--device KIND", "cuda or cpu; the GPU where there is one.")
    ] = None
    small: Annotated[
        bool | None,
        option(_VALIDATE, "--small/--whole", "Cut the model to 2 layers of width 256 (as on the CPU), or not."),
    ] = None
    steps: Annotated[
        int, option(_VALIDATE, "--steps N", "Training steps; the first is not counted.", min=2, max=100)
    ] = 3
    processes: Annotated[
        int, option(_VALIDATE, "--processes N", "Processes on the CPU that share the model (FSDP2).", min=1, max=8)
    ] = 1
    patience: Annotated[int, option(_VALIDATE, "--patience N", "Seconds without progress that end a run.", min=1)] = 600
    record: Annotated[
        Path | None, option(_VALIDATE, "--record FILE", "Write the measurement; a folder with --plan.")
    ] = None
    replay: Annotated[
        Path | None, option(_VALIDATE, "--replay DIR|FILE", "Check records against today's predictions instead.")
    ] = None
    plan: Annotated[bool, option(_VALIDATE, "--plan", "Run what is not yet recorded of the device's whole plan.")] = (
        False
    )
    calibrate: Annotated[
        Path | None, option(_VALIDATE, "--calibrate DIR|FILE", "What records say of a machine; -o FILE is a --profile.")
    ] = None
    alloc_conf: Annotated[str, option(_VALIDATE, "--alloc-conf CONF", "As PYTORCH_CUDA_ALLOC_CONF.")] = ""


@command(example="memplan validate smollm2-135m --config muon --device cpu")
def validate_command(
    model: Annotated[ModelOptions, without("beside", "trainer_version")],
    validate: ValidateOptions,
    training: TrainingOptions,
    output: OutputOptions,
) -> int:
    """Is that true here? Real training steps: predicted, traced and measured.

    Exit code 0: all agrees; 1: something does not; 3: nothing was measured.
    """
    from memplan.library.validation_runs import ValidateRequest, validate_document

    request = ValidateRequest(
        model=model.model,
        shapes=model.shapes,
        config=training.chosen,
        overrides=training.overrides(),
        **{name: getattr(validate, name) for name in ValidateOptions.__dataclass_fields__},
        command=" ".join(["memplan", *sys.argv[1:]]),
        quiet=output.quiet,
    )
    before = signal.signal(signal.SIGTERM, _interrupted)
    try:
        document = validate_document(request, output.catalog(), output.unit)
    except KeyboardInterrupt:
        say("interrupted; nothing is left running")
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return emit(document, output)


def _interrupted(*_: Any) -> None:
    """Treat a request to end as an interrupt, so that everything is cleaned up."""
    raise KeyboardInterrupt


ONE = "give one thing to trace: MODEL, shapes, --hf DIR, --module PKG.MOD:FACTORY or --history FILE"
_TRACE = "Trace"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is traced in place of MODEL, and what is shown of it."""

    hf: Annotated[Path | None, option(_TRACE, "--hf DIR", "transformers' own code for the config.json in DIR.")] = None
    module: Annotated[str | None, option(_TRACE, "--module PKG.MOD:FACTORY", "Your own nn.Module.")] = None
    history: Annotated[Path | None, option(_TRACE, "--history FILE", "Replay a memory history exported as JSON.")] = (
        None
    )
    timeline: Annotated[Path | None, option(_TRACE, "--timeline FILE", "The step's timeline, as .svg or .json.")] = None
    alloc_conf: Annotated[str, option(_TRACE, "--alloc-conf CONF", "As PYTORCH_CUDA_ALLOC_CONF.")] = ""
    largest: Annotated[int, option(_TRACE, "--largest N", "Tensors to list at the peak.", min=0, max=1000)] = 10


@command(example="memplan trace llama-8b --config qlora --gpu rtx4090")
def trace_command(
    model: Annotated[ModelOptions, without("beside", "trainer_version")],
    traced: TraceOptions,
    device: Annotated[DeviceOptions, without("gpus", "profile", "host_memory")],
    training: TrainingOptions,
    plot: PlotOptions,
    output: OutputOptions,
) -> int:
    """What would torch do, exactly? A real training step on tensors without memory; no GPU needed.

    Shows formula beside trace. Without --config: bf16-adamw. Needs torch (pip install '.[torch]' in a checkout).
    """
    if traced.history is not None:
        given = [model.model, traced.hf, traced.module, *model.shapes.given()]
        if any(value is not None for value in given) or plot.plot is not None:
            raise InvalidFileError([ONE])
        if training != TrainingOptions() or device != DeviceOptions() or traced.timeline is not None:
            raise InvalidFileError(
                ["--history replays a run as it was: leave out a GPU, a timeline and training options"]
            )
        return emit(memplan.replay(traced.history, alloc_conf=traced.alloc_conf).document(output.unit), output)
    timeline = timeline_form(traced.timeline)
    if traced.module is not None:
        sys.path.insert(0, "")  # as python -m has it, so that modules in the working directory are there
    parse_alloc_conf(traced.alloc_conf)
    answer = memplan.trace(
        model.model,
        hf=traced.hf,
        module=traced.module,
        alloc_conf=traced.alloc_conf,
        largest=traced.largest,
        progress=None if output.quiet else say,
        **job_options(output, training, model, device),
    )
    if traced.timeline is not None and timeline is not None:
        write_file(traced.timeline, answer.timeline(timeline))
    return show(answer, output, plot=plot)


def timeline_form(path: Path | None) -> Literal["svg", "json"] | None:
    """Return what a timeline is written as.

    Raises:
        CannotAnswerError: Nothing can be traced here.
        InvalidFileError: The file's name says nothing that a timeline can be.
    """
    require_torch()
    if path is not None and path.suffix not in (".svg", ".json"):
        raise InvalidFileError([f"--timeline {path}: expected a name that ends in .svg or .json"])
    if path is not None and path.suffix == ".svg":
        check_drawable(path)
    return None if path is None else "svg" if path.suffix == ".svg" else "json"


_RUN = "Run"


LONGEST_RUN = 7 * 86_400


@dataclass(frozen=True, slots=True)
class RunOptions:
    """A script with its own arguments, and how it is run."""

    words: Annotated[
        list[str] | None, argument(_RUN, "SCRIPT [-- ARGS]", "The script, and what it is to be given.")
    ] = None
    module: Annotated[str | None, option(_RUN, "--module -m MODULE", "A module in place of SCRIPT, as python -m.")] = (
        None
    )
    gpus: Annotated[
        int | None, option(_RUN, "--gpus -n N", "Processes, as torchrun starts them.", min=1, max=MAXIMUM_GPUS)
    ] = None
    rank: Annotated[int, option(_RUN, "--rank R", "Which of them runs.", min=0)] = 0
    synthetic: Annotated[
        int | None, option(_RUN, "--synthetic TOKENS", "Rows of so many tokens in place of the loader's.", min=1)
    ] = None
    check: Annotated[
        Path | None, option(_RUN, "--check FILE", "A budget, one of whose jobs bears the script's name.")
    ] = None
    steps: Annotated[int, option(_RUN, "--steps N", "Training steps to take.", min=1, max=100)] = 3
    timeline: Annotated[
        Path | None, option(_RUN, "--timeline FILE", "The fullest step's timeline, as .svg or .json.")
    ] = None
    timeout: Annotated[
        float, option(_RUN, "--timeout S", "Seconds that the script may take.", min=1, max=LONGEST_RUN)
    ] = 600
    worst: Annotated[bool, option(_RUN, "--worst", "Masks hold everything, and tokens go to the same experts.")] = False
    allow_writes: Annotated[bool, option(_RUN, "--allow-writes", "Let the script write its files.")] = False
    alloc_conf: Annotated[str, option(_RUN, "--alloc-conf CONF", "As PYTORCH_CUDA_ALLOC_CONF.")] = ""
    largest: Annotated[int, option(_RUN, "--largest N", "Tensors to list at the peak.", min=0, max=1000)] = 10


@command(example="memplan run train.py --gpu rtx4090 -- --batch-size 8")
def run_command(
    script: RunOptions,
    device: Annotated[DeviceOptions, without("profile", "gpus", "host_memory")],
    output: OutputOptions,
) -> int:
    """What would my own script need? It runs here, against a GPU that is not, on tensors without memory.

    It runs the script's code, as python would. Exit code 1: it would run out of memory; 2: it fails by itself;
    3: it does what cannot be pretended. Needs torch.
    """
    words = list(script.words or ())
    if script.module is None and not words:
        raise InvalidFileError(["give a SCRIPT, or a module with -m"])
    form = timeline_form(script.timeline)
    if not output.quiet:
        say("running the script's own code, on tensors without memory")
    passed = {name: getattr(script, name) for name in script.__slots__ if name not in ("words", "module", "timeline")}
    answer = memplan.run(
        words.pop(0) if script.module is None else script.module,
        words,
        module=script.module is not None,
        gpu=device.gpu,
        gpu_memory=device.gpu_memory,
        quiet=output.quiet,
        catalog=output.catalog_path,
        **passed,
    )
    if script.timeline is not None and form is not None:
        write_file(script.timeline, answer.timeline(form))
    return show(answer, output)
