"""Matrices of one shape that the bundled Muon updates together, in ``kernels.muon_batch_bytes`` of scratch.

Source: memplan/muon/parameter_updates.py (``batches_of``), memplan/muon/updates/batches.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from memplan.documents.frozen_values import dataclass
from memplan.step.states.muon_scratch import MuonPhases, index_bytes, newton_schulz_sizes
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import TrainingSetup

Alike = tuple[tuple[int, ...], str, str]
"""Shape, format and gradient dtype: matrices that agree in them are updated together."""


@dataclass(frozen=True, slots=True)
class MuonBatch:
    """Matrices of one kind, and how they are updated."""

    together: int  # How many are updated together; 1 where each is updated by itself
    some_alone: bool  # Whether one is left over, which is updated by itself


ALONE = MuonBatch(1, True)


def muon_batches(
    setup: TrainingSetup, group: Iterable[tuple[TensorStates, int]], stored: Collection[str] = ()
) -> dict[Alike, MuonBatch]:
    """Return how the matrices of an optimizer's group are updated, by what makes them alike; ``ALONE`` are left out.

    Args:
        group: All tensors of the optimizer, each with how often it is there.
        stored: Names of those whose gradients stand in a store, which are updated one by one.
    """
    counts: Counter[Alike] = Counter()
    firsts: dict[Alike, TensorStates] = {}
    for entry, count in group:
        if _can_share(setup, entry) and entry.tensor.name not in stored:
            counts[alike(entry)] += count
            firsts.setdefault(alike(entry), entry)
    batches = {}
    for kind, entry in firsts.items():
        most = setup.profile.muon_batch_bytes // batch_phases(setup, entry, 1).bytes
        if min(most, counts[kind]) > 1:
            batches[kind] = MuonBatch(min(most, counts[kind]), counts[kind] % most == 1)
    return batches


def alike(entry: TensorStates) -> Alike:
    """Return what makes matrices of one optimizer alike."""
    return entry.tensor.shape, entry.format_name, entry.gradient_name


def _can_share(setup: TrainingSetup, entry: TensorStates) -> bool:
    """Tell whether a tensor is a matrix of floats whose momentum is whole blocks on the device."""
    if not setup.profile.muon_batch_bytes or not entry.optimizer.orthogonalises or setup.offloads_states:
        return False
    plain = entry.coded_as is None and len(entry.tensor.shape) == 2
    return plain and entry.tensor.elements % entry.optimizer.slots[0].block_elements == 0


def batch_phases(setup: TrainingSetup, entry: TensorStates, count: int) -> MuonPhases:
    """Return what updating ``count`` matrices like ``entry`` together allocates."""
    rows, elements = entry.tensor.shape[0], count * entry.tensor.elements
    return MuonPhases(
        update=2 * elements,
        momentum=_momentum(entry, elements),
        norms=(2 * count * rows, 4 * count * rows, 4 * count),
        workspace=newton_schulz_sizes(setup, entry, count),
        weights=(4 * elements,) if entry.format_name == "fp32" else (4 * elements, 4 * elements),
    )


def _momentum(entry: TensorStates, elements: int) -> tuple[int, ...]:
    slot = entry.optimizer.slots[0]
    if slot.block_elements == 1:
        return (4 * elements,) if slot.block_bytes == 4 else (4 * elements, 4 * elements)
    blocks = elements // slot.block_elements
    codes = (blocks * (slot.block_bytes - slot.scale_bytes), blocks * slot.scale_bytes)
    index = index_bytes(slot) * elements
    boundaries = max(slot.codebook_bytes - 4, 0) // 2  # of 2 n - 1 numbers, n - 1
    scratch = (slot.codebook_bytes - boundaries, 4 * elements, 4 * blocks, index, boundaries)
    return tuple(size for size in (*codes, *scratch, 4 * elements) if size)
