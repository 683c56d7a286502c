"""The instants outside forward and backward: clipping, the optimizer step, averages, evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from memplan.step.ends_on_tape import evaluated_head
from memplan.step.model_on_tape import ModelOnTape
from memplan.step.places import last_places
from memplan.step.states.optimizer_scratch import average_bytes, clipping_bytes
from memplan.step.step_inputs import LOSS_SCALE_BYTES, StepInputs
from memplan.step.tapes.linear_forms import Form, Part, constant_form
from memplan.step.tapes.played import Instant

EMBEDDING = -1
"""Stands for the embedding among the kinds of layers."""


def after_backward(inputs: StepInputs, taped: ModelOnTape, filled_bytes: int) -> Iterator[Instant]:
    """Yield the instants from the end of backward to the next forward.

    Args:
        inputs: What is compiled.
        taped: The model on tape.
        filled_bytes: Gradients that the step leaves, filled with zeros.
    """
    config, tensors = inputs.setup.config, inputs.states.tensors
    gradients = constant_form(Part.GRADIENTS, 0 if config.gradients.lifetime == "layer" else inputs.gradient_bytes)
    if config.gradients.lifetime == "step":
        scaling = LOSS_SCALE_BYTES if config.loss_scaling else 0
        update = constant_form(Part.TEMPORARIES, max(inputs.optimizer.bytes, scaling))
        yield Instant("optimizer step", "update", gradients + update)
    if config.clip_gradients:
        scratch = constant_form(Part.TEMPORARIES, clipping_bytes(tensors))
        yield Instant("gradient clipping", "norms", gradients + scratch)
    filled = constant_form(Part.GRADIENTS, filled_bytes)
    if config.weight_average != "none" and config.gradients.lifetime == "step":
        scratch = constant_form(Part.TEMPORARIES, average_bytes(inputs.setup, tensors))
        yield Instant("optimizer step", "moving average", filled + scratch)
    if config.evaluation:
        yield from _evaluation(taped, filled)
    if config.save_checkpoint:
        yield Instant("checkpoint saving", "state_dict", filled)


def _evaluation(taped: ModelOnTape, around: Form) -> Iterator[Instant]:
    """Yield the moments of a forward without gradients, whose loss is over all logits at once."""
    parts = {EMBEDDING: taped.embedding.evaluated()}
    parts |= {kind: section.evaluated() for kind, section in enumerate(taped.layers)}
    runs = [(kind, run.count) for kind, run in zip(taped.kinds, taped.runs, strict=True)]
    left = {kind: part.carried for kind, part in parts.items()}
    places, around = last_places([(EMBEDDING, 1), *runs], left, around)
    for kind, below in places:
        for moment in parts[kind].forward:
            yield moment.around(below, "evaluation")
    for moment in evaluated_head(taped.settings, taped.weights).evaluated().forward:
        yield moment.around(around, "evaluation")
