"""The parameter tensors that adapters add to a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memplan.errors import InvalidFileError
from memplan.model.inventory import Inventory, ParameterTensor
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
    for tensor in libraries_inventory(model.inventory, setup):
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


def libraries_inventory(inventory: Inventory, setup: TrainingSetup) -> Inventory:
    """Return a model's tensors in the roles that the stack's libraries see, which quantise and adapt modules by class.

    The gate of shared experts is a linear layer like others to PEFT and bitsandbytes. Biases of what is not quantised go
    with the norms where embedding, head and norms are cast to fp32; a quantised projection casts its own to the compute
    dtype, and keeps it so (``Linear4bit.forward``, bitsandbytes 0.50.2).
    """
    if setup.config.adapter is None or setup.stack.model_code == "own":
        return inventory
    stems = (
        {t.name.removesuffix(".weight") for t in inventory if t.role in ("norm", "head")} if setup.kbit_floats else ()
    )
    return tuple(
        replace(t, role="norm")
        if t.role == "bias" and t.name.removesuffix(".bias") in stems
        else replace(t, role="hidden_matrix")
        if t.role == "router" and t.shape[0] == 1
        else t
        for t in inventory
    )


def projections(model: Model) -> list[str]:
    """Return the names of a model's projections, such as ``q_proj``: what adapters can be put on."""
    return sorted({_projection(tensor) for tensor in model.inventory if tensor.role == "hidden_matrix"})


def _targeted(tensor: ParameterTensor, targets: Sequence[str]) -> bool:
    return "all-linear" in targets or _projection(tensor) in targets


def _projection(tensor: ParameterTensor) -> str:
    """Return the last part of a projection's name, such as ``q_proj``."""
    return tensor.name.removesuffix(".weight").rsplit(".", 1)[-1]
