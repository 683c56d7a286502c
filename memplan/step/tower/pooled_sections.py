"""The parts of SigLIP's tower on tape as Gemma 3 has it: patches with learned positions, a block, and a projector that pools patches.

Source:
    ``SiglipVisionModel`` in transformers/models/siglip/modeling_siglip.py; ``Gemma3MultiModalProjector`` and ``Gemma3Model`` in
    transformers/models/gemma3/modeling_gemma3.py (5.23.0).
"""

from dataclasses import replace
from functools import lru_cache

from memplan.model.spec import Norm
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.blocks.norms import normalised
from memplan.step.playing.section import Section
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Traits, Value
from memplan.step.tower.tower_sections import (
    IMAGE_TOKENS,
    INSTANT,
    MOST_PARTS,
    PATCHES,
    Named,
    attended_images,
    convolved,
    fed_forward,
    given_pixels,
    scattered,
)
from memplan.step.tower.tower_settings import TowerSettings

EMBEDDINGS, PROJECTOR = "vision_tower.embeddings", "multi_modal_projector"
LAYER_NORM = Norm("layer")


@lru_cache(maxsize=MOST_PARTS)
def pooled_opening(settings: TowerSettings, weights: Named) -> Section:
    """Return what makes patches of pixels, and adds to each what is learned for its position."""
    builder, hidden = Builder(settings.block, dict(weights)), settings.shape.hidden_size
    tape = builder.tape
    tape.instant = INSTANT
    pixels = given_pixels(builder, settings)
    x = convolved(builder, settings, pixels, f"{EMBEDDINGS}.patch_embedding")
    table = builder.weight(f"{EMBEDDINGS}.position_embedding.weight")
    rows = tape.value(ONE, settings.grid.patches * hidden, table.element_bytes)
    with tape.alive(x):
        tape.apply("position embedding", [], rows, [], [table], Traits(packs=table.trainable))
        out = builder.fresh(x, element_bytes=max(x.element_bytes, rows.element_bytes))
        own = SAME if out.element_bytes == x.element_bytes else NEW
        tape.apply("add", [(x, own), (rows, NEW)], out, traits=SAVES_NOTHING)
    return Section(tape, pixels, out)


@lru_cache(maxsize=MOST_PARTS)
def pooled_block(settings: TowerSettings, weights: Named, full: bool, needs_gradient: bool, width: int) -> Section:
    """Return a block, whose attention is over whole images; the arguments are those of ``tower_block``."""
    del full
    builder, shape = Builder(settings.block, dict(weights)), settings.shape
    tape, hidden = builder.tape, shape.hidden_size
    tape.instant = INSTANT
    entry = tape.given(PATCHES, hidden, width, needs_gradient)
    with tape.alive(entry):
        first = normalised(builder, entry, LAYER_NORM, "layer_norm1", hidden)
        with tape.alive(first):
            query, key, value = (linear(builder, first, f"self_attn.{name}_proj", hidden) for name in "qkv")
            with tape.alive(query, key, value):
                out = attended_images(builder, settings, (query, key, value))
                part = linear(builder, out, "self_attn.out_proj", hidden)
        x = builder.add(entry, part)
    return Section(tape, entry, fed_forward(builder, settings, x, "layer_norm2", ("mlp.fc1", "mlp.fc2")))


@lru_cache(maxsize=MOST_PARTS)
def pooled_closing(
    settings: TowerSettings, weights: Named, needs_gradient: bool, width: int, resident_bytes: int
) -> Section:
    """Return the last norm, the projector, and what puts its result in the places of tokens; the arguments are those of ``closing_section``."""
    builder, hidden = Builder(settings.block, dict(weights)), settings.shape.hidden_size
    tape = builder.tape
    tape.instant = INSTANT
    entry = tape.given(PATCHES, hidden, width, needs_gradient)
    tokens = tape.given(TOKENS, settings.text_width, settings.text_bytes, settings.reads_tokens)
    resident = tape.given(PATCHES, resident_bytes, 1, needs_gradient=False)
    normed = normalised(builder, entry, LAYER_NORM, "vision_tower.post_layernorm", hidden)
    tape.ends(resident)
    with tape.alive(normed):
        laid = tape.apply("copy", [(normed, NEW)], builder.fresh(normed), traits=SAVES_NOTHING)
        with tape.alive(laid):
            pooled = tape.value(IMAGE_TOKENS, hidden, laid.element_bytes)
            tape.apply("pool", [(laid, NEW)], pooled, [laid])
            small = normalised(builder, pooled, Norm("rms", unit_offset=True), f"{PROJECTOR}.mm_soft_emb_norm", hidden)
            with tape.alive(small):
                x = _projected(builder, settings, small)
            projected = builder.cast(x, normed.element_bytes)
    with tape.alive(projected):
        features = builder.cast(projected, settings.text_bytes)
        with tape.alive(features):
            output = scattered(builder, settings, tokens, features, masks=1)
    return Section(tape, entry, output)


def _projected(builder: Builder, settings: TowerSettings, x: Value) -> Value:
    """Return the product with the projector's matrix, which lies the other way than a linear layer's."""
    tape, weight = builder.tape, builder.weight(f"{PROJECTOR}.mm_input_projection_weight")
    x = builder.lowered(x)
    copy = builder.cast_weight(weight)
    given = tape.apply("copy", [(x, SAME)], builder.fresh(x), traits=SAVES_NOTHING)
    saves = [copy] if copy is not None and x.needs_gradient else []
    saves += [given] if weight.trainable else []
    width = builder.compute if builder.settings.autocast else weight.element_bytes
    out = tape.value(x.quantity, settings.text_width, width)
    weight = replace(weight, formed_bytes=weight.copy_bytes or weight.formed_bytes) if weight.trainable else weight
    tape.apply("project", [(given, NEW)], out, saves, [weight], Traits(product=True, matrices=True))
    tape.touch(*([copy] if copy is not None else []))
    return out
