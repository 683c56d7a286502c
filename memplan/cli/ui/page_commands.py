"""``memplan report`` and ``memplan ui``: the answer as one page, in a file or beside controls on this machine."""

import sys
from collections.abc import Iterator, Sequence
from shlex import join
from typing import Annotated

import memplan
from memplan.cli.grid_options import GridOptions
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import DeviceOptions, ModelOptions, OutputOptions, VerdictOptions, option
from memplan.cli.output import deliver, emit
from memplan.cli.training_options import TrainingOptions, job_options
from memplan.documents.escaping import json_text
from memplan.documents.writing import say
from memplan.report.plans.plan_answer import exit_code


@command(example="memplan ui")
def ui_command(
    *,
    port: Annotated[int, option("Server", "--port N", "On 127.0.0.1; 0 for one that is free.", min=0, max=65535)] = 0,
    output: Annotated[OutputOptions, without("form", "units", "file", "quiet")],
) -> int:
    """A page on this machine whose answer follows sliders. It shows the command line that asks the same.

    Served on 127.0.0.1 alone, at the address that is printed, as JSON too, until it is interrupted. Names of the
    catalog are all that the page can ask for; it runs and writes nothing. Needs .[ui].
    """
    from memplan.cli.ui.serve import serve

    def tell(address: str) -> None:
        deliver(json_text({"schema": "memplan/ui/1", "address": address}) if output.as_json else f"{address}\n", None)

    serve(port, output.catalog_path, tell)
    return 0


@command(example="memplan report llama-8b --gpu rtx4090 --qlora -o report.html")
def report_command(
    model: ModelOptions,
    device: DeviceOptions,
    training: TrainingOptions,
    grid: Annotated[GridOptions, without("rank")],
    verdict: VerdictOptions,
    output: Annotated[OutputOptions, without("form", "units")],
) -> int:
    """The whole answer as one HTML file. It has the step to hover and zoom, components, what-ifs, formulas, sources.

    It loads nothing from anywhere, is light or dark as its reader is, and prints. Without --config: bf16-adamw.
    Without -o it goes to standard output; with --json it is the plan's JSON instead, as fit prints it.
    """
    plan = memplan.plan(model.model, **job_options(output, grid.over(training), model, grid.counted(device)))
    if output.as_json:
        return emit(plan.document(strict=verdict.strict), output)
    deliver(plan.html(join(["memplan", "fit", *_fit_arguments(sys.argv[2:])])), output.file)
    if output.file is not None and not output.quiet:
        say(f"{output.file} is written. {plan.sentence}")
    return exit_code(plan.memory, verdict.strict)


def _fit_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of the same question to ``memplan fit``, which prints its answer."""
    skipped = False
    for argument in arguments:
        if skipped or argument in ("-o", "--output", "-q", "--quiet"):
            skipped = not skipped and argument in ("-o", "--output")
        elif not argument.startswith(("--output=", "-o")):
            yield argument
