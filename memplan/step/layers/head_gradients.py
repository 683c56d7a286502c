"""In which order gradients of query, key and value come back from attention, and where a copy puts them in that of projections."""

from collections.abc import Sequence

from memplan.model.spec import Attention
from memplan.step.blocks.builder import Builder, looked_at
from memplan.step.layers.scaled_dot_product import goes_by_steps
from memplan.step.tapes.taped_operations import Value


def in_heads(builder: Builder, projected: Sequence[Value], part: Attention) -> list[Value]:
    """Return what projections yield with heads before tokens."""
    moved = copied_gradients(builder, part)
    return [looked_at(builder, x) if moves else x for x, moves in zip(projected, moved, strict=True)]


def copied_gradients(builder: Builder, part: Attention) -> list[bool]:
    """Return of which of query, key and value gradients are copied as they come back: where there are several heads, in another order."""
    counts = (part.num_heads, part.num_key_value_heads, part.num_key_value_heads)
    return [n > 1 and moves for n, moves in zip(counts, _moved(builder, part), strict=True)]


def _moved(builder: Builder, part: Attention) -> tuple[bool, bool, bool]:
    """Return of which of query, key and value the gradient comes back with heads before tokens, as that of a slice does.

    So do those of stacked products and of repeated heads, but for that of a key that products were given transposed. A
    norm's kernel in between makes another, as any norm does of a slice's, and what LitGPT's projections yield is so already.
    """
    if builder.settings.code.cuts_sequences:
        return True, True, True
    if builder.settings.regime.one_token or builder.settings.code.adapts_parts:
        return False, False, False
    cut = _slices_rotated(builder, part) and part.query_key_norm is None
    kernel = normed_by_kernel(builder, part)
    late = kernel and part.norms_rotated  # the kernel's result has heads before tokens
    views = views_normed(part) or not kernel
    query, key = (cut or late or (stacked and views) for stacked in heads_first(builder, part))
    return query, key and (cut or late or not is_transposed(builder, part)), heads_first(builder, part)[1]


def heads_first(builder: Builder, part: Attention) -> tuple[bool, bool]:
    """Tell of query, and of key and value, whether gradients are put out with heads before tokens: by products, or by a sum over groups."""
    products, grouped = _multiplies(builder, part), part.num_key_value_heads < part.num_heads
    return products, products or (builder.profile.attention == "efficient" and grouped)


def _multiplies(builder: Builder, part: Attention) -> bool:
    """Tell whether attention is products of heads, operation by operation."""
    return builder.profile.attention == "math" or goes_by_steps(builder, part)


def views_normed(part: Attention) -> bool:
    """Tell whether heads are looked at apart when all of them together have been normalised."""
    return part.query_key_norm is not None and part.query_key_norm_scope == "full" and not part.norms_rotated


def normed_by_kernel(builder: Builder, part: Attention) -> bool:
    """Tell whether query and key are normalised by a kernel, which puts their gradients in order."""
    norm = part.query_key_norm
    return norm is not None and (norm.kind != "rms" or builder.profile.norm != "composite")


def is_transposed(builder: Builder, part: Attention) -> bool:
    """Tell whether the gradient of a key comes back as the products of scores form it: transposed, where nothing repeats or slices heads."""
    whole = part.num_key_value_heads == part.num_heads and not _slices_rotated(builder, part)
    halves = bool(part.rotary_dim) and builder.profile.rotary == "composite" and builder.settings.code.rotates_together
    return _multiplies(builder, part) and whole and not halves  # transformers' slices of halves come back first


def _slices_rotated(builder: Builder, part: Attention) -> bool:
    """Tell whether what is rotated is sliced out of heads."""
    return builder.settings.code.cuts(part.rotary_dim, part.head_dim) and builder.profile.rotary == "composite"


def stays_transposed(builder: Builder, part: Attention) -> bool:
    """Tell whether a key's product copies its gradient, which has come back transposed, with elements of a head before tokens."""
    one = builder.settings.regime.one_sequence or builder.settings.regime.one_token
    return is_transposed(builder, part) and not (one or part.clip or normed_by_kernel(builder, part))
