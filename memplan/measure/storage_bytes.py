"""Bytes of a training session by component, as distinct storages."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from memplan.muon.sharded.divisions import local_part
from memplan.trace.jobs.optimizers import ClassUpdate
from memplan.trace.jobs.reference_job import Session
from memplan.trace.recording.trace_result import Component


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of ``tensors``, each counted once, of shards what this rank holds."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def component_bytes(session: Session) -> dict[str, int]:
    """Return the bytes of weights, buffers, master weights and optimizer states that live between steps.

    States in host memory, step counters included, are ``host``, where there are any.
    """
    tensors_by_component: dict[Component, list[Tensor]] = {
        "weights": [],
        "buffers": [*session.average, *session.scaling],
    }
    for _, tensor, component in session.tensors():
        tensors_by_component.setdefault(component, []).append(tensor)
    tensors_by_component["master_weights"] = list(session.masters)
    tensors_by_component["optimizer_states"] = list(_states(session))
    sizes: dict[str, int] = {name: distinct_bytes(tensors) for name, tensors in tensors_by_component.items()}
    offloaded = [tensor for _, update in session.updates if update.on_host for tensor, _ in update.states()]
    return {**sizes, "host": distinct_bytes(offloaded)} if offloaded else sizes


def gradient_bytes(session: Session) -> int:
    """Return the bytes of the gradients that are stored now."""
    return distinct_bytes(_gradients(session))


def _gradients(session: Session) -> Iterator[Tensor]:
    for item in session.trained:
        gradient = item.stored_gradient()
        if gradient is not None:
            yield gradient
        scale = None if item.store is None else item.store.scale
        if scale is not None:
            yield scale


def _states(session: Session) -> Iterator[Tensor]:
    """Yield optimizer states on the device; step counters of all but fused kernels are on the host."""
    for _, update in session.updates:
        if update.on_host:
            continue
        on_device = isinstance(update, ClassUpdate) and bool(update.optimizer.defaults.get("fused"))
        for tensor, name in update.states():
            if name != "step" or on_device:
                yield tensor
