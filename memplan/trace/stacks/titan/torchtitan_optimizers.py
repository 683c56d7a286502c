"""What updates torchtitan's models: its own container of AdamW, or in its place the bundled optimizers of a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, default_adamw

from memplan.muon.parameter_groups import split_parameters
from memplan.trace.jobs.gradient_lifetimes import Trained
from memplan.trace.jobs.optimizers import update_of
from memplan.training.resolved import TrainingSetup


class BundledOptimizers(list[torch.optim.Optimizer]):
    """The optimizers of a model, with what the trainer calls of its container."""

    def step(self) -> None:
        """Step one after the other."""
        for optimizer in self:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or fill them."""
        for optimizer in self:
            optimizer.zero_grad(set_to_none)


def optimizers_of(parts: Sequence[nn.Module], setup: TrainingSetup) -> Any:
    """Return what the trainer steps: the container that it has itself, unless the config's optimizers are the bundled ones."""
    if not any(entry.orthogonalises for entry in setup.optimizers.values()):
        config = default_adamw()
        config.implementation = setup.profile.optimizer
        return OptimizersContainer(config, model_parts=list(parts))
    groups: dict[str, list[Trained]] = {}
    for part in parts:
        parameters = dict(part.named_parameters())
        for entry in split_parameters(part).report:
            assert entry.role is not None
            item = Trained(entry.name, entry.role, entry.shape, parameters[entry.name], None, None)
            groups.setdefault(setup.optimizer_names[entry.role], []).append(item)
    ordered = sorted(groups.items(), key=lambda group: setup.optimizers[group[1][0].role].takes == "all")
    updates: list[Any] = [update_of(name, setup.optimizers[items[0].role], items, setup, ()) for name, items in ordered]
    return BundledOptimizers(update.optimizer for update in updates)
