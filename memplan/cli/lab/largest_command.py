"""``memplan lab largest``: the largest model that fits a GPU with all its parameters trained, really trained there."""

from datetime import date
from typing import TYPE_CHECKING, Annotated, Any

from memplan.catalog.catalog import Catalog
from memplan.catalog.stack_versions import DEFAULT_STACK
from memplan.cli.grouped_command import command, without
from memplan.cli.lab.experiment_options import NEEDS, RUN, RunOptions, typed_command
from memplan.cli.option_groups import ModelOptions, OutputOptions, option
from memplan.cli.output import Progress, deliver, emit
from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.host.this_machine import require_torch
from memplan.library.lookup import Overrides, find_device, find_model, find_setup, require_one_gpu, require_own_loop
from memplan.library.runs.largest_trained import CPU_PARAMETERS, Candidate, largest_candidate, planned_candidate
from memplan.report.training_records import largest_run_document, record_text

if TYPE_CHECKING:
    from memplan.lab.training.loop import Run

VALIDATION_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class LargestOptions:
    """What is trained within how much memory, and for how long."""

    config: Annotated[str, option(RUN, "--config -c NAME|FILE", "Training config of all parameters.")] = (
        "q6-muon-ternary"
    )
    gpu_memory: Annotated[str, option(RUN, "--gpu-memory SIZE", "What the process may take of the GPU.")] = "24GiB"
    steps: Annotated[int, option(RUN, "--steps", "Optimizer steps.", min=2)] = 20
    batch: Annotated[int, option(RUN, "--batch -b", "Sequences per step.", min=1)] = 1
    length: Annotated[int, option(RUN, "--length -s", "Tokens of each.", min=2)] = 2048
    lr: Annotated[float, option(RUN, "--lr", "Largest rate of Muon.", min=0.0)] = 0.005
    adamw_lr: Annotated[float, option(RUN, "--adamw-lr", "Largest rate of AdamW.", min=0.0)] = 0.001
    seed: Annotated[int, option(RUN, "--seed", "Of weights, batches and rounding.", min=0, max=2**63 - 1)] = 0
    settings: Annotated[
        list[str] | None, option(RUN, "--set KEY=VALUE", "Any key of a training config; repeatable.")
    ] = None


@command(example="memplan lab largest --layers 2 --hidden 256 --heads 4 --gpu-memory 1GiB --length 128")
def largest_command(
    model: Annotated[ModelOptions, without("beside", "online")],
    requested: LargestOptions,
    run: Annotated[RunOptions, without("plot", "seed")],
    output: OutputOptions,
) -> int:
    """Train the largest model that fits so much memory, held to it, all parameters from random weights.

    Without MODEL: the largest of the catalog that is planned to fit. The loss must fall, and the bytes be the planned ones.
    """
    require_torch(NEEDS)
    catalog = output.catalog()
    candidate = _candidate(model, requested, catalog)
    require_own_loop(require_one_gpu(candidate.setup, "memplan lab largest"), "memplan lab largest")
    if run.device.value == "cpu" and candidate.parameters > CPU_PARAMETERS:
        raise CannotAnswerError(
            f"{candidate.model.spec.name} has {candidate.parameters:,} parameters, too many to train on a CPU; give --device "
            "cuda, or a smaller MODEL, --gpu-memory or --layers"
        )
    record = _trained(candidate, requested, run, output.quiet)
    if run.out is not None:
        deliver(record_text(record), run.out)
    return emit(largest_run_document(record, output.unit), output)


def _candidate(model: ModelOptions, requested: LargestOptions, catalog: Catalog) -> Candidate:
    device = find_device(None, requested.gpu_memory, 1, catalog)
    settings = ("activation_checkpointing=full", "kernels.loss=chunked", *(requested.settings or ()))
    overrides = Overrides(requested.batch, requested.length, None, settings, stack=DEFAULT_STACK)
    if model.model is None and not model.shapes.given():
        return largest_candidate(catalog.models.entries, requested.config, overrides, device, catalog)
    known = find_model(model.model, model.shapes, catalog)
    return planned_candidate(known, find_setup(requested.config, overrides, catalog, known), device)


def _trained(candidate: Candidate, requested: LargestOptions, run: RunOptions, quiet: bool) -> dict[str, Any]:
    from memplan.lab.training.loop import Trainer, TrainingOptions, library_text, trained
    from memplan.lab.training.run_bytes import MemoryLimit, limit_record, refused_if_out_of_memory
    from memplan.lab.training.trained_model import prepare
    from memplan.lab.training.training_record import TrainingRequest, evidence

    device, seed = run.device.value, requested.seed
    prepare(device, run.threads)
    options = TrainingOptions(
        steps=requested.steps,
        lr=requested.lr,
        adamw_lr=requested.adamw_lr,
        rounding="golden",
        matrix_options={"momentum": 0.8},
        device=device,
        validation_windows=VALIDATION_WINDOWS,
    )
    limit, text = MemoryLimit(device, candidate.capacity_bytes), library_text()
    progress = Progress(f"{candidate.model.spec.name}, {candidate.setup.label}", requested.steps)

    def on_step(done: int, loss: float) -> None:
        if done == 1:
            limit.forget()
        if not quiet:
            progress.loss(done, loss)

    with refused_if_out_of_memory(candidate.plan):
        limit.begin()
        trainer = Trainer(candidate.model, candidate.setup, options, text, seed)
        result: Run = trained(trainer, seed, on_step)
    if not quiet:
        progress.end()
    request = TrainingRequest(candidate.setup.name, (), typed_command(), date.today().isoformat())
    record = evidence(request, candidate.model, candidate.setup, options, text, [result], None)
    return {**record, "memory": limit_record(limit, candidate.plan)}
