"""The parts of Qwen3-VL's tower on tape: patches with positions between learned ones, a block, and what merges patches, for early layers too.

Source:
    ``Qwen3VLVisionModel`` and ``Qwen3VLModel`` in transformers/models/qwen3_vl/modeling_qwen3_vl.py;
    ``get_vision_interpolation_indices_and_weights`` in transformers/vision_utils.py (5.23.0).
"""

from functools import lru_cache

from memplan.model.spec import Norm
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import TOKENS, Builder
from memplan.step.blocks.norms import normalised
from memplan.step.playing.section import Section
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value
from memplan.step.tower.tower_sections import (
    IMAGE_TOKENS,
    INSTANT,
    MOST_PARTS,
    PATCHES,
    Named,
    attention,
    convolved,
    fed_forward,
    given_pixels,
    joined_images,
)
from memplan.step.tower.tower_settings import ROW_AND_COLUMN_BYTES, TAP_BYTES, TAPS, TowerSettings

LAYER_NORM = Norm("layer")


@lru_cache(maxsize=MOST_PARTS)
def stacked_opening(settings: TowerSettings, weights: Named) -> Section:
    """Return what makes patches of pixels, and adds to each a mean of what is learned for the positions around its own."""
    builder, hidden = Builder(settings.block, dict(weights)), settings.shape.hidden_size
    tape = builder.tape
    tape.instant = INSTANT
    pixels = given_pixels(builder, settings)
    taps = tape.make("taps", tape.value(PATCHES, TAP_BYTES, 1))
    positions = tape.make("positions", tape.value(PATCHES, ROW_AND_COLUMN_BYTES, 1))
    table = builder.weight("visual.pos_embed.weight")
    with tape.alive(taps, positions):
        x = convolved(builder, settings, pixels, "visual.patch_embed.proj")
        with tape.alive(x):
            rows = tape.value(PATCHES, TAPS * hidden, table.element_bytes)
            saved = [taps] if table.trainable else []
            tape.apply("position embedding", [], rows, saved, [table], Traits(packs=table.trainable))
            wide = tape.value(PATCHES, TAPS * hidden, 4)
            own = [] if table.element_bytes == 4 else [(PATCHES, 4 * TAPS * hidden)]
            tape.apply("weigh", [(rows, NEW)], wide, saved, traits=Traits(workspace=own))
            mean = tape.apply("sum", [(wide, SAME)], tape.value(PATCHES, hidden, 4), traits=SAVES_NOTHING)
            with tape.alive(mean):
                narrow = builder.cast(mean, x.element_bytes)
                out = builder.add(x, narrow)
        with tape.alive(mean, out):
            tables = tape.value(PATCHES, settings.table_bytes, 1)
            tape.make("tables", tables, positions, scratch=[(PATCHES, settings.table_bytes)])
            tape.touch(tables)
    return Section(tape, pixels, out)


@lru_cache(maxsize=MOST_PARTS)
def stacked_block(settings: TowerSettings, weights: Named, full: bool, needs_gradient: bool, width: int) -> Section:
    """Return a block, whose attention is over whole images; the arguments are those of ``tower_block``."""
    del full
    builder, shape = Builder(settings.block, dict(weights)), settings.shape
    tape, hidden = builder.tape, shape.hidden_size
    tape.instant = INSTANT
    entry = tape.given(PATCHES, hidden, width, needs_gradient)
    first = normalised(builder, entry, LAYER_NORM, "norm1", hidden)
    with tape.alive(first):
        part = attention(builder, settings, first, full=True)
    x = builder.add(entry, part)
    return Section(tape, entry, fed_forward(builder, settings, x, "norm2", ("mlp.linear_fc1", "mlp.linear_fc2")))


@lru_cache(maxsize=MOST_PARTS)
def deep_section(settings: TowerSettings, weights: Named, needs_gradient: bool, width: int, apart: bool) -> Section:
    """Return what merges patches behind a block, for an early layer.

    Args:
        needs_gradient: Whether what the block returns needs a gradient.
        width: Bytes of an element of that.
        apart: Whether the bytes of that are counted here, and not where the next block saves it.
    """
    builder, shape = Builder(settings.block, dict(weights)), settings.shape
    tape, unit = builder.tape, shape.merge**2
    tape.instant = INSTANT
    given = tape.given if apart else tape.part_of
    entry = given(PATCHES, shape.hidden_size, width, needs_gradient)
    size = shape.hidden_size * unit
    merged = Value(entry.storage, IMAGE_TOKENS, size * width, width)
    tape.apply("view", [(entry, SAME)], merged, traits=SAVES_NOTHING)
    normed = normalised(builder, merged, LAYER_NORM, "norm", size)
    return Section(tape, entry, _merged(builder, settings, normed, ""))


def _merged(builder: Builder, settings: TowerSettings, x: Value, prefix: str) -> Value:
    """Return patches, one behind another, as tokens for the text model."""
    with builder.tape.alive(x):
        inner = linear(builder, x, f"{prefix}linear_fc1", settings.shape.hidden_size * settings.shape.merge**2)
        inner = builder.pointwise("gelu", inner, (inner,))
        return linear(builder, inner, f"{prefix}linear_fc2", settings.shape.output_size)


@lru_cache(maxsize=MOST_PARTS)
def stacked_closing(
    settings: TowerSettings, weights: Named, needs_gradient: bool, width: int, resident_bytes: int
) -> Section:
    """Return the projector, and what puts its result in the places of tokens; the arguments are those of ``closing_section``."""
    builder, shape = Builder(settings.block, dict(weights)), settings.shape
    tape, unit = builder.tape, shape.merge**2
    tape.instant = INSTANT
    entry = tape.given(PATCHES, shape.hidden_size, width, needs_gradient)
    tokens = tape.given(TOKENS, settings.text_width, settings.text_bytes, settings.reads_tokens)
    resident = tape.given(PATCHES, resident_bytes, 1, needs_gradient=False)
    normed = normalised(builder, entry, LAYER_NORM, "visual.merger.norm", shape.hidden_size)
    merged = Value(normed.storage, IMAGE_TOKENS, normed.coefficient * unit, normed.element_bytes)
    tape.apply("view", [(normed, SAME)], merged, traits=SAVES_NOTHING)
    pooled = _merged(builder, settings, merged, "visual.merger.")
    tape.ends(resident)
    return Section(tape, entry, joined_images(builder, settings, tokens, pooled))
