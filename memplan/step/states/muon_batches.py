"""Matrices of one shape that the bundled Muon updates together, in ``kernels.muon_batch_bytes`` of scratch or over ranks.

Source: memplan/muon/parameter_updates.py (``batches_of``), memplan/muon/updates/batches.py.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from math import prod

from memplan.documents.frozen_values import dataclass
from memplan.errors import CannotAnswerError
from memplan.step.states.muon_scratch import MuonPhases, index_bytes, muon_phases, newton_schulz_sizes
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div

Alike = tuple[tuple[int, ...], tuple[int, ...], str, str]
"""Shape, that of the whole where ranks divide it, format and gradient dtype: matrices that agree in them are updated together."""


@dataclass(frozen=True, slots=True)
class MuonBatch:
    """Matrices of one kind, and how they are updated."""

    together: int  # How many are updated together; 1 where each is updated by itself
    some_alone: bool  # Whether one is left over, which is updated by itself
    ranks: int = 1  # How many ranks share the work, each of which owns some of them whole for a while


ALONE = MuonBatch(1, True)


def muon_batches(
    setup: TrainingSetup, group: Iterable[tuple[TensorStates, int]], stored: Collection[str] = ()
) -> dict[Alike, MuonBatch]:
    """Return how the matrices of an optimizer's group are updated, by what makes them alike; ``ALONE`` are left out.

    Args:
        group: All tensors of the optimizer, each with how often it is there.
        stored: Names of those whose gradients stand in a store, which are updated one by one.

    Raises:
        CannotAnswerError: The library refuses shards whose rows are no whole blocks of momentum.
    """
    counts: Counter[Alike] = Counter()
    firsts: dict[Alike, TensorStates] = {}
    for entry, count in group:
        _refuse_broken_rows(entry)
        if (_in_rounds(setup, entry) or _can_share(setup, entry)) and entry.tensor.name not in stored:
            counts[alike(entry)] += count
            firsts.setdefault(alike(entry), entry)
    batches = {}
    for kind, entry in firsts.items():
        if _in_rounds(setup, entry):
            # Source: ``round_size`` in memplan/muon/parameter_updates.py.
            exchanged, whole = is_exchanged(entry), _whole(entry)
            ranks = (
                prod(ranks for ranks, _, _ in _divisions(setup, entry)) if exchanged else setup.config.parallel.shards
            )
            each = 4 * prod(whole) + sum(_workspace(setup, entry, 1))
            batches[kind] = MuonBatch(
                min(counts[kind], ranks * max(1, setup.profile.muon_batch_bytes // each)), False, ranks
            )
            continue
        most = setup.profile.muon_batch_bytes // batch_phases(setup, entry, 1).bytes
        if min(most, counts[kind]) > 1:
            batches[kind] = MuonBatch(min(most, counts[kind]), counts[kind] % most == 1)
    return batches


def alike(entry: TensorStates) -> Alike:
    """Return what makes matrices of one optimizer alike."""
    return entry.tensor.shape, entry.tensor.divided, entry.format_name, entry.gradient_name


def is_exchanged(entry: TensorStates) -> bool:
    """Tell whether a matrix for Muon is divided, so that ranks send each other the pieces of whole ones."""
    return bool(entry.tensor.divided) and entry.optimizer.orthogonalises and len(entry.tensor.shape) == 2


def _in_rounds(setup: TrainingSetup, entry: TensorStates) -> bool:
    """Tell whether ranks orthogonalise a matrix for each other."""
    return is_exchanged(entry) or (setup.config.parallel.shared_muon and entry.optimizer.orthogonalises)


def _refuse_broken_rows(entry: TensorStates) -> None:
    """Raise for a shard, of a matrix or of a stack of them, whose rows are no whole blocks of momentum."""
    # Source: ``refuse_beside_shards`` in memplan/muon/parameter_state.py.
    if not entry.tensor.divided or not entry.optimizer.orthogonalises:
        return
    block, columns = entry.optimizer.slots[0].block_elements, entry.tensor.shape[-1]
    if columns % block:
        raise CannotAnswerError(
            f"{entry.tensor.name}: rows of {columns} elements are no whole blocks of {block}, in which {entry.optimizer_name} keeps "
            "its momentum: the bundled Muon refuses such shards; use momentum in fp32 or bf16"
        )


def round_phases(setup: TrainingSetup, entry: TensorStates, batch: MuonBatch) -> MuonPhases:
    """Return what a round allocates on the first rank, whose matrices and pieces are as large as any rank's.

    Formula:
        With p the pieces of all its matrices and f the matrices that it owns, in bf16: p + the momentum's chunk, p + f while
        they are sent, 2 f while pieces do not lie one after another, f + Newton-Schulz, p + the weight's chunk. Where two
        mesh dimensions divide a matrix, each is undone in turn, and what the first has put together are pieces of the second.

    Source:
        ``round_bytes`` in memplan/muon/updates/rounds.py.
    """
    alone = muon_phases(setup, entry)
    if not is_exchanged(entry):
        return _replicas_phases(setup, entry, batch, alone)
    pieces, exchanges = 2 * batch.together * entry.tensor.elements, round_exchanges(setup, entry, batch)
    before, sent = pieces, 0
    for whole, _, lies_whole in exchanges:
        sent, before = max(sent, whole + (before if lies_whole else max(before, whole))), whole
    return MuonPhases(
        update=0,
        momentum=(pieces, *alone.momentum),
        norms=(sent,),
        workspace=(before, *_workspace(setup, entry, exchanges[-1][1])),
        weights=(pieces, *alone.weights),
    )


def round_exchanges(setup: TrainingSetup, entry: TensorStates, batch: MuonBatch) -> list[tuple[int, int, bool]]:
    """Return, for each exchange of a round, the bytes that a rank has behind it, the matrices, and whether their pieces lie one after another."""
    owned, exchanges = batch.together, []
    for ranks, dimension, shape in _divisions(setup, entry):
        owned = ceil_div(owned, ranks)
        exchanges.append((2 * owned * prod(shape), owned, owned * prod(shape[:dimension]) == 1))
    return exchanges


def round_workspaces(setup: TrainingSetup, entry: TensorStates, owned: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return norms of rows, in bf16 and in fp32, and of the matrices that a rank owns in a round, and Newton-Schulz's own."""
    rows = owned * _whole(entry)[-2]
    return (2 * rows, 4 * rows, 4 * owned), _workspace(setup, entry, owned)


