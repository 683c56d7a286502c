"""The parts of a vision tower on tape: patches made of pixels, attention of patches, a block, and the projector."""

from dataclasses import replace
from functools import lru_cache

from memplan.model.spec import Mlp, Norm
from memplan.step.blocks.adapted_projections import linear
from memplan.step.blocks.builder import ONE, TOKENS, Builder
from memplan.step.blocks.norms import normalised
from memplan.step.feed_forwards.feed_forward import activated, mlp
from memplan.step.layers.attention_kernels import FLASH_ATTN_RANDOM_BYTES, RANDOM_STATE_BYTES
from memplan.step.layers.rotation import turned_whole
from memplan.step.playing.section import Section
from memplan.step.tapes.linear_forms import Part, Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Sizes, Traits, Value, Weight
from memplan.step.tower.tower_settings import MASK_BYTES, ROW_AND_COLUMN_BYTES, TowerSettings
from memplan.units import round_up

ROWS = Quantity.SEQUENCES
Heads = tuple[Value, Value, Value]
"""Query, key and value."""


def attended_patches(builder: Builder, settings: TowerSettings, heads: Heads, *, full: bool) -> Value:
    """Return what patches attend to: those of their window, or of their image where it is ``full``."""
    lengths = (settings.grid.patches,) if full else settings.grid.windows
    if builder.settings.flash_attn:
        return _at_once(builder, settings, heads, lengths)
    return _one_by_one(builder, settings, heads, lengths)


def _one_by_one(builder: Builder, settings: TowerSettings, heads: Heads, lengths: tuple[int, ...]) -> Value:
    """Return the results of a kernel for each of ``lengths`` patches, joined.

    Backward forms the gradients of a length's query, key and value when it lets go of its result, so that it is the fullest
    when all gradients are there and the results of the others have gone.
    """
    tape, kernel, number = builder.tape, builder.profile.attention, settings.shape.heads
    apart = [tape.apply("split", [(x, NEW)], tape.view(x), traits=SAVES_NOTHING) for x in heads]
    parts = [builder.lowered(x) for x in apart]
    query = parts[0]
    out = builder.fresh(query)
    aligned = [round_up(length, 32) if kernel == "efficient" else length for length in lengths]
    statistics = tape.value(ROWS, settings.per_row * sum(aligned) * number, 4)
    random = tape.value(ROWS, settings.per_row * len(lengths) * RANDOM_STATE_BYTES[kernel], 1)
    unused = [(x.quantity, x.coefficient) for x in parts if not x.needs_gradient]
    scratch = _flash_workspace(max(lengths), number, settings.head_dim) if kernel == "flash" else ()
    traits = Traits(workspace=(*scratch, *unused), product=True)
    ways = [(x, NEW) for x in parts]
    tape.apply("attention", ways, (out, statistics, random), parts, traits=traits)
    retained = tape.apply("results", [(out, SAME)], tape.view(out), [out, statistics, random])
    with tape.alive(*apart, retained):
        return tape.apply("cat", [(retained, SAME)], builder.fresh(retained), traits=SAVES_NOTHING)


def attended_images(builder: Builder, settings: TowerSettings, heads: Heads) -> Value:
    """Return what patches attend to, those of their image, by one call for all images."""
    tape, kernel, number, length = builder.tape, builder.profile.attention, settings.shape.heads, settings.grid.patches
    parts = [builder.lowered(x) for x in heads]
    if builder.settings.flash_attn and parts[0].element_bytes == 4:  # ``fa_peft_integration_check`` of transformers
        parts = [builder.cast(x, builder.compute) for x in parts]
    out = builder.fresh(parts[0])
    aligned = round_up(length, 32) if kernel == "efficient" else length
    statistics = tape.value(ROWS, settings.per_row * aligned * number, 4)
    states = FLASH_ATTN_RANDOM_BYTES if builder.settings.flash_attn else RANDOM_STATE_BYTES[kernel]
    random = tape.value(ONE, states, 1)
    unused = [(x.quantity, x.coefficient) for x in parts if not x.needs_gradient]
    scratch = _flash_workspace(length, number, settings.head_dim) if kernel == "flash" else ()
    each = [(ROWS, settings.per_row * size) for _, size in scratch]
    traits = Traits(workspace=(*each, *unused), product=True)
    ways = [(x, NEW) for x in parts]
    tape.apply("attention", ways, (out, statistics, random), [*parts, out, statistics, random], traits=traits)
    return out


