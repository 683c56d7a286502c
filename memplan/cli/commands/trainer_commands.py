"""``memplan import`` and ``memplan emit``: what a trainer's own file says, and a starting file for it."""

from typing import Annotated

import memplan
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import DeviceOptions, ModelOptions, OutputOptions, argument, option
from memplan.cli.output import deliver, emit
from memplan.cli.training_options import TrainingOptions, job_options
from memplan.documents.frozen_values import dataclass
from memplan.documents.opening import is_file, usable_path
from memplan.documents.writing import say
from memplan.errors import InvalidFileError

_FILES = "Files"


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """A trainer's file or a launch command, and what goes with it."""

    paths: Annotated[
        list[str] | None,
        argument(
            _FILES,
            "FILE | -- COMMAND",
            "A trainer's YAML, JSON, TOML or Python file, a launch script or notebook; or, after --, a launch command.",
        ),
    ] = None
    beside: Annotated[
        list[str] | None,
        option(_FILES, "--with FILE", "An accelerate YAML or DeepSpeed JSON that goes with it; repeatable."),
    ] = None
    gpus: Annotated[int | None, option(_FILES, "--gpus -n N", "How many GPUs share the job.", min=1, max=16_384)] = None
    trainer: Annotated[
        str | None, option(_FILES, "--from TRAINER", "Whose file it is, where its keys do not tell.")
    ] = None
    version: Annotated[
        str | None, option(_FILES, "--trainer-version V", "That trainer's version; else the newest read.")
    ] = None


@command(example="memplan import axolotl.yaml --with ds_z3.json --gpus 8")
def import_command(files: ImportOptions, output: Annotated[OutputOptions, without("units")]) -> int:
    """What does my trainer's file say? What was used, assumed and refused of it, in memplan's keys.

    Exit code 0: a job that can be planned, or a launcher's file; 2: no training job; 3: something is missing.
    """
    words = files.paths or []
    if not words:
        raise InvalidFileError(["no file given: name a trainer's file, or a command after --"])
    one = len(words) == 1 and (" " not in words[0] or is_file(usable_path(words[0])))
    answer = memplan.import_file(
        words[0] if one else words,
        beside=tuple(files.beside or ()),
        gpus=files.gpus,
        trainer=files.trainer,
        trainer_version=files.version,
        catalog=output.catalog(),
    )
    document = answer.document()
    if document.exit_code:
        say(document.data["answer"])
    return emit(document, output)


@command(example="memplan emit llama-8b --as axolotl --qlora -b 2 -s 4k --gpu rtx4090 -o axolotl.yaml")
def emit_command(
    *,
    model: Annotated[ModelOptions, without("beside", "trainer_version")],
    device: Annotated[DeviceOptions, without("profile")],
    training: Annotated[TrainingOptions, without("stack")],
    trainer: Annotated[
        str, option("File", "--as TRAINER", "Whose keys: axolotl, trl, llama-factory, torchtitan, deepspeed.")
    ] = "trl",
    output: Annotated[OutputOptions, without("as_json", "form", "units", "quiet")],
) -> int:
    """How do I say that in my trainer's file? A starting file that reads back to the same bytes.

    Exit code 0: it is written; 3: that trainer has no keys for it.
    """
    options = job_options(output, training, model, device)
    deliver(memplan.emit(model.model, trainer, **options), output.file)
    return 0
