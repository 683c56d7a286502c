"""Masks that a model makes for attention step by step."""

from __future__ import annotations

from memplan.model.spec import Attention, ModelSpec
from memplan.step.kernels.family_code import family_code
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.training.resolved import TrainingSetup


def attention_masks(spec: ModelSpec, setup: TrainingSetup, *, kept: bool = False) -> Form:
    """Return the masks that a forward makes: (b, 1, t, t) each, in the dtype of the residual stream.

    Args:
        spec: The model.
        setup: The training setup.
        kept: Only those that some layer is given.
    """
    code = family_code(setup.stack.model_code, spec.architecture)
    if not code.added_mask or not (setup.profile.attention == "eager" or steps_through_scores(spec)):
        return ZERO
    masks = 1 if kept and spec.num_hidden_layers < code.masks_from else code.masks
    return single_form(Part.ACTIVATIONS, Quantity.SCORES, masks * setup.residual_bytes)


def steps_through_scores(spec: ModelSpec) -> bool:
    """Whether attention runs step by step anywhere, which takes a mask of one byte per pair of positions."""
    parts = [run.layer.attention for run in spec.runs]
    return any(isinstance(part, Attention) and (part.sinks or part.logit_softcap > 0) for part in parts)