def _flash_workspace(length: int, heads: int, width: int) -> Sizes:
    """Return what flash attention's backward allocates inside itself for the longest of several calls."""
    # Source: flash_api.cpp, ``mha_bwd`` (v2.13.0): softmax_d and dq_accum in fp32 over lengths rounded to 128.
    rows = round_up(length, 128)
    return ((ONE, 4 * heads * rows), (ONE, 4 * rows * heads * round_up(width, 32 if width <= 128 else 64)))


def _at_once(builder: Builder, settings: TowerSettings, heads: Heads, lengths: tuple[int, ...]) -> Value:
    """Return the result of the package flash-attn, which is told where each length begins."""
    # Source: csrc/flash_attn/flash_api.cpp of Dao-AILab/flash-attention (2.8), ``mha_varlen_bwd``: rows of fp32 for all
    # patches and 128 more for each length.
    tape, number = builder.tape, settings.shape.heads
    heads = tuple([builder.lowered(x) for x in heads])  # type: ignore[assignment]
    if heads[0].element_bytes == 4:  # ``fa_peft_integration_check`` of transformers
        heads = tuple([builder.cast(x, builder.compute) for x in heads])  # type: ignore[assignment]
    query = heads[0]
    out = builder.fresh(query)
    statistics = tape.value(query.quantity, number, 4)
    random = tape.value(ONE, FLASH_ATTN_RANDOM_BYTES, 1)
    width = round_up(settings.head_dim, 32 if settings.head_dim <= 192 else 256)
    row = 4 * number * (1 + width)
    more = settings.per_row * len(lengths) * 128
    unused = [(x.quantity, x.coefficient) for x in heads if not x.needs_gradient]
    traits = Traits(workspace=((query.quantity, row), (ROWS, row * more), *unused), product=True)
    tape.apply(
        "attention",
        [(x, NEW) for x in heads],
        (out, statistics, random),
        [*heads, out, statistics, random],
        traits=traits,
    )
    return out


PATCHES, IMAGE_TOKENS = Quantity.PATCHES, Quantity.IMAGE_TOKENS
MOST_PARTS = 64
"""Parts of towers that are remembered."""

Named = tuple[tuple[str, Weight], ...]
INSTANT = "end of backward"
"""Instant of a tower's backward, which comes when the layers are done."""


@lru_cache(maxsize=MOST_PARTS)
def opening_section(settings: TowerSettings, weights: Named) -> Section:
    """Return what makes patches of pixels, puts those of a window together, and makes tables for them."""
    builder = Builder(settings.block, dict(weights))
    tape = builder.tape
    tape.instant = INSTANT
    pixels = given_pixels(builder, settings)
    positions = tape.make("positions", tape.value(PATCHES, ROW_AND_COLUMN_BYTES, 1))
    with tape.alive(positions):
        x = convolved(builder, settings, pixels, "visual.patch_embed.proj")
        x = tape.apply("windows", [(x, NEW)], builder.fresh(x), traits=SAVES_NOTHING)
        with tape.alive(x):
            tables = tape.value(PATCHES, settings.table_bytes, 1)
            tape.make("tables", tables, positions, scratch=[(PATCHES, settings.table_bytes)])
            tape.touch(tables)
    return Section(tape, pixels, x)


def given_pixels(builder: Builder, settings: TowerSettings) -> Value:
    """Return the numbers of patches: a copy in the dtype of the patches' weight, or where that is fp32 what the batch has."""
    tape = builder.tape
    given = tape.given if settings.patch_bytes != 4 else tape.part_of
    return given(PATCHES, settings.shape.patch_values, settings.patch_bytes, False)


