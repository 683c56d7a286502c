"""The events of the bundled optimizer's update of one tensor: a codec's scratch, Newton-Schulz, and the weight's chunks."""

from collections.abc import Sequence

from memplan.step.events.event_stream import EventStream
from memplan.step.states.muon_batches import MuonBatch, batch_phases, is_exchanged, round_exchanges, round_workspaces
from memplan.step.states.muon_scratch import adamw_sizes, muon_phases, updating_decoder_sizes
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import TrainingSetup
from memplan.units import ceil_div


def updated(stream: EventStream, setup: TrainingSetup, entry: TensorStates) -> None:
    """Write what the update of one tensor allocates and frees."""
    if entry.optimizer.orthogonalises:
        _orthogonalised(stream, setup, entry)
        return
    _, own, coding = adamw_sizes(setup, entry)
    storages = stream.allocate_all(own)
    stream.passing(*updating_decoder_sizes(entry))
    stream.passing(*coding)
    _release(stream, storages)


def updated_together(stream: EventStream, setup: TrainingSetup, entry: TensorStates, count: int) -> None:
    """Write what the update of ``count`` matrices together allocates and frees."""
    phases = batch_phases(setup, entry, count)
    update = stream.allocate(phases.update)
    stream.free_all(stream.allocate_all(phases.momentum))
    norms, exact, norm = stream.allocate_all(phases.norms)
    stream.free_all([exact, norms, norm])
    for sizes in (phases.workspace, phases.weights):
        stream.free_all(stream.allocate_all(sizes))
    stream.free(update)


def updated_in_rounds(stream: EventStream, setup: TrainingSetup, entry: TensorStates, batch: MuonBatch) -> None:
    """Write what a round of matrices allocates and frees on the first rank, which owns some of them whole for a while.

    Source:
        ``update_round_`` in memplan/muon/updates/rounds.py; ``to_owners``, ``put_together``, ``in_pieces`` and ``from_owners`` in
        memplan/muon/sharded/divisions.py.
    """
    phases = muon_phases(setup, entry)
    exchanges = round_exchanges(setup, entry, batch) if is_exchanged(entry) else []
    sizes = [2 * batch.together * entry.tensor.elements, *[whole for whole, _, _ in exchanges]]
    owned = exchanges[-1][1] if exchanges else ceil_div(batch.together, batch.ranks)
    own = [2 * entry.tensor.elements, 2 * owned * entry.tensor.elements]  # of replicas: what passes, and what it owns
    data = stream.allocate_all(sizes[:1] if exchanges else own)
    _release(stream, stream.allocate_all(phases.momentum))
    for whole, _, lies_whole in exchanges:
        data = _instead(stream, data, whole, 1 if lies_whole else 2)
    norms, workspace = round_workspaces(setup, entry, owned)
    rows, exact, norm = stream.allocate_all(norms)
    stream.free_all([exact, rows, norm])
    stream.free_all(stream.allocate_all(workspace))
    for (whole, _, lies_whole), size in zip(reversed(exchanges), sizes[-2::-1], strict=True):
        data = _instead(stream, data, whole, 0 if lies_whole else 1)
        data = _instead(stream, data, size, 1)
    stream.free_all([*stream.allocate_all(phases.weights), *data])


def _instead(stream: EventStream, data: list[int], size: int, times: int) -> list[int]:
    """Allocate a tensor so many times, each in the place of the one before; return the last."""
    for _ in range(times):
        made = [stream.allocate(size)]
        stream.free_all(data)
        data = made
    return data


def _orthogonalised(stream: EventStream, setup: TrainingSetup, entry: TensorStates) -> None:
    """Write what Muon takes for a matrix: its update unless the gradient serves, and three phases one after another."""
    phases = muon_phases(setup, entry)
    update = stream.allocate_all([phases.update] if phases.update else [])
    _release(stream, stream.allocate_all(phases.momentum))
    norms, exact, norm = stream.allocate_all(phases.norms)
    stream.free_all([exact, norms, norm])
    stream.free_all(stream.allocate_all(phases.workspace))
    own = stream.allocate_all(phases.weights)
    stream.passing(*updating_decoder_sizes(entry))
    stream.passing(*phases.coding)
    stream.free_all([*own, *update])


def _release(stream: EventStream, storages: Sequence[int]) -> None:
    """Free scratch: scales, codes, and then values, of which the last turn still has views."""
    stream.free_all(sorted(storages, key=stream.sizes.__getitem__))
