"""The instants outside forward and backward: clipping, the optimizer step, evaluation, a reference model's forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memplan.step.ends_on_tape import evaluated_head
from memplan.step.kernels.layer_arguments import layer_arguments
from memplan.step.model_on_tape import ModelOnTape, model_on_tape
from memplan.step.places import last_places
from memplan.step.states.optimizer_scratch import average_bytes
from memplan.step.step_inputs import LOSS_SCALE_BYTES, StepInputs, tables_of_graph
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.step.tapes.played import Instant

LABEL_BYTES, STATISTICS_BYTES = 8, 4 + 4 + 4 + 1
"""What a loss over preferences still has names for: labels; log-probability, entropy, mean of logits and whether the
target came first (``FusedCausalLMOutput`` in trl/trainer/utils.py, 1.16.0)."""

EVALUATION = "evaluation"
"""The instant of a forward that evaluates."""

EMBEDDING = -1
"""Stands for the embedding among the kinds of layers."""


def after_backward(
    inputs: StepInputs, taped: ModelOnTape, filled_bytes: int, validated: Form = ZERO
) -> Iterator[Instant]:
    """Yield the instants from the end of backward to the next forward.

    Args:
        inputs: What is compiled.
        taped: The model on tape.
        filled_bytes: Gradients that the step leaves, filled with zeros.
        validated: Logits that a loop of evaluation still has a name for.
    """
    config, tensors = inputs.setup.config, inputs.states.tensors
    gradients = constant_form(Part.GRADIENTS, 0 if config.gradients.lifetime == "layer" else inputs.gradient_bytes)
    if config.gradients.lifetime == "step":
        scaling = LOSS_SCALE_BYTES if config.loss_scaling else 0
        update = constant_form(Part.TEMPORARIES, max(inputs.optimizer.bytes, scaling))
        yield Instant("optimizer step", "update", gradients + update)
    if config.clip_gradients:
        scratch = constant_form(Part.TEMPORARIES, inputs.clipping_bytes)
        yield Instant("gradient clipping", "norms", gradients + scratch)
    filled = constant_form(Part.GRADIENTS, filled_bytes)
    if config.weight_average != "none" and config.gradients.lifetime == "step":
        scratch = constant_form(Part.TEMPORARIES, average_bytes(inputs.setup, tensors))
        yield Instant("optimizer step", "moving average", filled + scratch)
    if config.evaluation:
        yield from _evaluation(taped, filled + validated, EVALUATION)
    if config.save_checkpoint:
        yield Instant("checkpoint saving", "state_dict", filled)


def reference_forward(inputs: StepInputs, taped: ModelOnTape, around: Form) -> Iterator[Instant]:
    """Yield the moments of a reference model's forward, which runs before backward, beside all that forward has saved.

    Args:
        inputs: What is compiled.
        taped: The model that is trained, on tape.
        around: What its forward leaves.

    Source:
        ``_compute_loss`` in trl/trainer/dpo_trainer.py and kto_trainer.py (1.16.0).
    """
    reference = inputs.setup.config.method.reference_model
    if reference in ("none", "precomputed"):
        return
    around += single_form(Part.ACTIVATIONS, Quantity.TOKENS, LABEL_BYTES)
    around += single_form(Part.LOGITS, Quantity.PREDICTED_TOKENS, STATISTICS_BYTES)
    arguments = layer_arguments(inputs.spec, inputs.setup, masked=inputs.regime.masked) + tables_of_graph(inputs)
    if inputs.setup.config.adapter is not None:
        setup = replace(inputs.setup, config=replace(inputs.setup.config, adapter=None))
        base = tuple(entry for entry in inputs.states.tensors if ".lora_" not in entry.tensor.name)
        taped = model_on_tape(replace(inputs, setup=setup, states=replace(inputs.states, tensors=base)))
    for moment in _evaluation(taped, around, "forward", arguments):
        yield replace(moment, operation=f"reference: {moment.operation}")


def _evaluation(taped: ModelOnTape, around: Form, name: str, arguments: Form = ZERO) -> Iterator[Instant]:
    """Yield the moments of a forward without gradients, whose loss is over all logits at once; layers are given ``arguments``."""
    parts = {EMBEDDING: taped.embedding.evaluated()}
    parts |= {kind: section.evaluated() for kind, section in enumerate(taped.layers)}
    runs = [(kind, run.count) for kind, run in zip(taped.kinds, taped.runs, strict=True)]
    left = {kind: part.carried for kind, part in parts.items()}
    places, around = last_places([(EMBEDDING, 1), *runs], left, around)
    for kind, below in places:
        for moment in parts[kind].forward:
            yield moment.around(below + arguments, name)
    for moment in evaluated_head(taped.settings, taped.weights).evaluated().forward:
        yield moment.around(around, name)
