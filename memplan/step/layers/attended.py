"""Attention of query, key and value on a tape: by the kernel that a setup asks for, or step by step."""

from __future__ import annotations

from memplan.model.spec import Attention
from memplan.step.blocks.builder import Builder
from memplan.step.layers.attention_kernels import (
    Heads,
    additive_mask,
    attention_kernel,
    bucketed_attention,
    eager_attention,
    flash_attention,
    flex_attention,
    math_attention,
    ungrouped,
)
from memplan.step.layers.stepwise_attention import capped_attention, masked_in_layer, stepwise_attention
from memplan.step.tapes.taped_operations import Value


def attended(builder: Builder, heads: Heads, part: Attention | None = None) -> Value:
    """Return attention."""
    stepwise = goes_by_steps(builder, part)
    if stepwise and builder.settings.code.masks_layers:
        return capped_attention(builder, heads)
    if stepwise and builder.settings.code.added_mask:
        return stepwise_attention(builder, heads, part)
    if stepwise and part is not None and builder.settings.code.scales_in_place:
        return masked_in_layer(builder, heads, part)
    if builder.settings.regime.masked and builder.settings.code.asks_for_groups and not stepwise:
        heads = ungrouped(builder, heads, expands=True)  # before autocast casts them
    query, key, value = (builder.lowered(x) for x in heads.tensors)
    if builder.settings.flash_attn and query.element_bytes == 4:  # ``fa_peft_integration_check`` of transformers
        query, key, value = (builder.cast(x, builder.compute) for x in heads.tensors)
    lowered = Heads(query, key, value, heads.number, heads.groups)
    with builder.tape.alive(query, key, value):
        if stepwise and part is not None:
            return eager_attention(builder, lowered, part)
        if builder.settings.regime.masked:
            return _masked(builder, lowered)
        if builder.profile.attention == "math":
            return math_attention(builder, lowered)
        if builder.profile.attention == "flash":
            return flash_attention(builder, lowered)
        if builder.profile.attention == "flex":
            return flex_attention(builder, lowered)
        if builder.profile.attention == "cudnn" and builder.settings.code.cuts_sequences:
            return bucketed_attention(builder, lowered)
        efficient = builder.profile.attention == "efficient"
        return attention_kernel(builder, ungrouped(builder, lowered) if efficient else lowered)


def _masked(builder: Builder, heads: Heads) -> Value:
    """Return attention by a kernel that is given a mask, for which keys and values are repeated."""
    if heads.groups > 1:
        heads = ungrouped(builder, heads)
    with builder.tape.alive(*heads.tensors):
        mask = additive_mask(builder, heads.query)
        with builder.tape.alive(mask):
            if builder.profile.attention == "math":
                return math_attention(builder, heads, (mask,))
            return attention_kernel(builder, heads, masks=(mask,))


def goes_by_steps(builder: Builder, part: Attention | None) -> bool:
    """Tell whether scores are formed operation by operation: as asked for, or as soft caps and sinks need it."""
    if builder.profile.attention == "eager" or builder.settings.flash_attn:
        return not builder.settings.flash_attn
    return part is not None and bool(part.sinks or part.logit_softcap)
