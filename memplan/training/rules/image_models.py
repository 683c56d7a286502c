"""Vision-language models as stacks train them on rows with images: what of a tower trains, and what is not modelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memplan.catalog.config_keys.method_keys import Images
from memplan.catalog.config_keys.parallel_keys import Parallel
from memplan.catalog.kernel_profiles import KernelProfile
from memplan.catalog.stacks import Stack
from memplan.catalog.training_config import ALL_TRAIN, TrainingConfig
from memplan.errors import CannotAnswerError, InvalidFileError
from memplan.model.inventory import ParameterTensor
from memplan.model.model import Model
from memplan.training.rules.image_rules import UNSAID

WITH_IMAGES = ("plain-loop", "transformers", "trl")
"""Stacks whose own code was traced on rows with images."""


def with_images(
    model: Model, name: str, config: TrainingConfig, stack: Stack, profile: KernelProfile, *, integers: bool
) -> Model:
    """Return a vision-language model as a stack trains it on rows with images.

    Args:
        name: What messages call the config.
        integers: Whether hidden matrices are multiplied as integers.

    Raises:
        InvalidFileError: Images are no whole patches, or leave a row no text.
        CannotAnswerError: They pass through a tower, or in a way, that is not modelled.
    """
    tower, images = model.spec.tower, config.images
    assert tower is not None
    where, shape = f"{name}: images:", tower.shape
    if shape is None:
        raise CannotAnswerError(
            f"{where} what images pass through of family {model.spec.architecture} is not modelled; of qwen2_5_vl and gemma3 it is"
        )
    for text in _unmodelled_images(config, stack, profile, integers=integers):
        raise CannotAnswerError(f"{where} {text}")
    given = {side for side in (images.height, images.width) if side is not None}
    if shape.image_size is None and not given and images.pixels is None:
        raise InvalidFileError([f"{where} rows with images need {UNSAID} (images.height, images.width, images.pixels)"])
    if shape.image_size is not None and (given - {shape.image_size} or images.pixels is not None):
        size = shape.image_size
        text = f"{model.spec.name}'s processor makes every image {size} x {size} pixels; leave height, width and pixels out"
        raise InvalidFileError([f"{where} {text}"])
    if images.pixels is not None and images.pixels < shape.step**2:
        text = f"an image becomes no token of {images.pixels} pixels (images.pixels); the least is {shape.step**2}"
        raise InvalidFileError([f"{where} {text}"])
    height, width = shape.sides(images.height, images.width, images.pixels)
    if wrong := [side for side in (height, width) if side % shape.step]:
        below = max(shape.step, wrong[0] // shape.step * shape.step)
        text = (
            f"{wrong[0]} is no multiple of {shape.step} pixels, as {model.spec.name}'s processor makes it; {below} is"
        )
        raise InvalidFileError([f"{where} {text}"])
    tokens = shape.grid(height, width).merged * images.per_row
    said = f"{images.per_row} of {height} x {width} pixels"
    if tokens >= config.sequence_length:
        text = f"{said} become {tokens:,} tokens, and a row has {config.sequence_length:,} (sequence_length)"
        raise InvalidFileError([f"{where} {text}"])
    frozen = config.adapter is None
    inventory = tuple(
        tensor
        if tensor.used
        else replace(tensor, used=True, frozen=frozen and _is_frozen(tensor, tower.projector, images))
        for tensor in model.inventory
    )
    note = (
        f"images in each row: {said}, {tokens:,} of its {config.sequence_length:,} tokens; cuDNN's workspace for the patches' "
        "convolution is not counted"
    )
    return noted(replace(model, inventory=inventory), note)


def noted(model: Model, note: str) -> Model:
    """Return a model with a note, once where it was built before, as it is for each card."""
    return replace(model, notes=tuple(dict.fromkeys((*model.notes, note))))


def _is_frozen(tensor: ParameterTensor, projector: str, images: Images) -> bool:
    """Tell whether a tensor of a tower or its projector is frozen."""
    return (images.projector if tensor.name.startswith(projector) else images.tower) == "frozen"


def _unmodelled_images(
    config: TrainingConfig, stack: Stack, profile: KernelProfile, *, integers: bool
) -> Iterator[str]:
    """Yield what of a job with images is not modelled."""
    if stack.name not in WITH_IMAGES:
        yield f"not modelled for stack {stack.name}; {', '.join(WITH_IMAGES)} are; or plan rows of text (images.per_row: 0)"
    if config.parallel != Parallel():
        yield "not modelled on several GPUs; plan one (parallel.data: 1), or rows of text"
    if config.method.stage != "sft":
        yield f"not modelled for method.stage {config.method.stage}; sft is"
    if config.freeze != ALL_TRAIN:
        yield "not modelled with freeze; images.tower and images.projector say what of theirs is frozen"
    if config.evaluation:
        yield "a forward that evaluates is not modelled with images; leave evaluation out"
    if config.compile != "none":
        yield "not modelled for compiled models; use compile: none"
    attention = config.kernels.attention or stack.kernels.attention
    if attention in ("eager", "math", "flex"):
        yield f"attention of patches by {attention} is not modelled; use kernels.attention: auto"
    if integers:
        yield "LLM.int8 of a tower that images pass through is not modelled; use nf4"
    if any(getattr(profile, key) == "in-place" for key in ("norm", "rotary", "activation")):
        yield "Liger's kernels in a tower are not modelled; leave them out"
    if config.activation_checkpointing == "selective":
        yield "selective checkpointing of a tower is not modelled; use full or none"
