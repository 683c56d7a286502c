"""``memplan frontier``: what batch and sequence length?"""

from pathlib import Path
from typing import Annotated, Literal, cast

import memplan
from memplan.cli.grid_options import GridOptions
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import (
    OUTPUT,
    DeviceOptions,
    ModelOptions,
    OutputOptions,
    PlotOptions,
    VerdictOptions,
    option,
)
from memplan.cli.output import deliver, draw, emit_as
from memplan.cli.training_options import TrainingOptions, job_options, whole_number
from memplan.documents.frozen_values import dataclass
from memplan.errors import InvalidFileError, printable
from memplan.report.document import Format
from memplan.report.figures import check_drawable, picture_of


@dataclass(frozen=True, slots=True)
class CellOptions:
    """The grid, and how it is written."""

    batches: Annotated[str | None, option("Grid", "--batches 1,2,4", "Micro-batches of the grid.")] = None
    lengths: Annotated[str | None, option("Grid", "--lengths 512,4k", "Sequence lengths of the grid; 4k is 4096.")] = (
        None
    )
    form: Annotated[
        Literal[Format, "svg"] | None,
        option(
            OUTPUT,
            "--format -f FORMAT",
            "table (default), plain, json, csv, md, or svg, a heat map, as for an --output that ends in .svg.",
        ),
    ] = None


@command(example="memplan frontier llama-8b --gpu h100 --config bf16-adamw-8bit")
def frontier_command(
    model: ModelOptions,
    device: Annotated[DeviceOptions, without("profile")],
    training: Annotated[TrainingOptions, without("batch", "length")],
    layout: Annotated[GridOptions, without("rank")],
    grid: CellOptions,
    verdict: VerdictOptions,
    plot: PlotOptions,
    output: Annotated[OutputOptions, without("form")],
) -> int:
    """What batch and sequence length? A grid, and the exact line between what fits and what does not.

    Without --config: bf16-adamw. --gpus pool their memory, or with degrees (--tp 8, --zero 3) share the job. Exit code 1:
    nothing in the grid fits.
    """
    form = output.format_name(grid.form)
    batches, lengths = numbers("--batches", grid.batches), numbers("--lengths", grid.lengths)
    options = job_options(output, layout.over(training), model, layout.counted(device))
    answer = memplan.frontier(model.model, batches=batches, lengths=lengths, **options)
    document = answer.document(output.unit, strict=verdict.strict, full=output.whole, tidy=form == "csv")
    draw(answer, plot)
    if form == "svg" or (output.file is not None and output.file.suffix == ".svg" and not output.as_json):
        check_drawable(output.file or Path("map.svg"))
        deliver(picture_of(answer.figure(), ".svg").decode(), output.file)
        return document.exit_code
    return emit_as(document, cast("Format", form), output)


def numbers(option_name: str, text: str | None) -> tuple[int, ...]:
    """Return the whole numbers of a list such as ``1,2,4`` or ``2k,4k``; nothing for no list.

    Raises:
        InvalidFileError: Something else.
    """
    values = () if text is None else tuple(whole_number(part) for part in text.split(","))
    if not all(values):
        raise InvalidFileError(
            [f"{option_name} {printable(text or '', 60)}: expected whole numbers, such as 1,2,4 or 2k,4k"]
        )
    return values
