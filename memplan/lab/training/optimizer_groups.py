"""The bundled optimizer for a model in training, with the groups that its config asks for."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from memplan.catalog.entries import Optimizer, StateSlot
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.lab.training.trained_model import TrainedModel
from memplan.model.model import Model
from memplan.muon import Muon
from memplan.muon.group_options import checked_keys
from memplan.muon.state_codecs.state_formats import DEFAULT_BLOCK, momentum_codec
from memplan.muon.stores.gradient_stores import GRADIENT_FORMATS
from memplan.step.tensors.tensor_states import stored_format
from memplan.trace.jobs.bundled_optimizer import update_options
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup


def refuse_unsupported(setup: TrainingSetup) -> None:
    """Raise for a setup that the lab cannot train.

    Raises:
        CannotAnswerError: The reason.
    """
    config, gradient = setup.config, setup.config.gradients.dtype
    refused = {
        "adapters": config.adapter is not None,
        "master weights": config.master_weights != "none",
        "a loss scale and coded weights": config.loss_scaling and setup.trains_codes,
        "a loss scale and gradients in a store": config.loss_scaling and gradient is not None,
        "a loss scale and layer release": config.loss_scaling and config.gradients.lifetime == "layer",
        "optimizer states in host memory": setup.offloads_states,
        "an average of the weights": config.weight_average != "none",
        "an embedding or head in wider floats than its matrices": _wide_tables(setup),
        f"gradients in {gradient}": gradient is not None and gradient not in GRADIENT_FORMATS,
        "codes without a gradient dtype": gradient is None and setup.trains_codes,
    }
    names = sorted({setup.optimizer_names[role] for role, entry in setup.optimizers.items() if entry.bundled is None})
    refused |= {f"the optimizer {name}": True for name in names}
    unsupported = [what for what, is_so in refused.items() if is_so]
    if unsupported:
        raise CannotAnswerError(f"{setup.name}: the lab does not train with {', '.join(unsupported)}")


def _wide_tables(setup: TrainingSetup) -> bool:
    """Whether torch would have to multiply floats of two dtypes."""
    matrices = FLOAT_BYTES.get(setup.format_names["hidden_matrix"])
    tables = [FLOAT_BYTES.get(setup.format_names[role], 0) for role in ("embedding", "head")]
    return matrices is not None and max(tables) > matrices


def refuse_unused_formats(model: Model, setup: TrainingSetup) -> None:
    """Raise where no matrix of a role can be stored in its block format: the run would not test it.

    Raises:
        CannotAnswerError: The role, the format, and the width that would do.
    """
    matrices = [tensor for tensor in model.inventory if len(tensor.shape) > 1]
    for role in dict.fromkeys(tensor.role for tensor in matrices):
        format_name, block = setup.format_names[role], setup.formats[role].block_elements
        tensors = [tensor for tensor in matrices if tensor.role == role]
        if all(stored_format(setup, tensor)[0] != format_name for tensor in tensors):
            rows = ", ".join(str(width) for width in sorted({tensor.shape[-1] for tensor in tensors}))
            raise CannotAnswerError(
                f"{setup.name}: no {role} would be stored in {format_name}, whose blocks of {block} do not divide rows of "
                f"{rows}; take widths that they divide, such as --hidden {block} --intermediate {2 * block}"
            )


def with_momentum(
    setup: TrainingSetup, momentum_format: str | None, block_elements: int | None = None
) -> TrainingSetup:
    """Return a setup whose matrices have another format of momentum, so that it is planned with its bytes.

    Blocks and the dtype of their scales are those of the setup's own optimizer where they are not given.

    Raises:
        UnknownNameError: There is no such format.
        InvalidFileError: Muon does not take the matrices.
    """
    if momentum_format is None:
        return setup
    own = {"block_elements": DEFAULT_BLOCK, "scale_dtype": "fp32", **setup.optimizers["hidden_matrix"].options}
    codec = momentum_codec(momentum_format, block_elements or int(own["block_elements"]), str(own["scale_dtype"]))
    if setup.optimizers["hidden_matrix"].algorithm != "muon":
        raise InvalidFileError([f"--momentum-format {momentum_format}: {setup.name} does not train matrices by Muon"])
    slots = (
        StateSlot("momentum_buffer", codec.block_elements, codec.block_bytes),
        StateSlot("step", layout="scalar", device="host"),
    )
    entries: dict[Any, Optimizer] = {
        role: replace(entry, slots=slots) if entry.algorithm == "muon" else entry
        for role, entry in setup.optimizers.items()
    }
    return replace(setup, optimizers=entries, changed=True)


def optimizer_for(
    model: TrainedModel,
    setup: TrainingSetup,
    rates: Mapping[str, float],
    options: Mapping[str, Any],
    matrix_options: Mapping[str, Any],
    seed: int,
) -> Muon:
    """Return the optimizer of every weight of ``model``.

    Args:
        setup: Says which optimizer takes which role, and how gradients are kept.
        rates: Learning rate by algorithm.
        matrix_options: Options of the groups that Muon takes, above all others.
        seed: Of stochastic rounding.
    """
    checked_keys({**options, **matrix_options})
    groups: dict[str, dict[str, Any]] = {}
    for weight in model.weights:
        name = setup.optimizer_names[weight.role]
        entry = setup.optimizers[weight.role]
        group = groups.setdefault(name, {"params": [], **update_options(name, entry), **options})
        group["params"].append((weight.name, weight.stored))
    for group in groups.values():
        group["lr"] = rates[group["algorithm"]]
        if group["algorithm"] == "muon":
            group.update(matrix_options)
    gradient_format = setup.config.gradients.dtype
    optimizer = Muon(list(groups.values()), gradient_format=gradient_format, seed=seed)
    if setup.config.gradients.lifetime == "layer":
        optimizer.enable_gradient_release()
    return optimizer


def state_tensors(optimizer: Muon) -> list[Tensor]:
    """Return every tensor of the optimizer's state, step counters too."""
    return [tensor for state in optimizer.state.values() for tensor in state.values()]
