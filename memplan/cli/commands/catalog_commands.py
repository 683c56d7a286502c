"""``memplan list`` and ``memplan show``: what memplan knows, read back with its sources."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from memplan.cli import option_groups as o
from memplan.cli.output import emit, unit_text
from memplan.library.lookup import open_catalog


class Section(StrEnum):
    """Kinds of catalog entries."""

    gpus = "gpus"
    models = "models"
    formats = "formats"
    gradients = "gradients"
    optimizers = "optimizers"
    configs = "configs"


def list_command(
    kind: Annotated[Section, typer.Argument(help="What to list.")],
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """List what the catalog holds of a kind."""
    from memplan.report.catalog_answer import list_document

    catalog = open_catalog(catalog_path)
    raise typer.Exit(emit(list_document(kind.value, catalog, unit_text(units)), form, as_json, output, quiet))


def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name or alias of any kind, or any MODEL, files too.")],
    as_json: o.JsonOption = False,
    form: o.FormatOption = o.OutputFormat.table,
    output: o.OutputOption = None,
    units: o.UnitsOption = None,
    quiet: o.QuietOption = False,
    catalog_path: o.CatalogOption = None,
) -> None:
    """Show one entry with its sources, or a model with its parameters by role."""
    from memplan.library.shown_document import show_document

    catalog = open_catalog(catalog_path)
    raise typer.Exit(emit(show_document(name, catalog, unit_text(units)), form, as_json, output, quiet))
