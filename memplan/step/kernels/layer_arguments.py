"""What a model makes once a forward and calls every layer with: masks for attention step by step, positions, rotary tables."""

from memplan.model.families.family_fields import FamilyCode
from memplan.model.spec import Attention, LatentAttention, Mixer, ModelSpec
from memplan.step.kernels.family_code import family_code, tables_apart, tables_in_layers
from memplan.step.kernels.image_rows import (
    AXES_BYTES,
    attends_jointly,
    has_images,
    is_pooled,
    masks_every_layer,
    named_features,
)
from memplan.step.tapes.linear_forms import ZERO, Form, Part, Quantity, constant_form, single_form
from memplan.training.resolved import FLOAT_BYTES, TrainingSetup
from memplan.units import round_up

POSITION_BYTES = 8


def layer_arguments(spec: ModelSpec, setup: TrainingSetup, *, masked: bool, retained: bool = False) -> Form:
    """Return what a forward makes for its layers, and lets go of where nothing else keeps it; the tables apart.

    Args:
        masked: Whether scaled-dot-product attention is given a mask of booleans.
        retained: Only what some layer is given.
    """
    code = family_code(setup.stack, spec.architecture)
    requested = setup.profile.attention != "eager" and not setup.runs_flash_attn
    idle = code.idle_mask and not spec.window and not retained and requested
    booleans = single_form(Part.ACTIVATIONS, Quantity.SCORES, 1) if (masked and not code.masks_layers) or idle else ZERO
    alike = len(spec.full_layers) in (0, spec.num_hidden_layers)
    if retained and _windows_idle(spec):
        booleans *= 1 if setup.config.masks_rows else 0
    elif setup.config.masks_rows and masked:
        booleans *= _mask_count(spec, code, retained=retained)
    elif attends_jointly(spec, setup) and not (alike and (retained or code.masks_by_kind)):
        booleans *= 2  # within windows, and not
    biases = _biases(spec, setup) if spec.alibi else ZERO
    images = ZERO if retained else named_features(spec, setup)
    return (
        booleans
        + biases
        + _masks(spec, setup, code, retained=retained)
        + _position_ids(spec, setup, code, retained=retained)
        + images
    )


def _windows_idle(spec: ModelSpec) -> bool:
    """Whether an encoder makes a mask of windows that no layer is given."""
    return spec.encoder is not None and spec.window > 0 and len(spec.full_layers) == spec.num_hidden_layers


def mask_scratch(spec: ModelSpec, *, masked: bool) -> Form:
    """Return what is beside embedded tokens as an encoder's mask of windows is formed: differences of positions, and their sizes.

    Source:
        ``sliding_window_bidirectional_overlay`` in transformers/masking_utils.py (5.23.0).
    """
    if spec.encoder is None or not spec.window or not masked:
        return ZERO
    numbers = 2 * POSITION_BYTES  # of queries and of keys
    pairs = single_form(Part.TEMPORARIES, Quantity.SQUARE, numbers)
    return pairs + single_form(Part.TEMPORARIES, Quantity.POSITIONS, numbers)


def _masks(spec: ModelSpec, setup: TrainingSetup, code: FamilyCode, *, retained: bool) -> Form:
    """Return masks of (b, 1, t, t) each, or of (b, 1, 1, t), in the dtype of embedded tokens."""
    # Source: ``GPT2Model.forward`` in transformers/models/gpt2/modeling_gpt2.py, lines 835 to 850 (4.51.3):
    # ``attention_mask[:, None, None, :]``.
    if not code.added_mask or not (setup.profile.attention == "eager" or steps_through_scores(spec, setup)):
        return ZERO
    if spec.encoder is not None and not setup.config.padded_rows:
        return ZERO
    masks = _mask_count(spec, code, retained=retained)
    rows = spec.architecture in setup.stack.models.row_masks
    width = setup.embedded_bytes if spec.encoder is None else setup.residual_bytes  # of what a norm has formed
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS if rows else Quantity.SCORES, masks * width)


def _mask_count(spec: ModelSpec, code: FamilyCode, *, retained: bool) -> int:
    """Return how many masks are made, within windows and not, or ``retained``, as some layer is given them."""
    if code.masks_by_kind:
        return 1 + (0 < len(spec.full_layers) < spec.num_hidden_layers)
    alike = spec.num_hidden_layers < code.masks_from or (code.idle_mask and not spec.window)
    return 1 if retained and alike else code.masks or (2 if spec.window else 1)


