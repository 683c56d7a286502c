"""``memplan list`` and ``memplan show``: what memplan knows, read back with its sources."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from memplan.cli.grouped_command import command
from memplan.cli.option_groups import OutputOptions
from memplan.cli.output import emit


class Section(StrEnum):
    """Kinds of catalog entries."""

    gpus = "gpus"
    models = "models"
    formats = "formats"
    gradients = "gradients"
    optimizers = "optimizers"
    configs = "configs"
    stacks = "stacks"


@dataclass(frozen=True, slots=True)
class ListOptions:
    """What to list."""

    kind: Annotated[Section, typer.Argument(metavar="KIND", help=f"What to list: {', '.join(Section)}.")]


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """What to show."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="A name or alias of any kind, or any MODEL, files too.")]


@command(example="memplan list gpus")
def list_command(listed: ListOptions, output: OutputOptions) -> int:
    """List what the catalog holds of a kind."""
    from memplan.report.catalog_answer import list_document

    return emit(list_document(listed.kind.value, output.catalog(), output.unit), output)


@command(example="memplan show q4-0")
def show_command(shown: ShowOptions, output: OutputOptions) -> int:
    """Show one entry with its sources, or a model with its parameters by role."""
    from memplan.library.shown_document import show_document

    return emit(show_document(shown.name, output.catalog(), output.unit), output)
