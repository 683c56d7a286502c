"""``memplan schema`` and ``memplan doctor``: for programs that read answers, and for bug reports."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal, get_args

import typer

import memplan
from memplan.catalog.catalog import SECTIONS, Catalog
from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import OutputOptions
from memplan.cli.output import emit, emit_as
from memplan.host.this_machine import nvidia_devices
from memplan.report.document import Document, Table
from memplan.units import format_bytes

SchemaName = Literal[
    "plan", "fit", "grid", "ranks", "layouts", "inference", "max", "where", "largest", "frontier", "suggest",
    "compare", "recommend", "check", "diff", "why", "import", "rewrite", "evidence", "literature", "validation",
    "experiment", "list", "tables", "training", "budget", "baseline", "gpu", "format", "gradient", "optimizer",
    "model", "stack", "published",
]  # fmt: skip
"""Things that have a JSON Schema."""


@command(example="memplan schema training -o training.schema.json")
def schema_command(
    *,
    name: Annotated[
        SchemaName, typer.Argument(metavar="NAME", help=f"Whose schema to print: {', '.join(get_args(SchemaName))}.")
    ] = "plan",
    output: Annotated[OutputOptions, without("form", "units", "quiet", "catalog_path")],
) -> int:
    """Print a JSON Schema: of answers, of training configs, or of catalog entries."""
    from memplan.report.json_schemas import schema_of

    return emit_as(Document(schema_of(name)), "json", output)


@command(example="memplan doctor --json")
def doctor_command(output: Annotated[OutputOptions, without("units")]) -> int:
    """Print versions, the catalog in use, and the device that is seen."""
    return emit(doctor_document(output.catalog()), output)


PACKAGES = ("typer", "rich", "pydantic", "pyyaml", "torch", "transformers")


def doctor_document(catalog: Catalog) -> Document:
    """Return versions, the catalog in use and the devices seen."""
    packages = {name: _installed(name) for name in PACKAGES}
    counts = {kind: len(catalog.section(kind)) for kind in SECTIONS}
    seen = nvidia_devices()
    devices = [{"name": device.name, "memory_bytes": device.memory_bytes} for device in seen]
    data = {
        "schema": "memplan/doctor/1",
        "memplan_version": memplan.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "catalog": {
            "path": str(catalog.root),
            "extra": str(catalog.extra) if catalog.extra else None,
            "hash": catalog.hash,
            "entries": counts,
        },
        "devices": devices,
    }
    rows = [("memplan", memplan.__version__), ("python", platform.python_version()), ("platform", platform.platform())]
    rows += [(name, number or "not installed") for name, number in packages.items()]
    rows += [("catalog", str(catalog.root)), ("catalog hash", catalog.hash[:16])]
    rows += [("your catalog", str(catalog.extra))] if catalog.extra else []
    rows += [(kind, str(count)) for kind, count in counts.items()]
    rows += [("device", f"{device.name}, {format_bytes(device.memory_bytes)}") for device in seen] or [
        ("device", "no NVIDIA driver found")
    ]
    return Document(data, (Table(("what", "found"), tuple(rows)),))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
