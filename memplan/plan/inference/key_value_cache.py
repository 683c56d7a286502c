"""The cache of keys and values: what each layer keeps of a token, and of how many tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memplan.errors import CannotAnswerError
from memplan.model.families.layer_windows import layer_windows
from memplan.model.gated_delta_net import GatedDeltaNet
from memplan.model.spec import LatentAttention, ModelSpec
from memplan.units import round_up

Layout = Literal["dynamic", "paged"]

PAGE_TOKENS = 16
"""Tokens of a block of a paged cache (``block_size`` of vllm/config/cache.py, CUDA's default)."""


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """What one layer keeps."""

    key_elements: int  # Numbers of one token's keys; with latent attention of what is compressed
    value_elements: int  # Numbers of one token's values; with latent attention of the shared rotated keys
    window: int  # The tokens that its attention looks back on, itself included; 0 for all

    def tokens(self, context: int, layout: Layout) -> int:
        """Return how many tokens of a sequence it keeps.

        Formula:
            ``min(context, window - 1)`` as transformers' DynamicCache, which adds the token at hand when it attends;
            whole blocks of ``min(context, window)`` in a paged cache.

        Source:
            transformers/cache_utils.py, DynamicSlidingWindowLayer.update (v5.23.0)
        """
        if layout == "dynamic":
            return min(context, self.window - 1) if self.window else context
        return round_up(min(context, self.window or context), PAGE_TOKENS)


def cached_layers(spec: ModelSpec, keys: Mapping[str, Any]) -> tuple[CachedLayer, ...]:
    """Return what every layer of a model keeps.

    Args:
        keys: Keys of its ``config.json``, which state windows.

    Latent attention keeps what is compressed, and the rotated part of the keys that all heads share (transformers 4 kept
    the keys and values of every head).

    Raises:
        CannotAnswerError: Layers keep a state, and not keys and values.

    Source:
        transformers/models/deepseek_v3/modeling_deepseek_v3.py (v5.23.0); https://arxiv.org/abs/2405.04434, 2.1.2
    """
    if spec.linear_attention:
        raise CannotAnswerError(
            f"{spec.name}: what gated delta networks keep of a sequence in inference is not modelled"
        )
    windows = layer_windows(keys, spec.num_hidden_layers)
    sizes = []
    for run in spec.runs:
        part = run.layer.attention
        if isinstance(part, GatedDeltaNet):
            kept = "what gated delta networks keep of a sequence in inference is not modelled"
            raise CannotAnswerError(f"{spec.name}: {kept}")
        if not isinstance(part, LatentAttention):
            own = (part.key_value_size, part.key_value_size)
        else:
            own = (part.kv_lora_rank, part.qk_rope_head_dim)
        sizes += [own] * run.count
    return tuple(CachedLayer(*size, window) for size, window in zip(sizes, windows, strict=True))