def placed_mask(spec: ModelSpec, setup: TrainingSetup) -> Form:
    """Return the mask of :func:`layer_arguments` where layers are given it by its place."""
    # Source: ``GPT2Model.forward`` in transformers/models/gpt2/modeling_gpt2.py, line 609 (5.23.0).
    code = family_code(setup.stack, spec.architecture)
    return _masks(spec, setup, code, retained=True) if code.placed_mask else ZERO


def _biases(spec: ModelSpec, setup: TrainingSetup) -> Form:
    """Return what scores of each head and token get added, in the dtype of the residual stream."""
    # Source: ``build_alibi_tensor`` in transformers/models/bloom/modeling_bloom.py (5.23.0).
    heads = max(run.layer.attention.num_heads for run in spec.runs if isinstance(run.layer.attention, Attention))
    return single_form(Part.ACTIVATIONS, Quantity.TOKENS, heads * setup.residual_bytes)


def other_mask(spec: ModelSpec, setup: TrainingSetup, layer: int, *, masked: bool) -> Form:
    """Return the masks of :func:`layer_arguments`, within windows or not, that some layer is given and none up to ``layer``, the first of which is 1."""
    code = family_code(setup.stack, spec.architecture)
    if not any(isinstance(run.layer.attention, Attention | LatentAttention) for run in spec.runs if run.first < layer):
        return _masks(spec, setup, code, retained=True)
    if (other := _other_kind(spec, layer)) is None:
        return ZERO
    if spec.encoder is not None:  # which is given one of padding alone in layers without windows
        given = masked and (setup.config.masks_rows or other not in spec.full_layers)
        return single_form(Part.ACTIVATIONS, Quantity.SCORES, 1) if given else ZERO
    if masks_every_layer(spec, setup) and setup.profile.attention != "eager":
        return single_form(Part.ACTIVATIONS, Quantity.SCORES, 1)
    one = single_form(Part.ACTIVATIONS, Quantity.SCORES, setup.embedded_bytes)
    return one if _masks(spec, setup, code, retained=True) == one + one else ZERO


def _other_kind(spec: ModelSpec, layer: int) -> int | None:
    """Return a layer, within a window or not, the like of which none is up to ``layer``, the first of which is 1; None for none."""
    full = frozenset(spec.full_layers)
    kinds = [number in full for number in range(spec.num_hidden_layers)]
    below = set(kinds[:layer])
    return next((number for number, kind in enumerate(kinds) if kind not in below), None)


def other_tables(spec: ModelSpec, setup: TrainingSetup, layer: int, *, wide: bool) -> Form:
    """Return the rotary tables that only layers above ``layer``, the first of which is 1, are given, of another kind than those up to it."""
    other = _other_kind(spec, layer)
    if other is None or spec.rotary_tables < 2:
        return ZERO
    part = next(run.layer.attention for run in reversed(spec.runs) if run.first <= other)
    return rotary_tables(spec, setup, wide=wide, entries=_rotary_width(part))


def _position_ids(spec: ModelSpec, setup: TrainingSetup, code: FamilyCode, *, retained: bool) -> Form:
    """Return the numbers of the positions: three of each token where rows hold images, which no layer is given, unless the batch has them."""
    if has_images(spec, setup) and not is_pooled(spec, setup):
        return (
            ZERO
            if retained or setup.stack.images != "model"
            else single_form(Part.ACTIVATIONS, Quantity.TOKENS, AXES_BYTES)
        )
    if (
        spec.alibi
        or setup.config.joined_rows  # the batch tells where each row begins
        or not code.forms_tables
        or (retained and not code.passes_positions)
        or setup.stack.rotary_tables.rows == "batch"
    ):
        return ZERO
    return single_form(Part.ACTIVATIONS, position_quantity(code), POSITION_BYTES)


def position_quantity(code: FamilyCode) -> Quantity:
    """Return what there are learned rows, and numbers of positions, for: the positions of a row, or every token."""
    return Quantity.TOKENS if code.counts_positions else Quantity.POSITIONS


