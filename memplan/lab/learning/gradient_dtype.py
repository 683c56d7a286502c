"""Loss against the dtype in which gradients are stored between backward and step, with a scale and without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan.catalog.catalog import Catalog
from memplan.lab.experiment_record import Row
from memplan.lab.learning.variants import Size, Task, Variant, chosen, comparison_task, lab_setup, percent_text
from memplan.lab.training.loop import Trainer, TrainingOptions
from memplan.muon.stores.gradient_stores import GRADIENT_FORMATS, GradientStore
from memplan.report.experiments import row_of


@dataclass(frozen=True, slots=True)
class GradientStorage:
    """A way to store gradients."""

    dtype: str
    scaled: bool = False


GRADIENTS: dict[str, GradientStorage] = {
    "fp32": GradientStorage("fp32"),
    "bf16": GradientStorage("bf16"),
    "fp8-e4m3": GradientStorage("fp8-e4m3", scaled=True),
    "fp8-e5m2": GradientStorage("fp8-e5m2", scaled=True),
    "fp8-e4m3-unscaled": GradientStorage("fp8-e4m3"),
    "fp8-e5m2-unscaled": GradientStorage("fp8-e5m2"),
}


def gradient_dtype(
    catalog: Catalog, size: Size, seeds: Sequence[int], gradients: Sequence[str] = (), device: str = "cpu"
) -> Task:
    """Return the experiment.

    Args:
        gradients: Of ``GRADIENTS``; all by default.

    Raises:
        UnknownNameError: A name is not known.
    """
    names = chosen("gradient", gradients, tuple(GRADIENTS), "fp32")
    variants = [variant_of(name, catalog, size, device) for name in names]
    settings = {
        "scaled": "the bundled optimizer's store, one fp32 scale for each tensor",
        "unscaled": "cast to FP8 and back before the step, which the bundled optimizer does not offer",
    }
    return comparison_task("gradient-dtype", variants, size, seeds, settings, findings)


def variant_of(name: str, catalog: Catalog, size: Size, device: str) -> Variant:
    """Return the model with its gradients stored in one way."""
    storage = GRADIENTS[name]
    stored = storage.dtype if storage.scaled or storage.dtype == "bf16" else None
    setup = lab_setup(catalog, size, gradient=stored)
    keys = {
        "gradient": storage.dtype,
        "scaled": storage.scaled,
        "bytes_per_parameter": bytes_per_parameter(storage, size),
    }
    options = TrainingOptions(steps=size.steps, device=device)
    casts = stored is None and storage.dtype != "fp32"
    return Variant(keys, setup, options, casting(GRADIENT_FORMATS[storage.dtype]) if casts else None)


def bytes_per_parameter(storage: GradientStorage, size: Size) -> float:
    """Return the mean bytes of a gradient's element, scales included where there are any."""
    if storage.dtype not in GRADIENT_FORMATS:
        return 4.0
    if not storage.scaled:
        return float(GRADIENT_FORMATS[storage.dtype].itemsize)
    tensors = size.model.inventory
    total_bytes = sum(
        tensor.count * GradientStore.predicted_bytes(storage.dtype, tensor.elements) for tensor in tensors
    )
    return total_bytes / sum(tensor.count * tensor.elements for tensor in tensors)


def casting(dtype: torch.dtype) -> Callable[[Trainer], None]:
    """Return a hook that casts every gradient to ``dtype`` and back before it is used."""

    @torch.no_grad()
    def cast(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.copy_(parameter.grad.to(dtype).to(parameter.grad.dtype))

    def prepare(trainer: Trainer) -> None:
        trainer.optimizer.register_step_pre_hook(cast)

    return prepare


def findings(rows: Sequence[Row]) -> list[str]:
    """Return what follows from the rows that are there."""
    sentences = []
    bf16 = row_of(rows, gradient="bf16")
    if bf16:
        sentences.append(f"bf16 gradients: {percent_text(bf16['gap_percent'])} against fp32.")
    for dtype in ("fp8-e4m3", "fp8-e5m2"):
        scaled, cast = (row_of(rows, gradient=dtype, scaled=scaled) for scaled in (True, False))
        if scaled and cast:
            sentences.append(
                f"{dtype}: {percent_text(scaled['gap_percent'])} with a scale for each tensor, "
                f"{percent_text(cast['gap_percent'])} by a plain cast."
            )
    return sentences
