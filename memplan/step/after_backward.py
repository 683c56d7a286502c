"""The instants behind backward: clipping, the optimizer step, evaluation."""

from collections.abc import Iterator

from memplan.step.model_on_tape import ModelOnTape
from memplan.step.no_grad_instants import evaluation, generation
from memplan.step.states.optimizer_scratch import average_bytes
from memplan.step.step_inputs import LOSS_SCALE_BYTES, StepInputs
from memplan.step.tapes.linear_forms import ZERO, Form, Part, constant_form
from memplan.step.tapes.moments import Instant


def after_backward(
    inputs: StepInputs, taped: ModelOnTape, filled_bytes: int, validated: Form = ZERO
) -> Iterator[Instant]:
    """Yield the instants from the end of backward to the next forward.

    Args:
        filled_bytes: Gradients that the step leaves, filled with zeros.
        validated: Logits that a loop of evaluation still has a name for.
    """
    config, tensors = inputs.setup.config, inputs.states.tensors
    gradients = constant_form(Part.GRADIENTS, 0 if config.gradients.lifetime == "layer" else inputs.gradient_bytes)
    if config.gradients.lifetime == "step":
        scaling = LOSS_SCALE_BYTES if inputs.setup.scales_loss else 0
        update = constant_form(Part.TEMPORARIES, max(inputs.optimizer.bytes, scaling))
        yield Instant("optimizer step", "update", gradients + update)
    if config.clip_gradients:
        scratch = constant_form(Part.TEMPORARIES, inputs.clipping_bytes)
        yield Instant("gradient clipping", "norms", gradients + scratch)
    filled = constant_form(Part.GRADIENTS, filled_bytes)
    if config.weight_average != "none" and config.gradients.lifetime == "step":
        scratch = constant_form(Part.TEMPORARIES, average_bytes(inputs.setup, tensors))
        yield Instant("optimizer step", "moving average", filled + scratch)
    if inputs.setup.answer_length:
        yield from generation(inputs, taped, filled)
    if config.evaluation:
        yield from evaluation(inputs, taped, filled + validated)
    if config.save_checkpoint:
        yield Instant("checkpoint saving", "state_dict", filled)
