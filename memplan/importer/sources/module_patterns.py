"""Adapters' targets that are given as a regular expression: which linear layers of a decoder it selects."""

import re

from memplan.documents.name_patterns import name_pattern

LINEARS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
"""Part of a layer -> its linear modules, in Llama's names, which most families have."""
PLACES = ("model.layers", "model.language_model.layers", "language_model.model.layers")
"""Where the layers of a text model stand, and of one with a vision tower beside it."""
OTHERS = (
    "model.visual.blocks.0.attn.qkv",
    "model.visual.blocks.0.attn.proj",
    "model.visual.blocks.0.mlp.up_proj",
    "model.visual.merger.mlp.0",
    "model.vision_tower.encoder.layers.0.self_attn.q_proj",
    "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
    "model.vision_model.encoder.layers.0.mlp.fc1",
    "model.multi_modal_projector.linear_1",
)
"""Modules of vision towers and projectors in transformers' models."""
LAYERS = (0, 1, 5, 10, 27, 63)


def selected_linears(pattern: str) -> list[str] | None:
    r"""Return the linear layers that a pattern selects in every layer of a decoder, or None where it selects other modules.

    A whole module name has to match, as in ``peft.utils.other.match_target_against_key`` (peft 0.21.2). A pattern that
    picks layers, or modules of a vision tower, selects others; so does one whose matching could take long.

    Example:
        >>> selected_linears(r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj")
        ['q_proj', 'up_proj', 'down_proj']
        >>> selected_linears(r".*layers.(0|1).self_attn.q_proj") is None
        True
    """
    try:
        matches = name_pattern(pattern).fullmatch
    except ValueError:
        return None
    if any(matches(name) for name in OTHERS):
        return None
    result: list[str] = []
    for place in PLACES:
        in_layer = [
            [name for part, names in LINEARS.items() for name in names if matches(f"{place}.{layer}.{part}.{name}")]
            for layer in LAYERS
        ]
        if any(names != in_layer[0] for names in in_layer):
            return None
        result += [name for name in in_layer[0] if name not in result]
    return (result + (["lm_head"] if matches("lm_head") else [])) or None


PATTERN_KINDS = ("layer-patterns", "prefixes", "parts-of-names", "regex")
"""Ways in which trainers' keys name parameters."""


def parameter_pattern(text: str, kind: str) -> str:
    r"""Return what names parameters in a trainer's way as a regular expression that is found in their names.

    Args:
        kind: ``layer-patterns`` are axolotl's: from the beginning of a name, dots being dots, rows in brackets behind them
            having a gradient like the others; ``prefixes`` and ``parts-of-names`` are what names begin with and contain.

    Example:
        >>> parameter_pattern("model.layers.2[0-9]+", "layer-patterns"), parameter_pattern("model.embed_tokens", "prefixes")
        ('^(?:model\\.layers\\.2[0-9]+)', '^model\\.embed_tokens')

    Source:
        ``LayerNamePattern`` in axolotl/utils/freeze.py (0.21.0); ``freeze_parameters`` in
        swift/utils/transformers_utils.py (ms-swift 4.6.0); ``_setup_freeze_tuning`` in llamafactory/model/adapter.py (0.9.5).
    """
    if kind == "layer-patterns":
        rows = re.fullmatch(r"(.+)\[[0-9]*(?::[0-9]*)?\]", text)
        literal = re.sub(r"\.(?!\+)", r"\.", rows[1] if rows else text)
        return f"^(?:{literal})"
    return text if kind == "regex" else f"{'^' if kind == 'prefixes' else ''}{re.escape(text)}"
