"""The parameter tensors that adapters add to a model."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.errors import InvalidFileError
from memplan.model.inventory import ParameterTensor
from memplan.model.model import Model
from memplan.training.resolved import TrainingSetup


def adapter_tensors(model: Model, setup: TrainingSetup) -> tuple[ParameterTensor, ...]:
    """Return the matrices that adapters add to a model: (rank, in) and (out, rank) for each target.

    Raises:
        InvalidFileError: A target of the config is no projection of the model.
    """
    adapter = setup.config.adapter
    if adapter is None:
        return ()
    known = projections(model)
    wrong = [target for target in adapter.targets if target != "all-linear" and target not in known]
    if wrong:
        texts = ", ".join(known)
        raise InvalidFileError(
            [f"adapter.targets: {name!r} is no projection of {model.spec.name}; known: {texts}" for name in wrong]
        )
    tensors: list[ParameterTensor] = []
    for tensor in model.inventory:
        if tensor.role != "hidden_matrix" or not _targeted(tensor, adapter.targets):
            continue
        rows, columns = tensor.shape[::-1] if model.spec.transposed_linear else tensor.shape
        stem = tensor.name.removesuffix(".weight")
        for part, shape in (("lora_A", (adapter.rank, columns)), ("lora_B", (rows, adapter.rank))):
            tensors.append(ParameterTensor(f"{stem}.{part}.weight", shape, "hidden_matrix", tensor.count, tensor.first))
        if adapter.kind == "dora":
            name = f"{stem}.lora_magnitude_vector.weight"
            tensors.append(ParameterTensor(name, (rows,), "hidden_matrix", tensor.count, tensor.first))
    return tuple(tensors)


def projections(model: Model) -> list[str]:
    """Return the names of a model's projections, such as ``q_proj``: what adapters can be put on."""
    return sorted({_projection(tensor) for tensor in model.inventory if tensor.role == "hidden_matrix"})


def _targeted(tensor: ParameterTensor, targets: Sequence[str]) -> bool:
    return "all-linear" in targets or _projection(tensor) in targets


def _projection(tensor: ParameterTensor) -> str:
    """Return the last part of a projection's name, such as ``q_proj``."""
    return tensor.name.removesuffix(".weight").rsplit(".", 1)[-1]
