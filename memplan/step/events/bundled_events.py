"""The events of the bundled optimizer's update of one tensor: a codec's scratch, Newton-Schulz, and the weight's chunks."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.step.events.event_stream import EventStream
from memplan.step.states.muon_batches import batch_phases
from memplan.step.states.muon_scratch import adamw_sizes, muon_phases
from memplan.step.tensors.tensor_states import TensorStates
from memplan.training.resolved import TrainingSetup


def updated(stream: EventStream, setup: TrainingSetup, entry: TensorStates) -> None:
    """Write what the update of one tensor allocates and frees."""
    if entry.optimizer.orthogonalises:
        _orthogonalised(stream, setup, entry)
        return
    _, own, coding = adamw_sizes(setup, entry)
    storages = stream.allocate_all(own)
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


def _orthogonalised(stream: EventStream, setup: TrainingSetup, entry: TensorStates) -> None:
    """Write what Muon takes for a matrix: its update unless the gradient serves, and three phases one after another."""
    phases = muon_phases(setup, entry)
    update = stream.allocate_all([phases.update] if phases.update else [])
    _release(stream, stream.allocate_all(phases.momentum))
    norms, exact, norm = stream.allocate_all(phases.norms)
    stream.free_all([exact, norms, norm])
    stream.free_all(stream.allocate_all(phases.workspace))
    own = stream.allocate_all(phases.weights)
    stream.passing(*phases.coding)
    stream.free_all([*own, *update])


def _release(stream: EventStream, storages: Sequence[int]) -> None:
    """Free scratch: scales, codes, and then values, of which the last turn still has views."""
    stream.free_all(sorted(storages, key=stream.sizes.__getitem__))
