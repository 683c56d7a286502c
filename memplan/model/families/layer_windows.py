"""Windows of attention, layer by layer, as a released config states or means them."""

from collections.abc import Mapping
from typing import Any

DEFAULT_WINDOWS: Mapping[str, int] = {
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "olmo3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "cohere2", "exaone4"), 4096
    ),
    "gpt_oss": 128,
    "gemma4_text": 512,
    "gemma4_unified_text": 1024,
}
"""Windows where a config names none: each family's configuration class in transformers v5.23.0. Mistral's, 4,096 there, is
none here: entries of the catalog name a window only where there is one."""

EVERY_NTH_FULL: Mapping[str, int] = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
    "cohere2": 4,
    "exaone4": 4,
}
"""Families whose layers alternate between windows and full attention; every so many is full."""

MAX_WINDOW_LAYERS = 28
DEFAULT_CHUNK = 8192


def layer_windows(keys: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the window of each layer's attention, 0 where it looks back on everything.

    Args:
        keys: Keys of a ``config.json``, ``model_type`` among them.

    Source:
        ``layer_types`` of the configuration classes of transformers v5.23.0; Qwen3Moe's and Mistral's attention takes
        ``sliding_window`` in every layer.
    """
    kind = str(keys.get("model_type"))
    if kind == "llama4_text":
        return _chunks(keys, layers)
    window = _whole(keys, "sliding_window", 0 if "sliding_window" in keys else DEFAULT_WINDOWS.get(kind, 0))
    listed = keys.get("layer_types")
    if kind.startswith("gemma4"):  # whose last layer is full whatever its config says
        rest = listed if isinstance(listed, (list, tuple)) else ["sliding_attention"] * 5 + ["full_attention"]
        named = [rest[layer % len(rest)] for layer in range(layers - 1)]
        return (*(window if name == "sliding_attention" else 0 for name in named), 0)
    if isinstance(listed, (list, tuple)):
        return tuple(window if name == "sliding_attention" else 0 for name in listed)
    if kind in EVERY_NTH_FULL:
        nth = _whole(keys, "sliding_window_pattern", EVERY_NTH_FULL[kind])
        return tuple(window if (layer + 1) % nth else 0 for layer in range(layers))
    if not kind.startswith("qwen") and kind != "smollm3":
        return (window,) * layers
    if keys.get("use_sliding_window") is not True:
        return (0,) * layers
    if kind == "qwen3_moe":
        return (window,) * layers
    bound = _whole(keys, "max_window_layers", MAX_WINDOW_LAYERS, least=0)
    if kind == "qwen2_moe":
        return tuple(window if layer < bound and layer % 2 == 0 else 0 for layer in range(layers))
    if kind == "smollm3":
        return tuple(0 if rotates else window for rotates in rotating_layers(keys, layers))
    return tuple(window if layer >= bound else 0 for layer in range(layers))


def _chunks(keys: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the chunk of tokens that attention of each layer of Llama 4 is within; by default those that rotate have one."""
    # Source: ``Llama4TextConfig.__post_init__`` in transformers/models/llama4/configuration_llama4.py (5.23.0).
    chunk = _whole(keys, "attention_chunk_size", 0 if "attention_chunk_size" in keys else DEFAULT_CHUNK)
    listed = keys.get("layer_types")
    if isinstance(listed, (list, tuple)):
        return tuple(chunk if name == "chunked_attention" else 0 for name in listed)
    return tuple(chunk if rotates else 0 for rotates in rotating_layers(keys, layers))


def rotating_layers(keys: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return for each layer of SmolLM3 and Llama 4 whether it rotates; ``no_rope_layers`` holds 1 where it does."""
    listed = keys.get("no_rope_layers")
    if isinstance(listed, (list, tuple)) and listed:
        return tuple(bool(value) for value in listed[:layers])
    interval = _whole(keys, "no_rope_layer_interval", 4)
    return tuple((index + 1) % interval != 0 for index in range(layers))


def _whole(keys: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    """Return a number that is not less than ``least``, or what its absence means."""
    value = keys.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else default
