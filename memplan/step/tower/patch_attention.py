"""Attention of patches on a tape: one call for each window or image, whose results are joined, or one for all."""

from memplan.step.blocks.builder import ONE, Builder
from memplan.step.layers.attention_kernels import FLASH_ATTN_RANDOM_BYTES, RANDOM_STATE_BYTES
from memplan.step.tapes.linear_forms import Quantity
from memplan.step.tapes.taped_operations import NEW, SAME, SAVES_NOTHING, Sizes, Traits, Value
from memplan.step.tower.tower_settings import TowerSettings
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