def _divisions(setup: TrainingSetup, entry: TensorStates) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return how many ranks divide a matrix, along which dimension, and what they have together, in the order that this is undone.

    ``fully_shard`` cuts the rows of what tensor parallelism has left. Where that has cut rows too, shards are put together
    first; where it has cut columns, these are.

    Source:
        ``divisions_of`` in memplan/muon/sharded/divisions.py; ``_StridedShard``.
    """
    parallel, (rows, columns), whole = setup.config.parallel, entry.tensor.shape, entry.tensor.divided
    by_columns = columns != whole[-1]
    shards = (parallel.shards, 0, whole if by_columns else (whole[0] // parallel.tensor, columns))
    parts = (parallel.tensor, int(by_columns), (rows, whole[1]) if by_columns else whole)
    return [division for division in ((parts, shards) if by_columns else (shards, parts)) if division[0] > 1]


def _replicas_phases(setup: TrainingSetup, entry: TensorStates, batch: MuonBatch, alone: MuonPhases) -> MuonPhases:
    """Return what a round of whole matrices allocates on the first rank, which owns as many as any.

    Formula:
        One matrix more than it owns, in bf16, beside the largest of the momentum's chunk, Newton-Schulz and the weight's.
    """
    # Source: ``replicas_bytes`` in memplan/muon/updates/rounds.py.
    owned = ceil_div(batch.together, batch.ranks)
    return replace(
        alone,
        update=2 * (owned + 1) * entry.tensor.elements,
        norms=tuple(owned * size for size in alone.norms),
        workspace=newton_schulz_sizes(setup, entry, owned),
    )


def _whole(entry: TensorStates) -> tuple[int, ...]:
    return entry.tensor.divided if is_exchanged(entry) else entry.tensor.shape


def _workspace(setup: TrainingSetup, entry: TensorStates, count: int) -> tuple[int, ...]:
    """Return the workspace of orthogonalising so many whole matrices together."""
    whole = replace(entry, tensor=replace(entry.tensor, shape=_whole(entry)))
    return newton_schulz_sizes(setup, whole, count)


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
