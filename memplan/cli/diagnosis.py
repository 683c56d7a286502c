"""What ``memplan doctor`` finds out about the installation."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import memplan
from memplan.catalog.catalog import SECTIONS, Catalog
from memplan.host.nvidia_gpus import nvidia_devices
from memplan.report.document import Document, Table
from memplan.units import format_bytes

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