def convolved(builder: Builder, settings: TowerSettings, pixels: Value, name: str) -> Value:
    """Return the product of each patch's numbers with the weight of this name, a convolution that no patch overlaps in.

    SigLIP's says its padding in a word (``valid``): autocast does not know that overload, and casts nothing.

    Source:
        ``AT_FORALL_LOWER_PRECISION_FP`` in aten/src/ATen/autocast_mode.h: ``conv2d`` and ``conv3d``; ``conv2d.padding`` in
        aten/src/ATen/native/Convolution.cpp (v2.13.0).
    """
    tape, weight, bias = builder.tape, builder.weight(f"{name}.weight"), builder.weights.get(f"{name}.bias")
    given, copy = pixels, None
    casts = settings.block.autocast and settings.shape.kind != "pooled"
    if casts:
        given = builder.cast(pixels, builder.compute)
        copy = builder.cast_weight(weight)
        weight = replace(weight, formed_bytes=weight.copy_bytes if weight.trainable else 0)
    saves = [given, *([] if copy is None else [copy])] if weight.trainable else []
    width = builder.compute if casts else settings.patch_bytes
    out = tape.value(PATCHES, settings.shape.hidden_size, width)
    used = [weight] if bias is None else [weight, bias]
    tape.apply("patches", [], out, saves, used, Traits(packs=weight.trainable))
    tape.touch(*([copy] if copy is not None else []))
    out.needs_gradient = out.needs_gradient or settings.leaf == "patches"
    return out


def fed_forward(builder: Builder, settings: TowerSettings, x: Value, norm: str, products: tuple[str, str]) -> Value:
    """Return the stream behind a LayerNorm and two matrices around an activation, which are added to it; names are given."""
    tape, shape = builder.tape, settings.shape
    with tape.alive(x):
        normed = normalised(builder, x, Norm("layer"), norm, shape.hidden_size)
        with tape.alive(normed):
            inner = activated(builder, linear(builder, normed, products[0], shape.intermediate_size))
            fed = linear(builder, inner, products[1], shape.hidden_size)
        return builder.add(x, fed)


@lru_cache(maxsize=MOST_PARTS)
def tower_block(settings: TowerSettings, weights: Named, full: bool, needs_gradient: bool, width: int) -> Section:
    """Return a block: attention within windows or over whole images, and a gated feed-forward part.

    Args:
        full: Whether attention is over whole images.
        needs_gradient: Whether what it is given needs a gradient.
        width: Bytes of an element of that.
    """
    builder, shape = Builder(settings.block, dict(weights)), settings.shape
    tape, hidden = builder.tape, shape.hidden_size
    tape.instant = INSTANT
    entry = tape.given(PATCHES, hidden, width, needs_gradient)
    first = normalised(builder, entry, Norm("rms"), "norm1", hidden)
    with tape.alive(first):
        part = attention(builder, settings, first, full=full)
    x = builder.add(entry, part)
    with tape.alive(x):
        second = normalised(builder, x, Norm("rms"), "norm2", hidden)
        fed = mlp(builder, second, Mlp(shape.intermediate_size, bias=True), "mlp")
        output = builder.add(x, fed)
    return Section(tape, entry, output)


def attention(builder: Builder, settings: TowerSettings, x: Value, *, full: bool) -> Value:
    """Return attention of patches, whose query and key are rotated in fp32."""
    tape, hidden = builder.tape, settings.shape.hidden_size
    fused = linear(builder, x, "attn.qkv", 3 * hidden)
    laid = tape.apply("reshape", [(fused, NEW)], tape.view(fused), traits=SAVES_NOTHING)
    query, key, value = (tape.view(fused, hidden) for _ in range(3))
    tape.apply("unbind", [(laid, NEW)], (query, key, value), traits=SAVES_NOTHING)
    with tape.alive(fused):
        query, key = _rotated(builder, query, key)
        with tape.alive(query, key, value):
            out = attended_patches(builder, settings, (query, key, value), full=full)
            return linear(builder, out, "attn.proj", hidden)


def _rotated(builder: Builder, query: Value, key: Value) -> tuple[Value, Value]:
    """Return query and key rotated by tables in fp32, and cast back (``apply_rotary_pos_emb_vision``)."""
    tape, narrow = builder.tape, query.element_bytes
    wide_query = builder.cast(query, 4)
    with tape.alive(wide_query):
        wide_key = builder.cast(key, 4)
        with tape.alive(wide_key):
            first = turned_whole(builder, wide_query, cosines_first=True)
            with tape.alive(first):
                second = turned_whole(builder, wide_key, cosines_first=True)
            with tape.alive(second):
                turned = builder.cast(first, narrow, foreign=query.foreign)
            with tape.alive(turned):
                return turned, builder.cast(second, narrow, foreign=key.foreign)


