"""``memplan max`` and ``memplan where``: the largest that a GPU holds, the fewest GPUs for a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

import memplan
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import (
    SHAPES,
    DetailOptions,
    DeviceOptions,
    ModelOptions,
    OutputOptions,
    PlotOptions,
    VerdictOptions,
    option,
)
from memplan.cli.output import Waiting, emit, refuse_picture, show
from memplan.cli.training_options import TrainingOptions, job_options
from memplan.errors import InvalidFileError
from memplan.library.lookup import Overrides
from memplan.library.several.capacity import Sizes

Accounting = Literal["notes-scale", "notes-precision", "notes-min-gpus"]
"""Rules that the notes count by."""


_SEARCH = "Search"


AccountingOption = Annotated[
    Accounting | None,
    option(
        _SEARCH,
        "--accounting RULE",
        f"Answer by a rule of the notes, the published tables that memplan tables checks: {', '.join(get_args(Accounting))}.",
    ),
]
"""Whose rule counts."""


@command(example="memplan max llama-8b --for sequence --qlora --gpu rtx4090")
def max_command(
    *,
    model: Annotated[ModelOptions, without(*SHAPES)],
    what: Annotated[
        Sizes | None,
        option(_SEARCH, "--for WHAT", f"{', '.join(get_args(Sizes))}. Without MODEL: parameters; with one: batch."),
    ] = None,
    accounting: AccountingOption = None,
    device: Annotated[DeviceOptions, without("profile")],
    training: TrainingOptions,
    verdict: VerdictOptions,
    plot: PlotOptions,
    detail: DetailOptions,
    output: OutputOptions,
) -> int:
    """How large can it be? The largest model for each GPU; of MODEL, its batch, sequence, adapter rank or layers.

    Without --gpu: every GPU of the catalog. Without --config: qlora, lora, bf16-adamw and tier3; for MODEL
    bf16-adamw (lora for a rank). What is answered FITS, and one more does not.
    """
    what = what or ("batch" if model.model is not None else "parameters")
    if accounting is not None:
        refuse_picture(plot, "a rule of the notes (--accounting) has")
        sought = model.model if what == "parameters" else f"--for {what}"
        given = {str(sought): sought, "--with": model.beside or None, "--trainer-version": model.trainer_version}
        return _max_by_notes(accounting, given, device, training, output)
    options = job_options(output, training, device=device)
    options["beside"] = tuple(model.beside or ())
    options["trainer_version"] = model.trainer_version
    with Waiting("max") as waiting:
        answer = memplan.largest(model.model, what, progress=waiting, **options)
    return show(answer, output, verdict, plot, detail)


def _max_by_notes(
    rule: Accounting,
    given: Mapping[str, object],
    device: DeviceOptions,
    training: TrainingOptions,
    output: OutputOptions,
) -> int:
    """Write the largest models by a rule of the notes."""
    from memplan.published.notes_answers import Cards, largest_by_notes
    from memplan.report.largest.accounting_answer import max_by_notes_document

    _refuse_details(rule, training.overrides(), {**given, "--host-memory": device.host_memory})
    cards = Cards(device.gpu, device.gpu_memory, device.gpus)
    rows = largest_by_notes(rule, training.chosen, cards, output.catalog())
    return emit(max_by_notes_document(rows), output)


def _refuse_details(accounting: Accounting, overrides: Overrides, others: Mapping[str, object]) -> None:
    """Refuse what no rule of the notes takes into account."""
    options = {
        **others,
        "--stack": overrides.stack,
        "--micro-batch-size": overrides.batch,
        "--sequence-length": overrides.length,
        "--checkpointing": overrides.checkpointing,
        **{f"--set {setting}": setting for setting in overrides.settings},
    }
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InvalidFileError(
            [f"--accounting {accounting}: the notes' rule does not take {', '.join(given)}; leave it out"]
        )


@command(example="memplan where llama-70b --config tier1")
def where_command(
    *,
    model: ModelOptions,
    device: Annotated[DeviceOptions, without("gpus", "profile")],
    price: Annotated[
        Path | None,
        option(
            _SEARCH,
            "--price FILE",
            "Your own prices, GPU: price of an hour, as YAML or JSON; the cheapest comes first.",
        ),
    ] = None,
    accounting: AccountingOption = None,
    training: TrainingOptions,
    detail: DetailOptions,
    output: OutputOptions,
) -> int:
    """Which GPU, and how many? The fewest of each kind, as fit --gpus plans them; with --price the cheapest.

    Without --config: bf16-adamw. Where a config is not planned on several GPUs, a bound from pooled memory is
    shown, which is no answer. Exit code 0: it fits; 1: on none; 3: only bounds.
    """
    if accounting is not None:
        return _where_by_notes(accounting, model, device, price, training, output)
    with Waiting("where") as waiting:
        job = job_options(output, training, model, device)
        answer = memplan.where(model.model, price=price, progress=waiting, **job)
    return show(answer, output, detail=detail)


def _where_by_notes(
    rule: Accounting,
    model: ModelOptions,
    device: DeviceOptions,
    price: Path | None,
    training: TrainingOptions,
    output: OutputOptions,
) -> int:
    """Write how many GPUs a model takes by a rule of the notes."""
    from memplan.library.lookup import find_model
    from memplan.published.notes_answers import fewest_by_notes, nominal_billions
    from memplan.report.largest.accounting_answer import where_by_notes_document

    given = {"--gpu": device.gpu, "--gpu-memory": device.gpu_memory, "--host-memory": device.host_memory}
    others: dict[str, object] = {**given, "--price": price, "--with": model.beside or None}
    others["--trainer-version"] = model.trainer_version
    catalog = output.catalog()
    known = find_model(model.model, model.shapes, catalog)
    _refuse_details(rule, training.overrides(), others)
    rows = fewest_by_notes(rule, known, training.chosen, catalog)
    return emit(where_by_notes_document(known.spec.name, nominal_billions(known), rows), output)
