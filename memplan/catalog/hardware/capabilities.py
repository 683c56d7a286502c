"""Whether a card can do something, does it in another way, or cannot."""

from __future__ import annotations

from memplan.catalog.entries import Gpu
from memplan.catalog.hardware.hardware_tables import CapabilityRow, HardwareTables, capability

NOT_JUDGED = CapabilityRow("nvidia", "native")
"""Of a card that nothing is known of, nothing is refused."""


def capability_of(gpu: Gpu, feature: str, tables: HardwareTables) -> CapabilityRow:
    """Return how a card does something.

    Args:
        feature: An entry of ``configs/hardware/capabilities.yaml``.

    Example:
        >>> from memplan.library.lookup import open_catalog
        >>> from memplan.catalog.hardware.hardware_tables import hardware_tables
        >>> catalog = open_catalog(None)
        >>> [capability_of(catalog.gpus[name], "bf16", hardware_tables(catalog.root)).answer for name in ("t4", "a100")]
        ['emulated', 'native']
    """
    return next((row for row in tables.capabilities[feature].rows if _is_about(row, gpu)), NOT_JUDGED)


def is_native(gpu: Gpu, feature: str, tables: HardwareTables) -> bool:
    """Tell whether a card does something itself; one that is not judged is taken to."""
    return capability_of(gpu, feature, tables).answer == "native"


def _is_about(row: CapabilityRow, gpu: Gpu) -> bool:
    if row.vendor != gpu.vendor:
        return False
    if row.architectures:
        return gpu.architecture.startswith(row.architectures)
    if not (row.least or row.most):
        return gpu.vendor != "nvidia" or gpu.compute_capability is not None
    if gpu.compute_capability is None:
        return False
    version = capability(gpu.compute_capability)
    return (not row.least or capability(row.least) <= version) and (not row.most or version <= capability(row.most))