@lru_cache(maxsize=MOST_PARTS)
def closing_section(
    settings: TowerSettings, weights: Named, needs_gradient: bool, width: int, held_bytes: int
) -> Section:
    """Return the projector, and what puts its result in the places of tokens.

    Args:
        needs_gradient: Whether what the last block returns needs a gradient.
        width: Bytes of an element of that.
        held_bytes: Of a patch: what the tower has names for until it returns.
    """
    builder, shape = Builder(settings.block, dict(weights)), settings.shape
    tape, unit = builder.tape, shape.merge**2
    tape.instant = INSTANT
    entry = tape.given(PATCHES, shape.hidden_size, width, needs_gradient)
    tokens = tape.given(TOKENS, settings.text_width, settings.text_bytes, settings.reads_tokens)
    resident = tape.given(PATCHES, held_bytes, 1, needs_gradient=False)
    normed = normalised(builder, entry, Norm("rms"), "visual.merger.ln_q", shape.hidden_size)
    merged = Value(
        normed.storage, IMAGE_TOKENS, normed.coefficient * unit, normed.element_bytes, foreign=normed.foreign
    )
    tape.apply("view", [(normed, SAME)], merged, traits=SAVES_NOTHING)
    with tape.alive(merged):
        x = linear(builder, merged, "visual.merger.mlp.0", shape.hidden_size * unit)
        x = builder.pointwise("gelu", x, (x,))
        x = linear(builder, x, "visual.merger.mlp.2", shape.output_size)
    pooled = tape.apply("order", [(x, NEW)], builder.fresh(x), traits=SAVES_NOTHING)
    tape.ends(resident)
    if settings.ahead:
        features = builder.cast(pooled, settings.text_bytes)
        with tape.alive(pooled, features):
            return Section(tape, entry, scattered(builder, settings, tokens, features, masks=1))
    return Section(tape, entry, joined_images(builder, settings, tokens, pooled))


def joined_images(builder: Builder, settings: TowerSettings, tokens: Value, pooled: Value) -> Value:
    """Return tokens with images' in their places, which are split by image and joined again."""
    tape = builder.tape
    parts = tape.apply("split", [(pooled, NEW)], tape.view(pooled), traits=SAVES_NOTHING)
    with tape.alive(pooled):
        joined = tape.apply("cat", [(parts, SAME)], builder.fresh(parts), traits=SAVES_NOTHING)
        features = builder.cast(joined, settings.text_bytes)
        with tape.alive(features):
            return scattered(builder, settings, tokens, features, masks=2)


def scattered(builder: Builder, settings: TowerSettings, tokens: Value, features: Value, masks: int) -> Value:
    """Return tokens with images' in their places, by the first of so many masks: CUDA counts the places of a mask as wide as the tokens, and looks them up again.

    Source:
        aten/src/ATen/native/cuda/IndexKernel.cpp and IndexKernel.cu: a sum of 64 bits and the mask for each number;
        Nonzero.cu: the mask, and three indices of 64 bits for each number that it chooses (v2.13.0).
    """
    tape, width = builder.tape, settings.text_width
    mask, *others = [tape.make("mask", tape.value(TOKENS, MASK_BYTES, 1), tokens) for _ in range(masks)]
    tape.touch(mask)
    indices = (IMAGE_TOKENS, 3 * 8 * width)
    chosen = tape.apply(
        "choose", [(features, NEW)], tape.view(features), traits=Traits(packs=False, workspace=[indices])
    )
    counted = Traits(packs=False, workspace=[(TOKENS, width), indices])
    result = tape.apply("find", [(chosen, SAME)], tape.view(chosen), traits=counted)
    out = builder.fresh(tokens)
    traits = Traits(scratch=[(TOKENS, 8 * width), (TOKENS, width)])
    tape.apply("scatter", [(tokens, NEW), (result, SAME)], out, [mask], traits=traits)
    tape.touch(mask, *others)
    return out


def cast_pixels(settings: TowerSettings) -> tuple[Part, Quantity, int]:
    """Return the pixels in the dtype of the patches' weight; nothing where that is the one that they come in."""
    size = settings.shape.patch_values * settings.patch_bytes if settings.patch_bytes != 4 else 0
    return Part.ACTIVATIONS, PATCHES, size