def steps_through_scores(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Whether attention runs step by step anywhere, which takes a mask of one byte per pair of positions."""
    if setup.runs_flash_attn:
        return False
    parts = [run.layer.attention for run in spec.runs]
    return any(isinstance(part, Attention) and (part.sinks or part.logit_softcap > 0) for part in parts)


def masks_attention(spec: ModelSpec, setup: TrainingSetup, length: int) -> bool:
    """Whether a model's code gives scaled-dot-product attention a mask, for a window or always.

    Source:
        ``_ignore_causal_mask_sdpa`` in transformers/masking_utils.py (5.23.0): none within a window, where all tokens count;
        ``flash_attention_mask`` there: none where no token is padding.
    """
    if setup.runs_flash_attn:
        return False
    code = family_code(setup.stack, spec.architecture)
    if (
        not (code.added_mask or code.masks_layers)
        or setup.profile.attention == "eager"
        or steps_through_scores(spec, setup)
    ):
        return False
    if masks_every_layer(spec, setup):
        return True
    return code.masks_always or (code.masks_layers and spec.window > 0) or 0 < spec.window <= length


def rotary_tables(spec: ModelSpec, setup: TrainingSetup, *, wide: bool = False, entries: int | None = None) -> Form:
    """Return the tables of cosines and sines, or one of so many ``entries`` a row.

    Formula:
        ``2 d e`` for each of the positions that there are rows for, half as much where a pair of dimensions shares its
        entries; ``d`` dimensions of a head are rotated, an entry has ``e`` bytes; once for a model and each of its
        bases, or once for each layer.
    """
    tables, code = setup.stack.rotary_tables, family_code(setup.stack, spec.architecture)
    if code.interleaved == "looked-up" or (tables_in_layers(spec, setup) and tables.rows == "sequence"):
        return ZERO  # in tables that layers keep, or form
    widths = [_rotary_width(run.layer.attention) for run in spec.runs for _ in range(run.count)]
    widths_by_dtype = {"fp32": 4, "compute": setup.compute_bytes, "residual": setup.residual_bytes}
    widths_by_dtype |= {"fp32-unless-whole": setup.residual_bytes, "loaded": FLOAT_BYTES.get(setup.loaded_float, 0)}
    element_bytes = 4 if wide or code.wide_rotary or code.complex_rotary else widths_by_dtype[tables.dtype]
    bases = 1 if spec.num_hidden_layers < code.masks_from else spec.rotary_tables
    if entries is None:  # each base has a width of its own, or all are alike
        each = sum(set(widths)) if bases == len(set(widths)) else max(widths) * bases
        entries = sum(widths) if tables_apart(spec, setup) else each
    halved = tables.halved and not (code.halves_by_tables or code.turns_halves)
    row_bytes = entries * element_bytes * (1 if halved or code.complex_rotary or code.half_tables else 2)
    if tables.rows == "grown":
        return single_form(Part.ACTIVATIONS, Quantity.TABLE_ROWS, row_bytes)
    if tables.rows == "model":
        return constant_form(Part.ACTIVATIONS, row_bytes * spec.max_position_embeddings)
    row_bytes *= setup.config.parallel.context  # of the whole sequence
    rows = Quantity.TOKENS if code.sequence_tables or tables.rows == "batch" else Quantity.POSITIONS
    return single_form(Part.ACTIVATIONS, rows, row_bytes)


def copies_tables(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether each call of a layer is given copies of rotary tables in fp32, in the dtype of products."""
    given = setup.stack.model_code == "transformers"  # whose layers are called with them
    wide = family_code(setup.stack, spec.architecture).wide_rotary and setup.compute_bytes < 4
    return setup.stack.rotary_tables.cast_for_layers and given and wide


def casts_tables_again(setup: TrainingSetup) -> bool:
    """Tell whether these are formed inside of what checkpointing computes again, and not retained by it."""
    return setup.checkpointing != "none" and setup.stack.checkpointing.calls_units


def graph_has_tables(spec: ModelSpec, setup: TrainingSetup) -> bool:
    """Tell whether the graph of a loss may have the model's tables: else layers are called with copies, which it has instead."""
    return not copies_tables(spec, setup) or casts_tables_again(setup)


FIRST_ROWS, MORE_ROWS = 4 * 8192, 8192


def grown_rows(positions: int, tokens: int) -> int:
    """Return the rows of rotary tables that are made for all of a model's positions, and grow where a micro-batch has more tokens.

    Args:
        positions: That the model is made for.
        tokens: Of all sequences, which are one behind another.

    Source:
        ``_PerDeviceRopeCache`` and ``LlamaModel_fast_forward`` in unsloth/models/llama.py (2026.10.9), which is told the
        positions of rows without padding.

    Example:
        >>> grown_rows(2048, 1024), grown_rows(131072, 1024), grown_rows(33000, 1024), grown_rows(2048, 4096)
        (2048, 131072, 40960, 8192)
    """
    longest = max(positions, tokens)
    return positions if longest == positions <= FIRST_ROWS else round_up(longest, MORE_ROWS)


def _rotary_width(part: Mixer | None) -> int:
    if isinstance(part, Attention):
        return part.rotary_dim
    return part.qk_rope_head_dim if isinstance(part, LatentAttention) else 0
