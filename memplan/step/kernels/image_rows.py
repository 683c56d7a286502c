"""Rows with images: how many patches they have, and what a model has names for while its layers run."""

from memplan.model.spec import ModelSpec
from memplan.model.tower import ImageGrid
from memplan.step.kernels.family_code import family_code
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, single_form
from memplan.training.image_models import runs_ahead
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup

AXES_BYTES = 24
"""Of a token: its time, row and column, in 64 bits each (``get_rope_index`` in modeling_qwen2_5_vl.py, transformers 5.23.0)."""

KIND_BYTES = OFFSET_BYTES = POSITION_BYTES = 8
"""Of a token: whether it is text or of an image, and its place in its row; of a row: by how much its positions are fewer than its tokens.
In 64 bits each."""

PIXEL_BYTES = 4
"""Of a number of a patch as a processor makes it, in fp32."""


def has_images(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether rows hold images that pass through a tower."""
    return spec.tower is not None and setup.config.images.per_row > 0


def attends_jointly(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether tokens of an image attend to all of it, for which every layer's attention is given a mask.

    Source:
        ``create_masks_for_vision_model`` in transformers/models/gemma3/modeling_gemma3.py (5.23.0); flash-attn is given none.
        ``Gemma4UnifiedModel.forward`` in models/gemma4_unified/modeling_gemma4_unified.py tells every token its image, text too.
    """
    jointly = family_code(setup.stack, spec.architecture).masks_jointly
    return (jointly or is_pooled(spec, setup)) and not setup.runs_flash_attn


def masks_every_layer(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether attention of layers without a window is given a mask too: for tokens of an image, of several rows in one, or for padding.

    Source:
        ``create_causal_mask`` in transformers/masking_utils.py (5.24.0): ``packed_sequence_mask``, ``padding_mask``.
    """
    return setup.config.masks_rows or attends_jointly(spec, setup)


def is_pooled(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether rows hold images whose patches are pooled."""
    shape = spec.tower.shape if spec.tower is not None and has_images(spec, setup) else None
    return shape is not None and shape.kind == "pooled"


def is_embedded_ahead(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether images pass through the tower ahead of the forward, out of autocast."""
    return runs_ahead(spec, setup.config, setup.stack)


def asks_by_layer(setup: TrainingSetup) -> bool:
    """Tell whether layers that train make what they are given need a gradient, and embeddings nothing: PEFT asks them, but over codes.

    Source:
        ``get_custom_gradient_checkpointing_func`` in llamafactory/model/model_utils/checkpointing.py (0.9.5);
        ``prepare_model_for_gradient_checkpointing`` in peft/peft_model.py (0.21.2).
    """
    requested = setup.config.adapter is not None and setup.format_names["hidden_matrix"] in FLOAT_BYTES
    return setup.stack.input_gradients == "trained-layers" and not requested


def image_grid(spec: ModelSpec, setup: TrainingSetup) -> ImageGrid | None:
    """Return the patches of one image; None for rows of text."""
    if spec.tower is None or spec.tower.shape is None or not setup.config.images.per_row:
        return None
    images = setup.config.images
    return spec.tower.shape.grid(*spec.tower.shape.sides(images.height, images.width, images.pixels))


def image_sizes(spec: ModelSpec, setup: TrainingSetup) -> tuple[int, int]:
    """Return how many patches a row has, and how many of its tokens they become."""
    grid, images = image_grid(spec, setup), setup.config.images.per_row
    return (0, 0) if grid is None else (images * grid.patches, images * grid.merged)


def named_features(spec: ModelSpec, setup: TrainingSetup) -> Form:
    """Return what a model has names for of images until its layers have run: what the tower returned, and what that became.

    With embeddings of each layer it names those rows, and embedded tokens without images, be there any or not.

    Source:
        ``Qwen2_5_VLModel.forward`` in transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py (5.23.0): ``mm_encoder_outputs``,
        ``image_embeds``, ``image_mask``; ``Gemma4Model.forward`` in models/gemma4/modeling_gemma4.py (5.24.0): ``llm_inputs_embeds``,
        ``per_layer_inputs``.
    """
    if spec.tower is not None and spec.layer_input:
        numbers = spec.hidden_size + spec.num_hidden_layers * spec.layer_input
        return single_form(Part.ACTIVATIONS, Quantity.TOKENS, numbers * setup.embedded_bytes)
    if spec.tower is None or spec.tower.shape is None or not has_images(spec, setup) or is_embedded_ahead(spec, setup):
        return ZERO
    shape = spec.tower.shape
    if shape.kind == "pooled":  # a norm under autocast returns fp32; ``special_image_mask``
        last = 4 if setup.autocast else setup.residual_bytes
        features = shape.output_size * (last + (setup.residual_bytes if setup.residual_bytes != last else 0))
        form = single_form(Part.ACTIVATIONS, Quantity.PATCHES, shape.hidden_size * last)
        form += single_form(Part.ACTIVATIONS, Quantity.TOKENS, 1)
        return form + single_form(Part.ACTIVATIONS, Quantity.IMAGE_TOKENS, features)
    stream = setup.compute_bytes if setup.autocast else setup.residual_bytes
    features = shape.output_size * (stream + setup.residual_bytes + 2 * len(shape.deep_blocks) * stream)
    form = single_form(Part.ACTIVATIONS, Quantity.PATCHES, shape.hidden_size * stream)
    return form + single_form(Part.ACTIVATIONS, Quantity.IMAGE_TOKENS, features)


def image_batch(spec: ModelSpec, setup: TrainingSetup, batches: int) -> Form:
    """Return pixels, sizes of images and kinds of tokens that so many micro-batches have, and the offsets that a model keeps.

    Source:
        ``Qwen2_5_VLProcessor`` in transformers/models/qwen2_5_vl/processing_qwen2_5_vl.py, ``rope_deltas`` in modeling_qwen2_5_vl.py
        (5.23.0); ``MultiModalDataCollatorForSeq2Seq`` in llamafactory/data/collator.py (0.9.5); ``Qwen2VLTemplate`` in
        swift/template/templates/qwen.py (ms-swift 4.6.0).
    """
    if spec.tower is None or spec.tower.shape is None or not has_images(spec, setup):
        return ZERO
    form = single_form(Part.ACTIVATIONS, Quantity.PATCHES, PIXEL_BYTES * spec.tower.shape.patch_values)
    how, pooled = setup.stack.images, spec.tower.shape.kind == "pooled"
    kinds = KIND_BYTES if pooled or how != "positions" else 0
    positions = 0 if pooled or how == "model" else AXES_BYTES + POSITION_BYTES
    form += single_form(Part.ACTIVATIONS, Quantity.TOKENS, kinds + positions)
    if pooled:
        return form * batches
    offsets = single_form(Part.ACTIVATIONS, Quantity.SEQUENCES, OFFSET_BYTES)
    form += single_form(Part.ACTIVATIONS, Quantity.SEQUENCES, AXES_BYTES * setup.config.images.per_row)
    form += offsets if how == "positions" else ZERO
    return form * batches + (offsets if how == "model" else ZERO)
